"""Puts the runs' data, the style and the script into one HTML page."""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from relax_core.report.read import RunData
from relax_core.run.files import to_json
from relax_core.run.metrics import METRICS, PHASES, describe
from relax_core.run.secrets import Masker

_SCRIPTS = (
    "dom.js",
    "scale.js",
    "chart.js",
    "curves.js",
    "samples.js",
    "overview.js",
    "alerts.js",
    "values.js",
    "main.js",
)
MAX_SAMPLES = 5000


def render(runs: Sequence[RunData]) -> str:
    """Draws the page.

    Everything the runs hold is data to the page: it is embedded as JSON in which no `<` occurs, and shown as
    text only. A content security policy admits the page's own script and style by their hash, nothing else.

    Args:
        runs: at least one; their labels differ.

    Returns:
        The HTML, self-contained.
    """
    assets = files("relax_core.report") / "assets"
    style = (assets / "style.css").read_text(encoding="utf-8")
    script = "\n".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    title = f"Relax: {', '.join(run.label for run in runs)}"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n'
        "<body>\n<noscript>This report draws itself with JavaScript, which is switched off.</noscript>\n"
        f'<script type="application/json" id="data">{_inert(Masker().tree(_data(runs)))}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inert(data: Any) -> str:
    """JSON that cannot end its script element, whatever it holds."""
    return to_json(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(runs: Sequence[RunData]) -> dict[str, Any]:
    names = dict.fromkeys(metric.name for metric in METRICS)
    names |= dict.fromkeys(
        name for run in runs for record in run.metrics for name in record if name not in ("step", "time")
    )
    known = {name: describe(name) for name in names}
    return {
        "metrics": [
            {
                "name": name,
                "label": metric.label,
                "group": metric.group,
                "doc": metric.doc,
                "unit": metric.unit,
            }
            for name, metric in known.items()
        ],
        "phases": PHASES,
        "runs": [_run(run) for run in runs],
    }


def _run(run: RunData) -> dict[str, Any]:
    kept = _thinned(run.samples)
    return {
        "label": run.label,
        "metrics": run.metrics,
        "samples": kept,
        "alerts": run.alerts,
        "samplesLeftOut": len(run.samples) - len(kept),
        "summary": run.summary,
        "config": {
            f"{section}.{name}": json.dumps(value, ensure_ascii=False, default=str)
            for section, settings in run.config.items()
            if isinstance(settings, dict)
            for name, value in settings.items()
        },
    }


def _thinned(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most `MAX_SAMPLES`, taken evenly over the run: the page must open quickly."""
    if len(samples) <= MAX_SAMPLES:
        return list(samples)
    return [samples[i * len(samples) // MAX_SAMPLES] for i in range(MAX_SAMPLES)]
