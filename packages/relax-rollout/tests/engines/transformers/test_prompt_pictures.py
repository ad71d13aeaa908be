"""Prompts with pictures in the embedded engine, against transformers' own forward without a cache."""

import asyncio

import numpy as np
import pytest
import torch
from relax_rollout import InvalidRequestError, Request, SamplingParams, create_engine, tensor_digest
from relax_rollout.pictures import Picture, PlacedPicture
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

IMAGE = 7
# Float32, up to 60 tokens: the engine steps through what the reference sums in chunks (3e-5 measured).
CLOSE = 1e-4
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}


@pytest.fixture(scope="module")
def seeing(models, tmp_path_factory, randomise_weights):
    """A model with a vision tower that changes what it says a lot, and where it lies."""
    text = {**models.load().config.to_dict(), "tie_word_embeddings": False}
    text["rope_parameters"] = {
        **text["rope_parameters"],
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    }
    config = Qwen3_5Config(
        text_config=text, vision_config=VISION, image_token_id=IMAGE, tie_word_embeddings=False
    )
    torch.manual_seed(1)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    randomise_weights(model, spread=1.0)
    path = tmp_path_factory.mktemp("seeing")
    with torch.no_grad():
        # Drawn often enough that completions hold it.
        model.lm_head.weight[IMAGE] *= 1.5
    model.save_pretrained(path)
    return model, path


def picture(seed: int, grid=(1, 2, 4)) -> Picture:
    patches = np.random.default_rng(seed).normal(size=(grid[0] * grid[1] * grid[2], 96)).astype(np.float32)
    return Picture.of(patches, grid, merge=2, channels=3, frames=2)


def ask(name: str, before: int, pictures=(), after: int = 2, new: int = 6, seed: int = 0) -> Request:
    """Text, then each picture followed by one token of text, then text."""
    ids, placed = [1 + i % 5 for i in range(before)], []
    for one in pictures:
        placed.append(PlacedPicture(one, len(ids)))
        ids += [IMAGE] * one.tokens + [9]
    ids += [11 + i for i in range(after)]
    return Request(name, tuple(ids), SamplingParams(new, seed=seed), pictures=tuple(placed))


@torch.no_grad()
def wanted_logprobs(model, request: Request, drawn) -> torch.Tensor:
    ids = torch.tensor([[*request.prompt_ids, *drawn]])
    kinds = torch.zeros_like(ids)
    embedded = model.get_input_embeddings()(ids)
    grids = None
    if request.pictures:
        grids = torch.tensor([one.picture.grid for one in request.pictures])
        patches = torch.cat([torch.from_numpy(one.picture.patches()) for one in request.pictures])
        features = model.model.visual(patches, grid_thw=grids, return_dict=True).pooler_output
        places = [i for one in request.pictures for i in range(one.start, one.end)]
        embedded[0, places] = features
        kinds[0, places] = 1
    positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=grids)
    logits = model(inputs_embeds=embedded, position_ids=positions, use_cache=False).logits[0].float()
    start = len(request.prompt_ids)
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, torch.tensor(drawn)[:, None])[:, 0]


def worst(model, asked, completions) -> float:
    gaps = [
        (wanted_logprobs(model, request, done.token_ids) - torch.tensor(done.logprobs)).abs().max()
        for request, done in zip(asked, completions, strict=True)
    ]
    return float(max(gaps))


def with_engine(path, body, **options):
    async def run():
        engine = create_engine("transformers", model=path, **({"pictures": True} | options))
        try:
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def test_logprobs_are_those_of_the_full_forward(seeing):
    """Rows with no, one and several pictures, of several lengths, padded and merged into one batch."""
    model, path = seeing
    one, tall, wide = picture(0), picture(1, (1, 8, 2)), picture(2, (1, 4, 6))
    asked = [
        ask("text", 3),
        ask("one", 0, [one], after=0),
        *[ask(f"several{n}", 5, [tall, one, wide], seed=n, new=3 + 20 * n) for n in range(3)],
        ask("again", 2, [wide], new=12),
    ]
    completions = with_engine(path, lambda engine: engine.generate(asked), max_rows=4)
    assert worst(model, asked, completions) < CLOSE
    assert any(IMAGE in done.token_ids for done in completions), "the model drew no token like a picture's"
    blind = [Request(r.id, r.prompt_ids, r.sampling) for r in asked[1:2]]
    assert worst(model, blind, completions[1:2]) > 0.05


