"""The vision tower against transformers' `Qwen3_5VisionModel`: features and every gradient, float32."""

import pytest
import torch
from relax_core.model import Qwen35Config, UnsupportedModelError
from relax_core.model.vision.places import corner_weights, patch_places

GRIDS = [(1, 4, 6), (1, 2, 2), (2, 6, 4), (1, 2, 10)]


def test_features_and_gradients_equal_transformers(cpu_world, vision_config, hf_vision_model, copy_tower):
    theirs = hf_vision_model(vision_config).model.visual
    from relax_core.model import build_model

    ours = build_model(Qwen35Config.from_hf(vision_config, vision=True)).visual
    copy_tower(ours, theirs)
    patches = torch.randn(sum(t * h * w for t, h, w in GRIDS), ours.vision.patch_features)
    wanted = theirs(patches, grid_thw=torch.tensor(GRIDS)).pooler_output
    got = ours(patches, GRIDS)
    weight = torch.randn_like(wanted) / len(wanted)
    (wanted * weight).sum().backward()
    (got * weight).sum().backward()

    assert wanted.std() > 0.3
    # float32 sums of 24 to 64 products in another order.
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
    grads = dict(theirs.named_parameters())
    assert {name for name, _ in ours.named_parameters()} == grads.keys()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, grads[name].grad, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_picture_does_not_see_its_neighbours(cpu_world, vision_config):
    from relax_core.model import build_model

    tower = build_model(Qwen35Config.from_hf(vision_config, vision=True)).visual
    patches = torch.randn(24 + 4, tower.vision.patch_features)
    both = tower(patches, [(1, 4, 6), (1, 2, 2)])
    torch.testing.assert_close(both[:6], tower(patches[:24], [(1, 4, 6)]), rtol=0, atol=1e-6)
    torch.testing.assert_close(both[6:], tower(patches[24:], [(1, 2, 2)]), rtol=0, atol=1e-6)


def test_patches_come_square_by_square_in_every_frame():
    frame = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert patch_places([(2, 2, 4)], 2).tolist() == frame * 2


def test_positions_are_stretched_from_end_to_end_of_the_grid():
    index, weight = corner_weights([(1, 2, 2)], merge=2, side=3)
    # Corner patches lie on the corners of the grid 0..8; the corner before each has the whole share.
    assert index[0].tolist() == [0, 2, 6, 8]
    assert weight[0].tolist() == [1, 1, 1, 1]
    index, weight = corner_weights([(1, 1, 3)], merge=1, side=2)
    assert index[:2, 1].tolist() == [0, 1]
    assert weight[:, 1].tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes is set"),
        ({"depth": 0}, "depth must be positive"),
        ({"num_position_embeddings": 15}, "must be a square"),
        ({"out_hidden_size": 8}, "out_hidden_size is 8, hidden_size of the text model 32"),
        ({"num_heads": 8}, "multiple of 4"),
    ],
)
def test_a_tower_that_cannot_be_built_is_refused_by_name(vision_config, change, reason):
    vision_config["vision_config"] |= change
    with pytest.raises(UnsupportedModelError, match=reason):
        Qwen35Config.from_hf(vision_config, vision=True)


def test_a_text_model_has_no_tower(small_config):
    with pytest.raises(UnsupportedModelError, match=r"this is a text model; set model.vision to absent"):
        Qwen35Config.from_hf(small_config, vision=True)


def test_sections_of_another_head_are_refused(vision_config):
    vision_config["text_config"]["rope_parameters"]["mrope_section"] = [11, 11, 10]
    with pytest.raises(UnsupportedModelError, match="sum is the 4 rotated pairs"):
        Qwen35Config.from_hf(vision_config, vision=True)
