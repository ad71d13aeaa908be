"""The live view: step, metrics, a curve of the reward and where the time goes, redrawn in place."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax_core.run.eta import Eta
from relax_core.run.metrics import PHASES
from relax_core.run.words import duration, number, sparkline

_COLOURS = dict(
    zip(PHASES, ("cyan", "yellow", "blue", "magenta", "green", "bright_black", "red"), strict=True)
)
_CELLS = (
    ("reward", "reward"),
    ("accuracy", "accuracy"),
    ("eval_accuracy", "held-out"),
    ("loss", "loss"),
    ("entropy", "entropy"),
    ("kl", "KL"),
    ("policy_kl", "KL of update"),
    ("response_length_mean", "length"),
    ("mtp_acceptance", "MTP accept."),
)


class LiveView:
    """Redraws itself a few times a second until closed."""

    def __init__(self, console: Console, *, title: str, total: int, done: int, eta: Eta) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._step = done
        self._eta = eta
        self._left: float | None = None
        self._phase: str | None = None
        self._last: dict[str, Any] = {}
        self._rewards: list[float] = []
        self._first_eval: float | None = None
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)
        self._live.start()

    def phase(self, name: str | None) -> None:
        """Shows which phase is running."""
        self._phase = name

    def step(self, record: Mapping[str, Any]) -> None:
        """Takes over the numbers of a finished step."""
        self._step = int(record["step"])
        self._left = self._eta.after(self._step)
        self._last |= record
        if "reward" in record:
            self._rewards.append(float(record["reward"]))
        if self._first_eval is None and "eval_accuracy" in record:
            self._first_eval = float(record["eval_accuracy"])
        self._live.refresh()

    def close(self) -> None:
        """Leaves the last state on the terminal. Idempotent."""
        self._phase = None
        if self._live.is_started:
            self._live.stop()
            if not self._console.is_terminal:
                self._console.line()

    def _render(self) -> RenderableType:
        rows: list[RenderableType] = [self._head()]
        cells = [(label, self._value(name)) for name, label in _CELLS if name in self._last]
        rate = self._last.get("time", {}).get("tokens_per_s")
        if rate is not None:
            cells.append(("tokens/s", number(rate)))
        if cells:
            rows.append(_grid(cells))
        width = max(10, self._console.width - 18)
        if len(self._rewards) > 1:
            curve = sparkline(self._rewards, width)
            rows.append(Text.assemble(("reward  ", "dim"), (curve, "green")))
        phases = self._last.get("time", {}).get("phases", {})
        if phases:
            rows += [_bar(phases, width), _legend(phases)]
        return Panel(Group(*rows), title=self._title, title_align="left", border_style="dim")

    def _head(self) -> RenderableType:
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        left = f"ETA {duration(self._left)}" if self._left is not None else "ETA -"
        doing = Text(self._phase or "", style=_COLOURS.get(self._phase or "", "dim"))
        head.add_row(
            Text(f"step {self._step}/{self._total}", style="bold"),
            ProgressBar(total=self._total, completed=self._step),
            Text.assemble(left, "  ", doing),
        )
        return head

    def _value(self, name: str) -> str:
        value = number(self._last[name])
        if name == "eval_accuracy" and self._first_eval is not None and self._step:
            return f"{number(self._first_eval)} → {value}"
        return value


def _grid(cells: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 3))
    for _ in range(3):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(style="bold", no_wrap=True)
    for start in range(0, len(cells), 3):
        grid.add_row(*(text for cell in cells[start : start + 3] for text in cell))
    return grid


def _bar(phases: Mapping[str, float], width: int) -> Text:
    total = sum(phases.values()) or 1.0
    bar = Text.assemble(("time    ", "dim"))
    for name, seconds in phases.items():
        bar.append("█" * round(seconds / total * width), style=_COLOURS.get(name, "white"))
    return bar


def _legend(phases: Mapping[str, float]) -> Text:
    legend = Text("        ")
    for name, seconds in phases.items():
        legend.append("■ ", style=_COLOURS.get(name, "white"))
        legend.append(f"{name} {seconds:.2f} s   ", style="dim")
    return legend
