"""The report of one or more runs: a single HTML page that needs no network."""

from relax_core.report.page import render
from relax_core.report.read import ReportError, RunData, read_run

__all__ = ["ReportError", "RunData", "read_run", "render"]
