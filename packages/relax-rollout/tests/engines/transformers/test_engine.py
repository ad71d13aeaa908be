"""What is special about the embedded engine: prefill sharing, batching, dtypes, other models."""

import asyncio

import pytest
import torch
from relax_rollout import EngineError, Request, SamplingParams, create_engine, tensor_digest
from transformers import Qwen3Config, Qwen3ForCausalLM


def requests(count: int, prompts: int = 3, **more) -> list[Request]:
    return [
        Request(
            str(n),
            tuple((3 * (n % prompts) + i) % 40 for i in range(1 + 4 * (n % prompts))),
            SamplingParams(**({"max_new_tokens": 2 + n % 7, "seed": n} | more)),
        )
        for n in range(count)
    ]


keys: list[int | None] = []
"""Keys under a mask in each forward call of the last ``generate``; None if no row was padded."""


def generate(asked: list[Request], **options):
    async def body():
        engine = create_engine("transformers", **options)
        calls: list[tuple[int, int]] = []
        keys.clear()

        def note(module, args, kwargs):
            calls.append(tuple(kwargs["input_ids"].shape))
            mask = kwargs["attention_mask"]
            keys.append(None if mask is None else mask.shape[-1])

        engine._model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            return await engine.generate(asked), calls
        finally:
            await engine.close()

    return asyncio.run(body())


def test_each_prompt_is_run_once_and_ended_rows_are_dropped(models):
    long = Request("long", (0,), SamplingParams(max_new_tokens=9, seed=1))
    asked = [*requests(24, max_new_tokens=4), long]
    _, calls = generate(asked, model=models.get())
    assert calls == [(3, 9), (25, 1), (25, 1), (25, 1), *[(1, 1)] * 5]


def test_slots_that_only_ended_rows_used_are_given_up(models):
    sampling = [SamplingParams(max_new_tokens=n, seed=n) for n in (2, 5)]
    generate(
        [Request("long", (1,) * 50, sampling[0]), Request("short", (1, 2), sampling[1])], model=models.get()
    )
    assert keys == [50, 51, None, None, None]


def test_prompts_are_run_in_parts_of_bounded_size(models, gap):
    completions, calls = generate(requests(9), model=models.get(), max_prefill_tokens=10)
    assert calls[:2] == [(2, 5), (1, 9)]
    assert gap(models.load(), requests(9), completions) < 1e-5
    assert [c.token_ids for c in completions] == [
        c.token_ids for c in generate(requests(9), model=models.get())[0]
    ]


def test_more_requests_than_rows_join_as_others_end(models, gap):
    asked = requests(40)
    completions, calls = generate(asked, model=models.get(), max_rows=8)
    assert max(rows for rows, width in calls if width == 1) <= 10
    assert gap(models.load(), asked, completions) < 1e-5
    assert [c.token_ids for c in completions] == [c.token_ids for c in generate(asked, model=models.get())[0]]


def test_a_completion_outgrows_the_room_made_for_it(models, gap):
    asked = [Request("a", (1, 2), SamplingParams(max_new_tokens=400, seed=0))]
    completions, _ = generate(asked, model=models.get())
    assert len(completions[0].token_ids) == 400
    assert gap(models.load(), asked, completions) < 2e-5


def test_a_dense_attention_model(tmp_path, gap):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    completions, _ = generate(requests(20), model=tmp_path)
    assert gap(model, requests(20), completions) < 1e-5


def test_a_bfloat16_engine_is_near_its_model_and_casts_updates(models, gap):
    async def body():
        engine = create_engine("transformers", model=models.get(), dtype="bfloat16")
        try:
            tensors = models.load(seed=1).state_dict()
            dtypes = await engine.begin_update(1)
            await engine.load({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
            digests = await engine.end_update()
            for name, digest in digests.items():
                assert digest == tensor_digest(tensors[name].to(getattr(torch, dtypes[name])))
            assert dtypes["model.layers.0.linear_attn.A_log"] == "float32"
            assert dtypes["model.layers.0.mlp.up_proj.weight"] == "bfloat16"
            return await engine.generate(requests(20)), await engine.health()
        finally:
            await engine.close()

    completions, health = asyncio.run(body())
    assert health.dtype == "bfloat16"
    assert gap(models.load(seed=1), requests(20), completions) < 0.1  # bfloat16 has 8 bits
    assert gap(models.load(), requests(20), completions) > 1


def test_weights_of_a_vision_language_checkpoint_go_by_their_own_names(models, gap):
    async def body():
        engine = create_engine("transformers", model=models.get())
        try:
            tensors = models.load(seed=1).state_dict()
            del tensors["lm_head.weight"]
            named = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
            await engine.begin_update(1)
            await engine.load(named)
            assert set(await engine.end_update()) == set(named)
            return await engine.generate(requests(5))
        finally:
            await engine.close()

    assert gap(models.load(seed=1), requests(5), asyncio.run(body())) < 1e-5


def test_a_failure_inside_a_step_fails_its_requests_and_not_the_engine(models):
    async def body():
        engine = create_engine("transformers", model=models.get())
        try:
            handle = engine._model.register_forward_pre_hook(fail)
            with pytest.raises(EngineError, match="planted"):
                await engine.generate(requests(4))
            handle.remove()
            assert (await engine.health()).last_error == "EngineError: planted"
            return await engine.generate(requests(4))
        finally:
            await engine.close()

    def fail(module, args):
        raise EngineError("planted")

    assert len(asyncio.run(body())) == 4


def test_the_callers_thread_keeps_its_gradient_mode(models):
    generate(requests(2), model=models.get())
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
