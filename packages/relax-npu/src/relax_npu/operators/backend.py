"""The backend object that relax-kernels' registry asks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from relax_npu.operators.table import BY_NAME

if TYPE_CHECKING:
    from relax_kernels import Call

_MOST_CHOICES = 512
_MOST_ROTATED = 896
_LARGEST_HEAD = 512


class AscendBackend:
    """Serves the NPU; a call that it leaves aside goes to the torch reference on the same device."""

    name = "ascend"
    device_types: frozenset[str] | None = frozenset({"npu"})
    priority = 100
    operators = frozenset(BY_NAME)

    def refusal(self, call: Call) -> str | None:
        """Say why a call is left to another backend; None if it is served."""
        capability = BY_NAME[call.op]
        missing = [name for name in capability.needs if not has_operator(name)]
        if missing:
            return f"needs {', '.join(missing)}, which no installed package registers"
        dtype = str(call.dtype).removeprefix("torch.")
        if dtype not in capability.dtypes:
            return f"takes {', '.join(capability.dtypes)}, given {dtype}"
        check = _REFUSALS.get(call.op)
        return check(call) if check is not None else None

    def implementation(self, op: str) -> Callable[..., Any]:
        """Return the function for an operator."""
        return _function(op)

    def describe(self, call: Call) -> str:
        """Name what would run."""
        return BY_NAME[call.op].runs


def has_operator(name: str) -> bool:
    """Whether an installed package registered `torch.ops.npu.<name>`."""
    import torch

    return hasattr(torch.ops.npu, name)


@cache
def _function(op: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"relax_npu.operators.{BY_NAME[op].module}"), op)
    return function


def create() -> AscendBackend:
    """Entry point of the registry.

    fla_npu is imported here if it is there, for it must be loaded before the first use of the device.

    Raises:
        ImportError: torch_npu is not installed or does not work here.
    """
    _load("torch_npu", required=True)
    _load("fla_npu", required=False)
    return AscendBackend()


def _load(name: str, *, required: bool) -> None:
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if required or error.name != name:
            raise
    except (OSError, RuntimeError) as error:
        raise ImportError(
            f"{name} is installed and does not load: {error}; run `relax-npu doctor`"
        ) from error


def _attention(call: Call) -> str | None:
    sizes, keys, queries = call.sizes, call.options["cu_seqlens_k"], call.cu_seqlens
    assert queries is not None
    if sizes["D"] != sizes["E"]:
        return f"wants values of the keys' head dim, given {sizes['E']} and {sizes['D']}"
    if sizes["D"] % 16 or sizes["D"] > _LARGEST_HEAD:
        return f"takes head dims up to {_LARGEST_HEAD} in sixteens, given {sizes['D']}"
    if not (sizes["T"] and sizes["S"]):
        return "wants at least one query and one key"
    for n, m in zip(queries.lengths, keys.lengths, strict=True):
        if n and not m:
            return f"has no answer for {n} queries without a key"
        if call.options["causal"] and n > m:
            return f"has no answer for queries that see no key: {n} queries over {m} keys, causal"
    return None


def _rotary(call: Call) -> str | None:
    rotated = call.sizes["R"]
    return (
        None if 0 < rotated <= _MOST_ROTATED else f"rotates up to {_MOST_ROTATED} features, given {rotated}"
    )


def _grouped(call: Call) -> str | None:
    sizes = call.sizes
    if sizes["D"] % 16 or sizes["F"] % 16:
        return f"takes features in sixteens, given {sizes['D']} and {sizes['F']}"
    return None if sizes["P"] and sizes["E"] else "wants at least one row and one expert"


def _moved(call: Call) -> str | None:
    sizes = call.sizes
    if not sizes["P"]:
        return "wants at least one row"
    return None if sizes["K"] <= _MOST_CHOICES else f"has up to {_MOST_CHOICES} choices, given {sizes['K']}"


def _conv(call: Call) -> str | None:
    sizes = call.sizes
    if sizes["W"] > 4 or sizes["C"] % 16:
        return f"has 2 to 4 taps and channels in sixteens, given {sizes['W']} and {sizes['C']}"
    return None if sizes["T"] else "wants at least one token"


def _delta_rule(call: Call) -> str | None:
    sizes = call.sizes
    if sizes["K"] > 128 or sizes["V"] > 256:
        return f"has key dims up to 128 and value dims up to 256, given {sizes['K']} and {sizes['V']}"
    return None if sizes["T"] else "wants at least one token"


_REFUSALS: dict[str, Callable[[Call], str | None]] = {
    "attention": _attention,
    "rotary": _rotary,
    "grouped_matmul": _grouped,
    "permute_tokens": _moved,
    "unpermute_tokens": _moved,
    "causal_conv1d": _conv,
    "gated_delta_rule": _delta_rule,
}
