"""Digests by which a trainer and an engine agree on weights without moving them.

W words of 8 bytes, R rows of C words.
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

WHOLE_BYTES = 2**20
"""Tensors up to this size are hashed byte by byte; of larger ones sums are, taken where the tensor is."""

COLUMNS = 2048
PART_BYTES = {"cpu": 2**20}
"""Of a table worked on at once: what a cache holds; on other devices 64 MiB."""
_GAMMA, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def tensor_digest(tensor: Tensor) -> str:
    """A 16-digit hexadecimal digest of dtype, shape and bytes, the same on every device.

    A tensor of more than ``WHOLE_BYTES`` is read as a table of 64-bit words; the sums of its columns, of its
    rows, and of its rows' upper halves, modulo 2**64 and each times an odd number of its place, stand for its
    bytes. Any change within one word shows for certain; so does, but for chance, any other, unless it keeps
    all those sums. It costs a few passes over the tensor in the memory where it is, and no copy of it.

    Equal tensors have equal digests, so a trainer casts its tensor to the engine's dtype before it compares.
    """
    return tensor_digests({"": tensor})[""]


@torch.no_grad()
def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """:func:`tensor_digest` of each, with one transfer to the host per device instead of one per tensor."""
    found: dict[str, tuple[Tensor, bytes]] = {}
    parts: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        laid = tensor.detach().contiguous()
        head = f"{str(laid.dtype).removeprefix('torch.')}{list(laid.shape)}".encode()
        found[name] = laid, head
        parts.setdefault(laid.device, []).append((name, _essence(laid)))
    digests = {}
    for listed in parts.values():
        host = torch.cat([essence for _, essence in listed]).to("cpu").numpy()
        start = 0
        for name, essence in listed:
            digest = hashlib.blake2b(found[name][1], digest_size=8)
            digest.update(host[start : start + essence.numel()].data)
            start += essence.numel()
            digests[name] = digest.hexdigest()
    return {name: digests[name] for name in tensors}


def _essence(tensor: Tensor) -> Tensor:
    """What of a contiguous tensor is hashed: its bytes, or the two sums and the bytes beyond the table."""
    byte = tensor.reshape(-1).view(torch.uint8)
    if byte.numel() <= WHOLE_BYTES:
        return byte
    table = 8 * COLUMNS * (byte.numel() // (8 * COLUMNS))
    if byte.storage_offset() % 8:
        byte = byte.clone()
    word_RC = byte[:table].view(torch.int64).view(-1, COLUMNS)
    column_C = torch.zeros(COLUMNS, dtype=torch.int64, device=byte.device)
    row_R, upper_R = [], []
    for part_RC in torch.split(word_RC, PART_BYTES.get(byte.device.type, 2**26) // (8 * COLUMNS)):
        column_C += part_RC.sum(0)
        row_R.append(part_RC.sum(1))
        # A sum modulo 2**64 loses an even number of changes of the highest bit.
        upper_R.append((part_RC >> 32).sum(1))
    sums = torch.stack([_weighted(column_C), _weighted(torch.cat(row_R)), _weighted(torch.cat(upper_R))])
    return torch.cat([sums.view(torch.uint8), byte[table:]])


def _weighted(sum_W: Tensor) -> Tensor:
    size = 1 << (len(sum_W) - 1).bit_length()
    return (sum_W * _odd(size, sum_W.device)[: len(sum_W)]).sum()


@lru_cache(maxsize=64)
def _odd(count: int, device: torch.device) -> Tensor:
    """Odd numbers that look random (splitmix64's first rounds), int64 [count]."""
    x = (torch.arange(count, dtype=torch.int64, device=device) + 1) * _GAMMA
    return ((x ^ (x >> 30)) * _MIX) | 1
