"""Row operations of the cache keep each row's content."""

import torch
from relax_rollout.engines.transformers.cache import BatchCache, KeyValueLayer, StateLayer


def filled(rows: int, width: int, offset: int = 0) -> KeyValueLayer:
    """A layer whose keys say row * 100 + slot."""
    layer = KeyValueLayer()
    content = (torch.arange(rows)[:, None] + offset) * 100.0 + torch.arange(width)
    keys = content[:, None, :, None].expand(rows, 2, width, 3).clone()
    layer.update(keys, -keys)
    return layer


def shown(layer: KeyValueLayer) -> list[list[float]]:
    assert torch.equal(layer.keys[:, :, : layer.width], -layer.values[:, :, : layer.width])
    return layer.keys[:, 1, : layer.width, 2].tolist()


def test_update_appends_and_grows_in_place():
    layer = filled(2, 3)
    for slot in range(3, 40):
        new = (torch.arange(2)[:, None, None, None] * 100.0 + slot).expand(2, 2, 1, 3)
        keys, values = layer.update(new, -new)
        assert keys.shape == values.shape == (2, 2, slot + 1, 3)
    assert shown(layer) == [[row * 100.0 + slot for slot in range(40)] for row in range(2)]


def test_select_repeats_and_drops_rows_and_slots():
    layer = filled(3, 4)
    layer.select(torch.tensor([2, 0, 2]), drop=1, room=5)
    assert shown(layer) == [[201, 202, 203], [1, 2, 3], [201, 202, 203]]
    storage = layer.keys.data_ptr()
    layer.update(torch.zeros(3, 2, 5, 3), torch.zeros(3, 2, 5, 3))
    assert layer.keys.data_ptr() == storage


def test_merge_aligns_the_last_slots():
    wide, narrow = filled(1, 3), filled(2, 1, offset=5)
    wide.merge(narrow)
    assert shown(wide) == [[0, 1, 2], [0, 0, 500], [0, 0, 600]]
    narrow, wide = filled(2, 1, offset=5), filled(1, 3)
    narrow.merge(wide)
    assert shown(narrow) == [[0, 0, 500], [0, 0, 600], [0, 1, 2]]


def test_states_follow_their_rows():
    layer = StateLayer()
    layer.update_conv_state(torch.arange(3.0)[:, None, None].expand(3, 2, 4))
    layer.update_recurrent_state(torch.arange(3.0)[:, None, None, None].expand(3, 2, 2, 2))
    layer.select(torch.tensor([2, 2, 1]), drop=9, room=9)
    other = StateLayer()
    other.update_conv_state(torch.full((1, 2, 4), 7.0))
    other.update_recurrent_state(torch.full((1, 2, 2, 2), 7.0))
    layer.merge(other)
    assert layer.conv_states[:, 0, 0].tolist() == [2, 2, 1, 7]
    assert layer.recurrent_states[:, 1, 1, 1].tolist() == [2, 2, 1, 7]


def test_a_cache_knows_its_width_whatever_its_first_layer_is():
    cache = BatchCache(("linear_attention", "full_attention"))
    cache.layers[1] = filled(2, 6)
    assert cache.get_seq_length() == 6
