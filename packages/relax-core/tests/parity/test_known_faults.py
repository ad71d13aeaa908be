"""Faults that are known from elsewhere: the trainer is free of each, and would be seen with it.

`docs/known-faults.md` says where each is known from, and which tests stand for those that cannot be put in.
"""

import pytest
from relax_core.testing import RankError, Row, differences
from relax_core.testing.faults import FAULTS

REL, FLOOR = 2e-4, 2e-6
_JOINED = {"detach_embedding": False, "detach_trunk": False, "detach_head": False}
_SP = {"tensor": 2, "sequence": True}
_TIED = {"tie_word_embeddings": True}
_MOE = {"family": "moe", "balance": 0.5}
WHERE = {
    "the loss is divided by the context size": Row("cp2", 2, {"context": 2}),
    "the draft loss counts the tokens of its own piece": Row("cp2-mtp1", 2, {"context": 2}, mtp=1),
    "the draft loss reaches the embedding": Row("pp2-mtp1", 2, {"pipeline": 2}, mtp=1),
    "the entropy is that of one rank's part of the vocabulary": Row(
        "tp2-policy", 2, {"tensor": 2}, objective="policy"
    ),
    "whole logits are taken for one rank's part": Row("tp2", 2, {"tensor": 2}),
    "a norm over spread heads keeps its partial gradient": Row("tp2", 2, {"tensor": 2}),
    "a norm over spread tokens keeps its partial gradient": Row("tp2-sp", 2, _SP),
    "the copies of the embedding keep their own gradients": Row(
        "pp2-tied", 2, {"pipeline": 2}, mtp=1, draft=_JOINED, model=_TIED
    ),
    "a recomputed draft layer sees another rank's tokens": Row(
        "tp2-sp-full-mtp1", 2, _SP, mtp=1, trainer={"recompute": "full"}
    ),
    "the gradient norm leaves spread weights out": Row("tp2", 2, {"tensor": 2}),
    "fused rows are cut as one block": Row("tp2", 2, {"tensor": 2}),
    "draft labels leak from one sample into the next": Row("pp2-mtp1", 2, {"pipeline": 2}, mtp=1),
    "draft labels at padded ends count": Row("cp2-mtp1", 2, {"context": 2}, mtp=1),
    "the convolution leaks from one sample into the next": Row("dp2", 2),
    "the state leaks from one sample into the next": Row("dp2", 2),
    "the balance loss counts tokens once for every tensor rank": Row("moe-tp2-sp", 2, _SP, **_MOE),
    "the ratio of a completion counts the tokens of its own piece": Row(
        "cp2-gspo", 2, {"context": 2}, objective="gspo"
    ),
    "an adapter over spread tokens keeps its partial gradient": Row(
        "tp2-sp-lora", 2, _SP, lora={"rank": 3, "alpha": 6.0}
    ),
    "the balance loss is divided by the context size": Row("moe-cp2", 2, {"context": 2}, **_MOE),
    "the mask of tokens that count is another rank's": Row("moe-tp2-sp-mtp1", 2, _SP, mtp=1, **_MOE),
    "a shared key is gathered from the ranks of another head": Row(
        "tp4-sp-two-kv-heads", 4, {"tensor": 4, "sequence": True}, model={"linear_num_key_heads": 4}
    ),
    "pictures are put into another rank's tokens": Row(
        "pictures-tp2-sp-mtp1", 2, _SP, mtp=1, draft=_JOINED, pictures="trained"
    ),
    "query heads of a shared key take another rank's gates": Row(
        "tp2-one-kv-head", 2, {"tensor": 2}, model={"num_key_value_heads": 1}
    ),
}
# All but this one change gradients.
SEEN_IN = {"the gradient norm leaves spread weights out": "grad_norm is"}


def test_every_fault_has_a_layout_that_shows_it():
    assert WHERE.keys() == FAULTS.keys()


@pytest.mark.parity
@pytest.mark.parametrize("fault", FAULTS)
def test_the_trainer_is_free_of_it_and_would_be_seen_with_it(pools, reference, fault):
    row = WHERE[fault]
    wanted = reference(row)
    assert not differences(pools(row.ranks).run(row), wanted, rel=REL, floor=FLOOR)
    try:
        seen = differences(
            pools(row.ranks).run(row, "train_with_fault", fault=fault), wanted, rel=REL, floor=FLOOR
        )
    except RankError as error:
        # Copies that must be equal are not: the harness refuses them.
        seen = [str(error)]
    words = (SEEN_IN.get(fault, "gradient of"), "ReplicaError: copies of")
    assert any(word in line for line in seen for word in words)
