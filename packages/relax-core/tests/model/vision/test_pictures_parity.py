"""The whole model with pictures against transformers' `Qwen3_5ForConditionalGeneration`: positions, logits
and every gradient, float32; a pack of samples against one sample at a time."""

import json

import numpy as np
import pytest
import torch
from relax_bridge import Checkpoint, model_map
from relax_core.model import MtpConfig, Qwen35Config, build_model
from relax_core.model.placement import Placement
from relax_core.packing import PackedLayout
from relax_core.packing.pictures import RowPictures
from relax_rollout.pictures import Picture, PlacedPicture, multi_positions, next_position

IMAGE = 90
CPU = torch.device("cpu")
# Lengths of text around pictures, and the pictures' patches: none, one, several, one at either end.
SAMPLES = [
    ((9,), ()),
    ((5, 7), ((1, 4, 6),)),
    ((3, 2, 4, 30), ((1, 2, 2), (1, 6, 4), (1, 2, 8))),
    ((1, 0), ((1, 8, 4),)),
]


def make_sample(texts, grids, generator):
    """(tokens, placed pictures) with random contents."""
    tokens, placed = [], []
    for number, length in enumerate(texts):
        tokens += torch.randint(0, IMAGE, (length,), generator=generator).tolist()
        if number < len(grids):
            t, h, w = grids[number]
            patches = torch.randn(t * h * w, 96, generator=generator).numpy()
            picture = Picture.of(patches, grids[number], merge=2, channels=3, frames=2)
            placed.append(PlacedPicture(picture, len(tokens)))
            tokens += [IMAGE] * picture.tokens
    return torch.tensor(tokens), placed


@pytest.fixture
def samples():
    generator = torch.Generator().manual_seed(5)
    return [make_sample(texts, grids, generator) for texts, grids in SAMPLES]


@pytest.fixture
def loaded(tmp_path, cpu_world, vision_config, hf_vision_model):
    """(transformers' model, ours with the same weights, the weight map)."""
    theirs = hf_vision_model(vision_config)
    theirs.save_pretrained(tmp_path / "model")
    source = Checkpoint.open(tmp_path / "model")
    table = model_map(source.config, names=source.names, vision=True)
    ours = build_model(Qwen35Config.from_hf(source.config, vision=True), random_weights=False)
    Placement(table).load([ours], source)
    return theirs, ours, table


def inputs_of(tokens, placed):
    """What transformers takes."""
    kinds = {"input_ids": tokens[None], "mm_token_type_ids": (tokens == IMAGE).int()[None]}
    if not placed:
        return {**kinds, "use_cache": False}
    return {
        **kinds,
        "pixel_values": torch.cat([torch.from_numpy(one.picture.patches()) for one in placed]),
        "image_grid_thw": torch.tensor([one.picture.grid for one in placed]),
        "use_cache": False,
    }


def forward(model, samples):
    layout = PackedLayout.build([len(tokens) for tokens, _ in samples])
    pictures = RowPictures.pack(layout, [placed for _, placed in samples], CPU)
    tokens = torch.cat([tokens for tokens, _ in samples])
    return model(tokens, layout, pictures=pictures), layout, pictures


def test_positions_are_those_of_transformers(loaded, samples):
    theirs, _, _ = loaded
    for tokens, placed in samples[1:]:
        inputs = inputs_of(tokens, placed)
        wanted, (deltas,) = theirs.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
        )
        positions = torch.from_numpy(multi_positions(len(tokens), placed))
        assert torch.equal(positions, wanted[:, 0])
        assert next_position(len(tokens), placed) == len(tokens) + deltas


def test_logits_and_gradients_of_a_pack_equal_transformers(loaded, samples):
    theirs, ours, table = loaded
    total = sum(len(tokens) for tokens, _ in samples)
    weights = [torch.randn(len(tokens), 96) / total for tokens, _ in samples]
    wanted = []
    for (tokens, placed), weight in zip(samples, weights, strict=True):
        theirs.model.rope_deltas = None
        wanted.append(theirs(**inputs_of(tokens, placed)).logits[0])
        (wanted[-1] * weight).sum().backward()
    hidden, _, _ = forward(ours, samples)
    logits = ours.logits(hidden)
    (logits * torch.cat(weights)).sum().backward()

    assert logits.std() > 0.3
    # As for text alone (test_qwen35_parity): float32 sums in another order.
    torch.testing.assert_close(logits, torch.cat(wanted), rtol=0, atol=2e-5)
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    expected = {e.megatron: e.transform.forward([grads[name] for name in e.hf]) for e in table.entries}
    named = dict(ours.named_parameters())
    assert named.keys() == expected.keys()
    assert named["visual.patch_embed.proj.weight"].grad.abs().max() > 1e-3
    for name, parameter in named.items():
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_pictures_of_other_samples_change_nothing(loaded, samples):
    _, ours, _ = loaded
    hidden, layout, _ = forward(ours, samples)
    for part, sample in zip(layout.unpack(hidden), samples, strict=True):
        alone, _, _ = forward(ours, [sample])
        torch.testing.assert_close(part, alone, rtol=0, atol=2e-5)


