"""A plan as one HTML page: a bar of memory for every device, a bar of time for a step. It runs no script."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from relax_core.plan.devices import GIB
from relax_core.plan.result import Plan
from relax_core.plan.text import KINDS, groups, plan_lines

_COLOURS = {
    kind: f'fill="var(--c{1 + index % 8})" fill-opacity="{(1, 0.5, 0.25)[index // 8]}"'
    for index, kind in enumerate(KINDS)
}
"""Each kind's own: eight colours, in three shades."""
_PHASES = ("sampling", "score", "train", "update")
_OWN_STYLE = """
.bars text { fill: var(--ink); font-size: 12px; font-variant-numeric: tabular-nums; }
.bars .limit { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 4 3; }
.bars .soft { fill: var(--soft); }
.bars .over { fill: var(--bad); font-weight: 600; }
pre { margin: 0; padding: 14px; overflow-x: auto; font-size: 12.5px; }
"""
_WIDTH, _LEFT, _RIGHT, _HEIGHT, _GAP = 1100, 260, 140, 22, 12


def render_plan(plan: Plan) -> str:
    """Draws the page; self-contained, in the style of the report."""
    style = (files("relax_core.report") / "assets" / "style.css").read_text(encoding="utf-8") + _OWN_STYLE
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    title = f"Plan of {plan.recipe or 'a run'}"
    body = [f"<header><h1>{escape(title)}<span>{escape(plan.device.name)}</span></h1></header><main>"]
    if plan.devices:
        body += [
            "<h2>Memory of each device at its fullest, GiB</h2>",
            f'<figure class="card chart wide">{_memory(plan)}</figure>',
            "<h2>A step, seconds</h2>",
            f'<figure class="card chart wide">{_time(plan)}</figure>',
        ]
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    text = escape("\n".join(plan_lines(plan)))
    body.append(f'<h2>In words</h2><pre class="card">{text}</pre></main>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n'
        f"<body>\n{''.join(body)}\n</body>\n</html>\n"
    )


def _memory(plan: Plan) -> str:
    rows = groups(plan)
    most = max(max(use.peak, use.limit) for _, use in rows)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    bars = []
    for number, (names, use) in enumerate(rows):
        top = number * (_HEIGHT + _GAP) + 4
        parts = [(kind, use.parts[kind]) for kind in KINDS if use.parts.get(kind)]
        bars.append(_bar(names, parts, top, scale, _COLOURS))
        colour = "over" if use.peak > use.limit else "soft"
        end = _LEFT + use.peak * scale + 8
        words = f"{use.peak / GIB:.1f}, {use.phase}"
        bars.append(f'<text class="{colour}" x="{end:.1f}" y="{top + 15}">{words}</text>')
    height = len(rows) * (_HEIGHT + _GAP) + 24
    at = _LEFT + rows[0][1].limit * scale
    bars.append(f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height - 20}"/>')
    limit = f"{rows[0][1].limit / GIB:.1f} there"
    bars.append(f'<text class="soft" x="{at - 4:.1f}" y="{height - 6}" text-anchor="end">{limit}</text>')
    used = [kind for kind in KINDS if any(use.parts.get(kind) for _, use in rows)]
    return _svg(bars, height, "Memory of each device") + _legend(used, _COLOURS)


def _time(plan: Plan) -> str:
    parts = [(phase, plan.phases[phase]) for phase in _PHASES if plan.phases.get(phase)]
    total = sum(seconds for _, seconds in parts)
    colours = {phase: f'fill="var(--c{1 + index})"' for index, phase in enumerate(_PHASES)}
    scale = (_WIDTH - _LEFT - _RIGHT) / max(total, 1e-9)
    bars = [_bar(f"a step: {plan.step_seconds:.1f} s", parts, 4, scale, colours)]
    return _svg(bars, _HEIGHT + 12, "Time of a step") + _legend([phase for phase, _ in parts], colours)


def _bar(
    name: str, parts: Sequence[tuple[str, float]], top: float, scale: float, colours: Mapping[str, str]
) -> str:
    found = [f'<text x="{_LEFT - 10}" y="{top + 15}" text-anchor="end">{escape(name)}</text>']
    x = float(_LEFT)
    for kind, size in parts:
        width = size * scale
        shown = f"{size / GIB:.2f} GiB" if size > 1e6 else f"{size:.2f} s"
        found.append(
            f'<rect x="{x:.1f}" y="{top}" width="{max(0.5, width):.1f}" height="{_HEIGHT}" '
            f"{colours[kind]}><title>{escape(kind)}: {shown}</title></rect>"
        )
        x += width
    return "".join(found)


def _svg(shapes: Iterable[str], height: float, label: str) -> str:
    return (
        f'<svg class="plot bars" role="img" aria-label="{escape(label)}" viewBox="0 0 {_WIDTH} {height}">'
        f"{''.join(shapes)}</svg>"
    )


def _legend(kinds: Iterable[str], colours: Mapping[str, str]) -> str:
    items = "".join(
        '<li><svg class="swatch" width="10" height="10">'
        f'<rect width="10" height="10" {colours[kind]}/></svg>{escape(kind)}</li>'
        for kind in kinds
    )
    return f'<ul class="legend">{items}</ul>'