def test_a_prompt_is_seen_once_by_all_its_requests_and_not_by_others(seeing):
    _, path = seeing
    first, second = picture(0), picture(1)
    asked = [ask(f"{n}", 3, [first if n < 4 else second], seed=n) for n in range(5)]
    calls = []

    async def body(engine):
        tower = engine._model.model.visual
        tower.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
        engine._model.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append(
                kwargs["inputs_embeds"].shape[0] if "inputs_embeds" in kwargs else None
            ),
            with_kwargs=True,
        )
        return await engine.generate(asked)

    completions = with_engine(path, body)
    # Sixteen patches of two pictures, then two prompts; steps give tokens.
    assert [call for call in calls if call is not None] == [16, 2]
    assert completions[0].logprobs[0] != completions[4].logprobs[0]


def test_requests_in_flight_see_their_pictures_again_through_new_weights(seeing):
    """An update after five tokens: the rest is drawn as the new tower sees the picture."""
    model, path = seeing
    changed = Qwen3_5ForConditionalGeneration.from_pretrained(path).eval()
    with torch.no_grad():
        changed.model.visual.merger.linear_fc2.weight.mul_(-1)
    asked = ask("one", 3, [picture(0)], new=40)
    calls = []

    async def body(engine):
        paused = asyncio.Event()
        loop = asyncio.get_running_loop()

        def pause_at_the_fifth(*_):
            calls.append(1)
            if len(calls) == 5:
                engine._scheduler.pause("keep")
                loop.call_soon_threadsafe(paused.set)

        engine._model.register_forward_pre_hook(pause_at_the_fifth)
        drawing = asyncio.ensure_future(engine.generate([asked]))
        await paused.wait()
        await engine.begin_update(1)
        await engine.load(dict(changed.state_dict()))
        digests = await engine.end_update()
        await engine.resume()
        (done,) = await drawing
        return done, digests

    done, digests = with_engine(path, body)
    assert done.versions == (0,) * 4 + (1,) * 36
    gap = [
        (wanted_logprobs(which, asked, done.token_ids) - torch.tensor(done.logprobs)).abs()
        for which in (model, changed)
    ]
    assert gap[0][:4].max() < CLOSE
    assert gap[1][4:].max() < CLOSE
    assert gap[0][4:].max() > 0.05
    name = "model.visual.merger.linear_fc2.weight"
    assert digests[name] == tensor_digest(changed.state_dict()[name])


@pytest.mark.parametrize(
    ("start", "reason"),
    [(4, "has 2 tokens from place 4: they must lie between place 0 and the prompt's end 5"), (-1, "-1")],
)
def test_a_picture_outside_its_prompt_is_refused(start, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        Request("a", (1, 2, 3, 4, 5), SamplingParams(1), pictures=(PlacedPicture(picture(0), start),))


def test_pictures_that_the_engine_cannot_see_are_refused(seeing, models):
    _, path = seeing
    asked = ask("a", 1, [picture(0)])
    with pytest.raises(InvalidRequestError, match="no vision tower: create it with pictures=True"):
        with_engine(path, lambda engine: engine.generate([asked]), pictures=False)
    foreign = Picture.of(np.zeros((8, 48), np.float32), (1, 2, 4), merge=2, channels=3, frames=1)
    with pytest.raises(InvalidRequestError, match=r"patches of 48 numbers, .* the model's have 96"):
        with_engine(path, lambda engine: engine.generate([ask("b", 1, [foreign])]))
    with pytest.raises(ValueError, match="has no vision_config"):
        create_engine("transformers", model=models.get(), pictures=True)
