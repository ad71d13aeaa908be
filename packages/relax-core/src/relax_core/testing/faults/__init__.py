"""Faults that others had, put into this trainer: what shows that the comparison of layouts would see them.

Each is a context in which the trainer is wrong in one place, as Megatron-LM or an RL framework was.
`docs/known-faults.md` says where each is known from.
"""

from collections.abc import Callable, Mapping
from typing import Any

from relax_core.device import World
from relax_core.testing.faults import completions, experts, gradients, loss, packing, places, vocabulary
from relax_core.testing.row import Row
from relax_core.testing.training import Measured, train

FAULTS: Mapping[str, Callable[[Row], Any]] = {
    "the loss is divided by the context size": loss.divided_by_context,
    "the draft loss counts the tokens of its own piece": loss.draft_count_of_own_piece,
    "the draft loss reaches the embedding": loss.draft_embedding_not_detached,
    "the entropy is that of one rank's part of the vocabulary": vocabulary.entropy_of_own_part,
    "whole logits are taken for one rank's part": vocabulary.whole_logits_as_part,
    "a norm over spread heads keeps its partial gradient": gradients.norm_of_heads_not_summed,
    "a norm over spread tokens keeps its partial gradient": gradients.norm_of_tokens_not_summed,
    "the copies of the embedding keep their own gradients": gradients.copies_of_the_embedding_not_summed,
    "a recomputed draft layer sees another rank's tokens": gradients.recomputed_from_another_rank,
    "the gradient norm leaves spread weights out": gradients.spread_weights_not_in_the_norm,
    "fused rows are cut as one block": packing.fused_rows_cut_as_one_block,
    "draft labels leak from one sample into the next": packing.draft_labels_of_the_next_sample,
    "draft labels at padded ends count": packing.draft_labels_of_padding,
    "the convolution leaks from one sample into the next": packing.convolution_of_the_whole_row,
    "the state leaks from one sample into the next": packing.state_of_the_whole_row,
    "the balance loss counts tokens once for every tensor rank": experts.balance_counts_of_every_rank,
    "the ratio of a completion counts the tokens of its own piece": completions.ratio_of_own_piece,
    "an adapter over spread tokens keeps its partial gradient": completions.adapter_of_tokens_not_summed,
    "the balance loss is divided by the context size": experts.balance_divided_by_context,
    "the mask of tokens that count is another rank's": places.mask_of_another_rank,
    "a shared key is gathered from the ranks of another head": places.key_of_other_ranks,
    "pictures are put into another rank's tokens": places.pictures_of_another_rank,
    "query heads of a shared key take another rank's gates": places.gates_of_another_rank,
}


def train_with_fault(row: Row, world: World, *, fault: str) -> Measured | None:
    """`train` with one of `FAULTS`."""
    with FAULTS[fault](row):
        return train(row, world)
