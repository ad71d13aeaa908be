"""A checkpoint seen with another number of multi-token-prediction layers than it stores."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from relax_bridge.checkpoint import DTYPES, Checkpoint, Stored
from relax_bridge.errors import MtpMismatchError
from relax_bridge.model_map import ModelMap, mtp_layers_of
from relax_bridge.table import Entry

MtpInit = Literal["copy", "random", "truncate"]


def adapt_mtp(
    checkpoint: Checkpoint,
    table: ModelMap,
    *,
    init: MtpInit | None = None,
    std: float | None = None,
    seed: int = 0,
) -> Checkpoint:
    """The checkpoint with as many MTP layers as the model has; what it stores is left alone.

    The result reads like any checkpoint, so import, audit and `write_checkpoint(like=...)` take it; its
    config says the model's number.

    Args:
        checkpoint: with k layers; of one without weights only the config is changed.
        table: the map of the model, with n layers.
        init: `copy`: layer j >= k is layer j % k again. `random`: the weights of the added layers are drawn,
            matrices from a normal distribution, norms (stored zero-centred) as zeros. `truncate`: layers from
            n on are left out. None refuses k != n.
        std: the standard deviation of `random`.
        seed: of `random`; every layout draws the same weights.

    Raises:
        MtpMismatchError: the numbers differ and `init` is None or cannot bridge them; both are named.
    """
    stored, wanted = mtp_layers_of(checkpoint.names), table.mtp_layers
    if stored == wanted or not checkpoint.names:
        said = _said(checkpoint.config)
        silent = said is None and (wanted == 0 or bool(checkpoint.names))
        return checkpoint if silent or said == wanted else _MtpView(checkpoint, wanted)
    both = f"{checkpoint.path} holds {stored} MTP layers and the model has {wanted}"
    if init is None:
        table.check(checkpoint)
    if (init == "truncate") != (wanted < stored):
        fits = "truncate" if wanted < stored else "copy or random"
        raise MtpMismatchError(f"{both}: mtp.init {init} cannot make one of the other; choose {fits}")
    if init == "copy" and not stored:
        raise MtpMismatchError(f"{both}: mtp.init copy needs a layer to copy; choose random")
    if init == "random" and not (std is not None and 0 < std < math.inf):
        raise MtpMismatchError(
            f"{both}: mtp.init random needs a finite std above 0 (say the model's initializer_range)"
        )
    if init == "truncate":
        gone = tuple(f"mtp.layers.{layer}." for layer in range(wanted, stored)) if wanted else ("mtp.",)
        dropped = {name for name in checkpoint.names if name.startswith(gone)}
        return _MtpView(checkpoint, wanted, dropped=dropped)
    layers = _layers(table)
    alias: dict[str, str] = {}
    drawn: dict[str, tuple[int, ...]] = {}
    for layer in range(stored, wanted):
        for key, entry in layers[layer].items():
            if init == "copy":
                alias |= dict(zip(entry.hf, layers[layer % stored][key].hf, strict=True))
            else:
                drawn |= dict(zip(entry.hf, entry.hf_shapes, strict=True))
    dtype = checkpoint.stored_dtype(table.entries[0].hf[0])
    return _MtpView(checkpoint, wanted, alias=alias, drawn=drawn, dtype=dtype, std=std or 0.0, seed=seed)


def _layers(table: ModelMap) -> dict[int, dict[str, Entry]]:
    """Per MTP layer, its entries by their name inside the layer."""
    found: dict[int, dict[str, Entry]] = {}
    for entry in table.entries:
        if entry.megatron.startswith("mtp.layers.") and entry.layer is not None:
            inside = entry.megatron.removeprefix(f"mtp.layers.{entry.layer}.")
            found.setdefault(entry.layer, {})[inside] = entry
    return found


class _MtpView(Checkpoint):
    """A checkpoint with tensors left out, repeated under further names, or drawn."""

    def __init__(
        self,
        base: Checkpoint,
        layers: int,
        *,
        dropped: set[str] | None = None,
        alias: Mapping[str, str] | None = None,
        drawn: Mapping[str, tuple[int, ...]] | None = None,
        dtype: str = "",
        std: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.path = base.path
        self.config = _with_layers(base.config, layers)
        self.config_changed = True
        self.index_metadata = base.index_metadata
        self._files = base._files
        self._raw_files = base._raw_files
        self._alias, self._drawn = dict(alias or {}), dict(drawn or {})
        self._std, self._seed = std, seed
        self._stored = {name: at for name, at in base._stored.items() if name not in (dropped or ())}
        self._stored |= {name: base._stored[source] for name, source in self._alias.items()}
        self._stored |= {name: Stored(base.files[-1], shape, dtype) for name, shape in self._drawn.items()}

    def tensor(self, name: str) -> Tensor:
        """Reads or draws one tensor."""
        if name not in self._drawn:
            return super().tensor(self._alias.get(name, name))
        shape = self.shape(name)
        if len(shape) < 3:
            return self._draw(name, None)
        return torch.stack([self._draw(name, place) for place in range(shape[0])])

    def slice(self, name: str, *index: slice) -> Tensor:
        """Reads or draws a part of a tensor."""
        if name in self._drawn:
            return self.tensor(name)[index]
        return super().slice(self._alias.get(name, name), *index)

    def read_into(
        self, out: Tensor, name: str, *, row: int = 0, column: int | None = None, stack: int | None = None
    ) -> None:
        """Fills `out` with a window of a tensor."""
        if name not in self._drawn:
            super().read_into(out, self._alias.get(name, name), row=row, column=column, stack=stack)
            return
        block = self._draw(name, stack)[row : row + out.shape[0]]
        out.copy_(block if column is None else block[:, column : column + out.shape[1]])

    def _draw(self, name: str, place: int | None) -> Tensor:
        """A tensor, or its `place` along the leading axis; the same wherever and however often it is
        drawn."""
        shape = self.shape(name) if place is None else self.shape(name)[1:]
        dtype = DTYPES[self.stored_dtype(name)]
        if len(shape) < 2:
            return torch.zeros(shape, dtype=dtype)
        key = hashlib.sha256(f"{self._seed}/{name}/{place}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") % 2**63)
        return (torch.randn(shape, generator=generator) * self._std).to(dtype)


def _said(config: Mapping[str, Any]) -> int | None:
    """The number of MTP layers that a config speaks of; None where it is silent."""
    text = config.get("text_config")
    said: int | None = (text if isinstance(text, Mapping) else config).get("mtp_num_hidden_layers")
    return said


def _with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    changed = dict(config)
    if isinstance(changed.get("text_config"), Mapping):
        changed["text_config"] = {**changed["text_config"], "mtp_num_hidden_layers": layers}
    else:
        changed["mtp_num_hidden_layers"] = layers
    return changed
