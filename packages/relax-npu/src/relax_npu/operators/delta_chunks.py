"""Tables and small products around fla_npu's chunked kernels: decay sums, the triangular inverse, states.

T tokens, M rows of all chunks together (a multiple of 64), U value heads, K key dim, C tokens of a chunk.
fla_npu takes heads before tokens, [1, U, T, ...]; only decay and step size come to it as [1, U, T].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from relax_kernels import CuSeqlens

CHUNK = 64


@dataclass(frozen=True)
class Chunks:
    """Where the chunks of a pack lie: computed once for each micro-batch, from numbers of the host.

    Attributes:
        starts: cumulative lengths of the sequences that have tokens.
        indices: (sequence, chunk in the sequence) of each chunk, flattened, as fla_npu wants it.
        row_T: for each token its row among the padded chunks.
        rows: M, the rows of all chunks.
    """

    starts: list[int]
    indices: list[int]
    row_T: torch.Tensor
    rows: int

    @classmethod
    def of(cls, cu_seqlens: CuSeqlens, device: torch.device) -> Chunks:
        """Returns the tables of a pack on a device; kept in the pack."""

        def build() -> Chunks:
            lengths = [length for length in cu_seqlens.lengths if length]
            starts, base = [0], 0
            indices: list[int] = []
            rows: list[int] = []
            for n, length in enumerate(lengths):
                starts.append(starts[-1] + length)
                count = -(-length // CHUNK)
                indices += [value for chunk in range(count) for value in (n, chunk)]
                rows += range(base, base + length)
                base += count * CHUNK
            return cls(starts, indices, torch.tensor(rows, device=device), base)

        return cu_seqlens.table(("ascend chunks", device), build)

    def spread(self, x_UT: torch.Tensor) -> torch.Tensor:
        """Returns [U, chunks, C, ...] of [U, T, ...], zeros where a chunk has no token."""
        rest = x_UT.shape[2:]
        padded = x_UT.new_zeros(x_UT.shape[0], self.rows, *rest)
        return padded.index_copy(1, self.row_T, x_UT).view(x_UT.shape[0], -1, CHUNK, *rest)

    def gather(self, x_UNC: torch.Tensor) -> torch.Tensor:
        """Returns [U, T, ...] of [U, chunks, C, ...]."""
        return x_UNC.flatten(1, 2).index_select(1, self.row_T)


def summed_decay(g_UT: torch.Tensor, chunks: Chunks, *, reverse: bool = False) -> torch.Tensor:
    """Return the running sum of the decay inside each chunk (from its end with `reverse`), float32."""
    g_UNC = chunks.spread(g_UT.float())
    summed = g_UNC.flip(-1).cumsum(-1).flip(-1) if reverse else g_UNC.cumsum(-1)
    return chunks.gather(summed)


def inverse(
    k_UTK: torch.Tensor, beta_UT: torch.Tensor, decay_UT: torch.Tensor, chunks: Chunks
) -> torch.Tensor:
    """Return A = (1 + L)^-1 of each chunk, [U, T, C] in k's dtype.

    L[i, j] = beta_i (k_i . k_j) exp(decay_i - decay_j) below the diagonal, 0 elsewhere (Yang et al., arXiv
    2412.06464, the WY form). Blocks are inverted two by two, from 1 x 1 up to 64 x 64: as stable as forward
    substitution, and nothing but matrix products.
    """
    k = chunks.spread(k_UTK.float())
    decay = chunks.spread(decay_UT)
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).tril_(-1)
    # The decay's sum never grows, but behind a sequence's end it is 0 again: exp would overflow there.
    difference = (decay[..., :, None] - decay[..., None, :]).clamp(max=0.0).masked_fill(~below, -torch.inf)
    lower = (k @ k.mT) * difference.exp() * chunks.spread(beta_UT)[..., None]
    result = torch.eye(CHUNK, device=k.device).expand_as(lower).clone()
    size = 1
    while size < CHUNK:
        # Of [[a, 0], [c, b]] the lower left of the inverse is -b^-1 c a^-1.
        blocks = lower.unfold(-2, 2 * size, 2 * size).unfold(-2, 2 * size, 2 * size)
        c = blocks.diagonal(dim1=-4, dim2=-3).movedim(-1, -3)[..., size:, :size]
        solved = result.unfold(-2, 2 * size, 2 * size).unfold(-2, 2 * size, 2 * size)
        diagonal = solved.diagonal(dim1=-4, dim2=-3).movedim(-1, -3)
        a, b = diagonal[..., :size, :size], diagonal[..., size:, size:]
        diagonal[..., size:, :size] = -(b @ c @ a)
        size *= 2
    return chunks.gather(result).to(k_UTK.dtype)
