import pytest
import torch
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
    ("depth", "positions", "targets"),
    [(0, [3, 4, 5], [12, 13, 14]), (1, [3, 4], [13, 14]), (2, [3], [14]), (3, [], [])],
)
def test_draft_targets_stay_inside_the_sample_and_the_mask(depth, positions, targets):
    batch = MicroBatch.pack(SAMPLES, [2, 0, 1], torch.device("cpu"), pad_to_multiple=8)
    got_positions, got_targets, weights = batch.draft_targets(depth)
    assert got_positions.tolist() == positions
    assert got_targets.tolist() == targets
    assert weights.tolist() == [1.0] * len(positions)


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
