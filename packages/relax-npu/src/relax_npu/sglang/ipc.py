"""Weights handed to SGLang through shared memory of a die: one payload for each tensor-parallel rank.

A handle of a die's memory can be opened on that die only. A payload says, in the place where torch_npu tells
the sender's device, which die it lies on, by its physical id; sender and receiver number dies otherwise alike
only by luck. SGLang takes a list with one payload for each rank and overwrites that place with the rank's own
device, so that payloads in another order are opened where they do not lie. The correction compares instead.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import torch

from relax_npu.upstream.fix import FixMismatchError, replace
from relax_npu.visible import VisibleDevicesError, logical_index

DEVICE_PLACE = 6
"""Where torch_npu's `rebuild_npu_tensor` is told the device, among its 15 arguments."""
ARGUMENTS = 15


class PayloadError(ValueError):
    """A payload of another die than the rank's, or none."""


class _Pickler(ForkingPickler):
    """torch's pickler of tensors for other processes, which names the die by its physical id."""

    def __init__(self, file: io.BytesIO, visible: Sequence[int]) -> None:
        super().__init__(file)
        self._visible = visible

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.device.type == "npu"):
            return NotImplemented
        reducers: Mapping[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        rebuild, arguments = reducers[type(value)](value)
        if len(arguments) != ARGUMENTS:
            raise FixMismatchError(
                f"torch_npu hands a tensor over by {len(arguments)} values instead of {ARGUMENTS}"
            )
        die = self._visible[value.device.index or 0]
        return rebuild, (*arguments[:DEVICE_PLACE], die, *arguments[DEVICE_PLACE + 1 :])


def payload(named_tensors: Sequence[tuple[str, torch.Tensor]], visible: Sequence[int]) -> str:
    """Serialises tensors of this process's die for the rank of a server on the same die.

    Args:
        named_tensors: names of the checkpoint and tensors, which must live until the server has taken them.
        visible: the physical ids that this process sees (`NpuDevice.visible_ids`).

    Returns:
        Base64, as an element of SGLang's `serialized_named_tensors`.
    """
    file = io.BytesIO()
    _Pickler(file, visible).dump(list(named_tensors))
    return base64.b64encode(file.getvalue()).decode()


def per_rank(payloads: Mapping[int, str], dies: Sequence[int]) -> list[str]:
    """Puts payloads in the order of a server's tensor-parallel ranks.

    Args:
        payloads: by the physical id of the die that each lies on.
        dies: the physical id of each rank's die.

    Raises:
        PayloadError: a rank has none, or two ranks share a die.
    """
    missing = [die for die in dies if die not in payloads]
    if missing or len(set(dies)) != len(dies):
        raise PayloadError(
            f"the server's ranks are on NPUs {list(dies)}, payloads lie on {sorted(payloads)}: give each "
            "rank one from its own die, so the trainer must hold the weights on every die of the server"
        )
    return [payloads[die] for die in dies]


def apply(module: ModuleType) -> None:
    """Corrects `sglang.srt.utils.patch_torch`."""
    if module._REDUCE_TENSOR_ARG_DEVICE_INDEX != DEVICE_PLACE:
        raise FixMismatchError("SGLang expects a tensor's device in another place of a payload")

    def on_own_die(device: int) -> int:
        own = module.SGLANG_TP_RANK
        if own is None:
            raise PayloadError("a payload arrived before the rank's device was known (register_sgl_tp_rank)")
        visible = _visible()
        try:
            index = logical_index(device, visible)
        except VisibleDevicesError as error:
            raise PayloadError(f"a payload lies on a die that this server does not see: {error}") from error
        if index != own:
            raise PayloadError(
                f"the rank on NPU {visible[own]} was given the payload of NPU {device}; put payloads in the "
                "order of the ranks (relax_npu.sglang.ipc.per_rank)"
            )
        return index

    replace(module, "npu_verl_to_sglang", on_own_die)


def _visible() -> list[int]:
    from relax_npu.device import NpuDevice

    return [int(number) for number in NpuDevice().visible_ids()]
