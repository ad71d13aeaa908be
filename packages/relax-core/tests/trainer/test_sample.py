import pytest
import torch
from relax_core.trainer.config import TrainerConfig
from relax_core.trainer.sample import MicroBatch, Sample


def sample(tokens, mask, **columns):
    columns = {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}
    return Sample(torch.tensor(tokens), torch.tensor(mask, dtype=torch.float32), 0, columns)


SAMPLES = [
    sample([10, 11, 12, 13, 14], [0, 0, 1, 1, 1], value=[0.0, 0.1, 0.2, 0.3, 0.4]),
    sample([20, 21], [0, 0], value=[1.0, 1.1]),
    sample([30, 31, 32], [0, 1, 0], value=[2.0, 2.1, 2.2]),
]


def test_scored_positions_predict_exactly_the_masked_tokens():
    batch = MicroBatch.pack(SAMPLES, [2, 0, 1], torch.device("cpu"), pad_to_multiple=8)
    assert batch.tokens_T.tolist() == [30, 31, 32, 10, 11, 12, 13, 14, 20, 21] + [0] * 6
    assert batch.scored_S.tolist() == [0, 4, 5, 6]
    assert batch.targets_S.tolist() == [31, 12, 13, 14]
    assert batch.columns_S["value"].tolist() == pytest.approx([2.1, 0.2, 0.3, 0.4])
    assert batch.members == (2, 0, 1)


@pytest.mark.parametrize(
    ("depth", "positions", "targets", "tokens"),
    [
        (0, [3, 4, 5], [12, 13, 14], [31, 32, 0, 11, 12, 13, 14, 0, 21, 0]),
        (1, [3, 4], [13, 14], [32, 0, 0, 12, 13, 14, 0, 0, 0, 0]),
        (2, [3], [14], [0, 0, 0, 13, 14, 0, 0, 0, 0, 0]),
        (3, [], [], [0, 0, 0, 14, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_drafts_stay_inside_the_sample_and_the_mask(depth, positions, targets, tokens):
    batch = MicroBatch.pack(
        SAMPLES, [2, 0, 1], torch.device("cpu"), pad_to_multiple=8, draft_depths=depth + 1
    )
    draft = batch.drafts[depth]
    assert draft.positions_P.tolist() == positions
    assert draft.targets_P.tolist() == targets
    assert draft.weights_P.tolist() == [1.0] * len(positions)
    assert draft.tokens_T.tolist() == tokens + [0] * 6
    assert draft.trunk_P.tolist() == [place + depth + 1 for place in positions]


def test_a_micro_batch_without_members_has_no_target():
    batch = MicroBatch.pack(SAMPLES, [], torch.device("cpu"), pad_to_multiple=4, draft_depths=1)
    assert batch.tokens_T.tolist() == [0, 0, 0, 0]
    assert batch.scored_S.tolist() == batch.drafts[0].positions_P.tolist() == []
    assert batch.columns_S["value"].shape == (0,)


def test_a_batch_without_any_target_has_no_scored_position():
    batch = MicroBatch.pack(SAMPLES, [1], torch.device("cpu"))
    assert batch.scored_S.tolist() == []
    assert batch.targets_S.tolist() == []


def test_columns_of_another_length_and_a_first_token_as_target_are_refused():
    with pytest.raises(ValueError, match=r"'mask' has shape \(2,\): expected \(3,\)"):
        sample([1, 2, 3], [0, 1])
    with pytest.raises(ValueError, match=r"'value' has shape \(1,\): expected \(2,\)"):
        sample([1, 2], [0, 1], value=[1.0])
    with pytest.raises(ValueError, match="first token cannot be a target"):
        sample([1, 2], [1, 1])


def test_in_equal_rows_padding_lies_behind_each_sample():
    options = {"draft_depths": 1, "row_length": 6, "pad_to_multiple": 4}
    batch = MicroBatch.pack(SAMPLES, [2, 0, 1], torch.device("cpu"), **options)
    rows = [[30, 31, 32, 0, 0, 0], [10, 11, 12, 13, 14, 0], [20, 21, 0, 0, 0, 0]]
    assert batch.layout.rows(batch.tokens_T).tolist() == rows
    assert batch.scored_S.tolist() == [0, 7, 8, 9]
    assert batch.targets_S.tolist() == [31, 12, 13, 14]
    assert batch.columns_S["value"].tolist() == pytest.approx([2.1, 0.2, 0.3, 0.4])
    (draft,) = batch.drafts
    assert (draft.positions_P.tolist(), draft.targets_P.tolist()) == ([6, 7, 8], [12, 13, 14])
    assert draft.trunk_P.tolist() == [7, 8, 9]


def test_a_batch_of_equal_rows_counts_its_padding():
    assert TrainerConfig().spaces([3, 7, 2]) == [3, 7, 2]
    assert TrainerConfig(packing="bshd").spaces([3, 7, 2]) == [7, 7, 7]
    assert TrainerConfig(packing="bshd").spaces([]) == []
