"""Progress on the terminal: one live view, plain lines where there is no terminal, or nothing."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.markup import escape

from relax_core.run.eta import Eta
from relax_core.run.live import LiveView
from relax_core.run.words import duration, number


class Progress(Protocol):
    """What a person sees while a run runs."""

    def phase(self, name: str | None) -> None:
        """A phase began, or (None) none is running."""
        ...

    def step(self, record: Mapping[str, Any]) -> None:
        """A step is done; `record` is its line of `metrics.jsonl`."""
        ...

    def close(self) -> None:
        """Leaves the last state on the terminal. Idempotent."""
        ...


class NoProgress:
    """Shows nothing."""

    def phase(self, name: str | None) -> None:
        """Ignored."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Ignored."""

    def close(self) -> None:
        """Ignored."""


class PlainLines:
    """One line a step, fit for a file or a pipe."""

    def __init__(self, console: Console, *, total: int, eta: Eta) -> None:
        self._console = console
        self._total = total
        self._eta = eta

    def phase(self, name: str | None) -> None:
        """Plain lines do not show phases as they run."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Prints the step's numbers and where its time went."""
        step = int(record["step"])
        left = self._eta.after(step)
        parts = [f"step {step}/{self._total}" if step else "before training"]
        parts += [f"{label} {number(record[name])}" for name, label in _SHOWN if name in record]
        time = record.get("time", {})
        if "tokens_per_s" in time:
            parts.append(f"{number(time['tokens_per_s'])} tokens/s")
        phases = [f"{name} {value:.2f}" for name, value in time.get("phases", {}).items()]
        if phases:
            parts.append(f"{time['total']:.2f} s ({', '.join(phases)})")
        if left is not None and step < self._total:
            parts.append(f"ETA {duration(left)}")
        self._console.print(escape("  ".join(parts)), soft_wrap=True, highlight=False)

    def close(self) -> None:
        """Nothing is pending."""


_SHOWN = (
    ("reward", "reward"),
    ("accuracy", "accuracy"),
    ("eval_accuracy", "held-out"),
    ("loss", "loss"),
    ("entropy", "entropy"),
    ("kl", "KL"),
    ("policy_kl", "KL of update"),
)


def open_progress(
    kind: Literal["auto", "live", "plain", "none"],
    console: Console,
    *,
    title: str,
    total: int,
    done: int,
    clock: Callable[[], float],
) -> Progress:
    """The view that `run.progress` asks for.

    Args:
        kind: `auto` is live on a terminal and plain elsewhere.
        console: where it is shown.
        title: the run's name.
        total: steps of the run.
        done: steps done before this process began.
        clock: gives seconds.
    """
    eta = Eta(clock, total=total, done=done)
    if kind == "none":
        return NoProgress()
    if kind == "live" or (kind == "auto" and console.is_terminal):
        return LiveView(console, title=title, total=total, done=done, eta=eta)
    return PlainLines(console, total=total, eta=eta)
