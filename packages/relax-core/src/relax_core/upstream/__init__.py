"""Corrections of upstream faults at run time: one small named object each, listed by `list_corrections`.

Importing this package makes a later `import megatron.core` quick and quiet (`import_time`); everything else
waits for `install_corrections`, which `relax_core.device.initialise` calls.
"""

from relax_core.upstream.catalogue import install_corrections, list_corrections
from relax_core.upstream.correction import Correction, UnsupportedUpstreamError
from relax_core.upstream.hook import on_import
from relax_core.upstream.import_time import prepare_import

__all__ = [
    "Correction",
    "UnsupportedUpstreamError",
    "install_corrections",
    "list_corrections",
    "on_import",
]

prepare_import()
