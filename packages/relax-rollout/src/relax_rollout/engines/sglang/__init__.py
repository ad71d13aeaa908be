"""The engine ``sglang``: servers of SGLang, started here or elsewhere."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_rollout.engines.sglang.config import SglangConfig
    from relax_rollout.engines.sglang.engine import SglangEngine, create

__all__ = ["SglangConfig", "SglangEngine", "create"]


def __getattr__(name: str) -> Any:
    """Import the client's side only where it is asked for: servers import this package too."""
    if name in ("SglangEngine", "create"):
        from relax_rollout.engines.sglang import engine

        return getattr(engine, name)
    if name == "SglangConfig":
        from relax_rollout.engines.sglang.config import SglangConfig

        return SglangConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
