"""Corrections of upstream faults at run time: one small named object each, listed by `list_corrections`.

Importing this package, before torch, makes later imports quick and quiet (`import_time`); everything else
waits for `install_corrections`, which `relax_core.device.initialise` calls.
"""

from typing import TYPE_CHECKING

from relax_core.lazy import lazy_names
from relax_core.upstream.correction import Correction, UnsupportedUpstreamError
from relax_core.upstream.hook import on_import
from relax_core.upstream.import_time import prepare_import

if TYPE_CHECKING:
    from relax_core.upstream.catalogue import install_corrections, list_corrections

__all__ = [
    "Correction",
    "UnsupportedUpstreamError",
    "install_corrections",
    "list_corrections",
    "on_import",
]

__getattr__ = lazy_names(__name__, {"install_corrections": "catalogue", "list_corrections": "catalogue"})

prepare_import()
