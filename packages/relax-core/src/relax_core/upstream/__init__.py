"""Corrections of upstream faults at run time: one small named object each, listed by `list_corrections`."""

from relax_core.upstream.catalogue import install_corrections, list_corrections
from relax_core.upstream.correction import Correction, UnsupportedUpstreamError
from relax_core.upstream.hook import on_import

__all__ = [
    "Correction",
    "UnsupportedUpstreamError",
    "install_corrections",
    "list_corrections",
    "on_import",
]