def test_full_recompute_changes_no_bit(vision_config, cpu_world, samples):
    grads = []
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        model = build_model(Qwen35Config.from_hf(vision_config, vision=True), recompute=recompute)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        model.train()
        forward(model, samples)[0].sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert any(name.startswith("visual.blocks") for name in grads[0])
    assert all(torch.equal(grads[1][name], grad) for name, grad in grads[0].items())


def with_drafts(vision_config, **mtp):
    vision_config["text_config"]["mtp_num_hidden_layers"] = 2
    torch.manual_seed(0)
    model = build_model(Qwen35Config.from_hf(vision_config, vision=True), mtp=MtpConfig(**mtp))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_draft_layers_see_the_pictures_ahead_as_the_trunk_does(vision_config, cpu_world, samples):
    """Against the draft layers on embeddings that were replaced and moved by hand."""
    model = with_drafts(vision_config)
    hidden, layout, pictures = forward(model, samples)
    tokens = torch.cat([tokens for tokens, _ in samples])
    ahead = [layout.shift(tokens, depth + 1) for depth in range(2)]
    got = model.mtp_hidden(hidden, ahead, layout, pictures=pictures)

    embedded = model._embed(tokens).detach()
    embedded[tokens == IMAGE] = pictures.seen_MD.detach().unsqueeze(1)
    zero = model._embed(torch.zeros(1, dtype=torch.int64))
    shifted = []
    for depth in range(2):
        index, valid = layout.ahead(depth + 1)
        shifted.append(torch.where(valid[:, None, None], embedded[index], zero))
    context = model._context(layout, CPU, None, pictures)
    for mine, wanted in zip(got, model.mtp(shifted, hidden.detach().unsqueeze(1), context), strict=True):
        torch.testing.assert_close(mine, wanted.squeeze(1), rtol=0, atol=1e-6)


def test_draft_layers_reach_the_tower_only_where_they_may(vision_config, cpu_world, samples):
    def tower_gradient(**mtp):
        model = with_drafts(vision_config, **mtp)
        hidden, layout, pictures = forward(model, samples)
        ahead = [layout.shift(torch.cat([t for t, _ in samples]), depth + 1) for depth in range(2)]
        sum(x.sum() for x in model.mtp_hidden(hidden, ahead, layout, pictures=pictures)).backward()
        grad = model.visual.merger.linear_fc2.weight.grad
        return 0.0 if grad is None else float(grad.abs().max())

    assert tower_gradient() == 0.0
    assert tower_gradient(detach_embedding=False) > 1e-4


def test_a_row_without_pictures_gives_a_trained_tower_gradients_of_zero(vision_config, cpu_world, samples):
    model = build_model(Qwen35Config.from_hf(vision_config, vision=True))
    forward(model, samples[:1])[0].sum().backward()
    assert all(not p.grad.any() for p in model.visual.parameters())
    model.visual.requires_grad_(False)
    model.zero_grad()
    forward(model, samples)[0].sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.visual.parameters())


def test_a_model_without_a_tower_refuses_pictures(vision_config, cpu_world, samples):
    model = build_model(Qwen35Config.from_hf(vision_config))
    with pytest.raises(ValueError, match="built without its vision tower"):
        forward(model, samples)


def test_what_the_loop_saves_reads_back_in_transformers(loaded, tmp_path):
    from relax_bridge import write_checkpoint
    from transformers import Qwen3_5ForConditionalGeneration

    theirs, ours, table = loaded
    source = Checkpoint.open(tmp_path / "model")
    with torch.no_grad():
        ours.visual.blocks[1].attn.qkv.bias += 1
    out = write_checkpoint(
        tmp_path / "out", table.export_tensors(Placement(table).whole([ours]), like=source), like=source
    )
    again = Qwen3_5ForConditionalGeneration.from_pretrained(out)
    moved = [n for n, p in again.state_dict().items() if not torch.equal(p, theirs.state_dict()[n])]
    assert moved == ["model.visual.blocks.1.attn.qkv.bias"]
    assert json.loads((out / "config.json").read_text())["image_token_id"] == IMAGE


def test_a_picture_is_kept_in_bytes_and_comes_back_bit_by_bit():
    pixels = np.random.default_rng(0).integers(0, 256, (16, 3, 1, 16)).astype(np.float32)
    mean, std = np.float32([0.5, 0.4, 0.3]), np.float32([0.5, 0.2, 0.1])
    numbers = (pixels / np.float32(255) - mean[None, :, None, None]) / std[None, :, None, None]
    patches = np.repeat(numbers, 2, axis=2).reshape(16, 96)
    picture = Picture.of(patches, (1, 4, 4), merge=2, channels=3, frames=2)
    assert picture.codes.dtype == np.uint8
    assert picture.codes.nbytes * 8 == patches.nbytes
    assert picture.tokens == 4
    assert (picture.patches() == patches).all()
    patches[0, 0] += 1  # frames differ, and more values than a byte tells apart
    noisy = patches + np.random.default_rng(1).random(patches.shape, dtype=np.float32)
    for kept in (patches, noisy):
        assert (Picture.of(kept, (1, 4, 4), merge=2, channels=3, frames=2).patches() == kept).all()
