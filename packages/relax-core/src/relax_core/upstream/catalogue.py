"""All corrections, in the order in which they are installed."""

from relax_core.upstream.compiler import COMPILERS
from relax_core.upstream.correction import Correction
from relax_core.upstream.distributed_optimizer import GROUP_ORDER
from relax_core.upstream.import_time import JIT_FUSER
from relax_core.upstream.recompute import NORM_RECOMPUTE

_ALL: tuple[Correction, ...] = (
    GROUP_ORDER,
    NORM_RECOMPUTE,
    JIT_FUSER,
    *COMPILERS,
)


def list_corrections() -> tuple[Correction, ...]:
    """Every correction this version of Relax knows, installed or not."""
    return _ALL


def install_corrections() -> tuple[Correction, ...]:
    """Installs every correction that this process needs, and returns those installed. Idempotent.

    Raises:
        UnsupportedUpstreamError: an upstream version is outside of what a needed correction was made for.
    """
    for correction in _ALL:
        correction.install()
    return tuple(correction for correction in _ALL if correction.installed)
