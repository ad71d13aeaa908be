"""Digests by which a trainer and an engine agree on weights without moving them.

R rows of C words of 8 bytes.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from relax_rollout.digest_sums import COLUMNS, sums_of

WHOLE_BYTES = 2**15
"""Tensors up to this size are hashed byte by byte; of larger ones sums are, taken where the tensor is."""


def tensor_digest(tensor: Tensor) -> str:
    """A 16-digit hexadecimal digest of dtype, shape and bytes, the same on every device.

    A tensor of more than ``WHOLE_BYTES`` is read as a table of 64-bit words; the sums of its columns, of its
    rows, and of its rows' upper halves, modulo 2**64 and each times an odd number of its place, stand for its
    bytes. Any change within one word shows for certain; so does, but for chance, any other, unless it keeps
    all those sums. It costs a few passes over the tensor in the memory where it is (on CUDA one), and no copy
    of it.

    Equal tensors have equal digests, so a trainer casts its tensor to the engine's dtype before it compares.
    """
    return tensor_digests({"": tensor})[""]


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """:func:`tensor_digest` of each, with one transfer to the host per device instead of one per tensor."""
    return TensorDigests(tensors)()


class TensorDigests:
    """:func:`tensor_digest` of the same tensors again and again, as they are at each call.

    Args:
        tensors: by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = list(tensors)
        kept: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kept.setdefault(tensor.device, {})[name] = tensor
        self._devices = [_OneDevice(listed) for listed in kept.values()]

    def __call__(self) -> dict[str, str]:
        """Name -> digest."""
        found = {name: digest for device in self._devices for name, digest in device.digests().items()}
        return {name: found[name] for name in self._names}


class _OneDevice:
    """Tensors of one device."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._read: Callable[[], Tensor] | None = None

    @torch.no_grad()
    def digests(self) -> dict[str, str]:
        read = self._read or self._prepare()
        host = read().to("cpu").numpy()
        sums, rest, digests = 0, 24 * self._tables, {}
        for name, head, table, size in self._parts:
            digest = hashlib.blake2b(head, digest_size=8)
            if table:
                digest.update(host[sums : sums + 24].data)
                sums += 24
            digest.update(host[rest : rest + size].data)
            rest += size
            digests[name] = digest.hexdigest()
        return digests

    def _prepare(self) -> Callable[[], Tensor]:
        """Finds what of each tensor is hashed: the sums of all tables, then the bytes beside them."""
        stay, tables, rest = True, [], []
        self._parts: list[tuple[str, bytes, bool, int]] = []
        for name, tensor in self._tensors.items():
            byte = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            head = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".encode()
            size = 8 * COLUMNS * (byte.numel() // (8 * COLUMNS)) if byte.numel() > WHOLE_BYTES else 0
            if size:
                byte = byte.clone() if byte.storage_offset() % 8 else byte
                tables.append(byte[:size].view(torch.int64).view(-1, COLUMNS))
            stay = stay and byte.data_ptr() == tensor.data_ptr()
            rest.append(byte[size:])
            self._parts.append((name, head, size > 0, byte.numel() - size))
        self._tables = len(tables)
        sums = sums_of(tables)

        def read() -> Tensor:
            return torch.cat([sums().view(torch.uint8).view(-1), *rest] if tables else rest)

        # A copy, made of a tensor that lies in no order of its own, is of this time alone.
        self._read = read if stay else None
        return read
