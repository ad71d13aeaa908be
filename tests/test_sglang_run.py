"""The shipped quickstart checkpoint on real SGLang: parity, drafts, training. Part of `nox -s sglang_cpu`.

L tokens of a completion.
"""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    os.environ.get("RELAX_TEST_SGLANG") != "1", reason="needs the environment of `nox -s sglang_cpu`"
)
PROMPTS = [tuple((7 * n + 3 * i) % 170 + 3 for i in range(n)) for n in (1, 2, 5, 17, 70)]


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return root / "packages/relax-core/src/relax_core/assets/quickstart/model"


def run(test: Callable[[Any], Awaitable[Any]], name: str, **options: Any) -> Any:
    from relax_rollout import create_engine

    async def body() -> Any:
        engine = create_engine(name, dtype="float32", **options)
        try:
            return await asyncio.wait_for(test(engine), 1200)
        finally:
            await engine.close()

    return asyncio.run(body())


def requests(temperature: float) -> list[Any]:
    from relax_rollout import Request, SamplingParams

    return [
        Request(f"{temperature}-{n}", ids, SamplingParams(48, temperature=temperature, seed=11 + n))
        for n, ids in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module", params=[0, 3], ids=["plain", "drafts"])
def sampled(request: pytest.FixtureRequest, model: Path) -> tuple[int, list[Any], list[Any], Any, Any]:
    """Greedy and sampled completions, the engine's totals of drafts, and what an update and one back gave."""

    async def test(engine: Any) -> Any:
        greedy, drawn = await engine.generate(requests(0.0)), await engine.generate(requests(1.0))
        counts = engine.acceptance.take()
        weights = load_weights(model)
        updates = []
        for version, factor in ((1, 1.25), (2, 1.0)):
            await engine.begin_update(version)
            names = list(weights)
            for part in (names[::2], names[1::2]):
                await engine.load({name: factor * weights[name] for name in part})
            updates.append((await engine.end_update(), await engine.generate(requests(1.0))))
        assert engine._way.transport == ("broadcast" if request.param else "ipc")
        return request.param, greedy, drawn, counts, updates

    # One path of weights and one way to load with each kind of server, so that all are seen to reach target
    # and draft; the plain ones are two, behind sglang-router.
    plain: dict[str, Any] = {"servers": 2, "router": "start", "transport": "auto"}
    drafting: dict[str, Any] = {"transport": "broadcast", "replay": False, "draft_tokens": request.param}
    return run(test, "sglang", model=model, max_rows=16, **(drafting if request.param else plain))


def load_weights(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def test_greedy_tokens_and_logprobs_are_transformers(sampled: Any, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for ids, completion in zip(PROMPTS, sampled[1], strict=True):
        prompt = torch.tensor([ids])
        wanted = reference.generate(
            prompt,
            do_sample=False,
            max_new_tokens=48,
            eos_token_id=None,
            attention_mask=torch.ones_like(prompt),
        )
        assert completion.token_ids == tuple(wanted[0, len(ids) :].tolist())
        with torch.no_grad():
            logits_LV = reference(wanted, use_cache=False).logits[0, len(ids) - 1 : -1]
        logprob_L = logits_LV.log_softmax(-1).gather(1, wanted[0, len(ids) :, None])[:, 0]
        # float32; the peaked logits of this model lose up to 6e-5 to another order of sums.
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprob_L, atol=2e-4, rtol=0)


def test_a_seed_draws_what_the_embedded_engine_draws(sampled: Any, model: Path) -> None:
    """With drafts too: verification draws each token itself, so drafts change the speed alone."""
    embedded = run(lambda engine: engine.generate(requests(1.0)), "transformers", model=model)
    assert [c.token_ids for c in sampled[2]] == [c.token_ids for c in embedded]


def test_drafts_are_counted_and_partly_accepted(sampled: Any) -> None:
    drafts, greedy, drawn, total, _ = sampled
    counts = [c.drafts for c in (*greedy, *drawn)]
    if not drafts:
        assert counts == [None] * len(counts)
        return
    assert sum(c.accepted for c in counts) == total.accepted > 0
    assert total.drafted == 3 * total.steps
    assert total.accepted < total.drafted


def test_an_update_reaches_target_and_draft_and_one_back_undoes_it(sampled: Any, model: Path) -> None:
    from relax_rollout import tensor_digest

    drafts, _, drawn, _, ((changed, other), (back, again)) = sampled
    wanted = {n: t for n, t in load_weights(model).items() if drafts or not n.startswith("mtp.")}
    assert changed == {name: tensor_digest(1.25 * tensor) for name, tensor in wanted.items()}
    assert back == {name: tensor_digest(tensor) for name, tensor in wanted.items()}
    assert [c.token_ids for c in again] == [c.token_ids for c in drawn] != [c.token_ids for c in other]
    assert {v for c in other for v in c.versions} == {1}
    assert {v for c in again for v in c.versions} == {2}


def in_another_basis(weights: dict[str, torch.Tensor], hidden: int) -> dict[str, torch.Tensor]:
    """The same function, but for round-off, with the hidden channels in another order: all weights change."""
    order = torch.randperm(hidden, generator=torch.Generator().manual_seed(0))

    def turn(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "mtp.fc.weight":
            return torch.cat([half[:, order] for half in tensor[order].chunk(2, dim=1)], dim=1)
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            return tensor[order]
        if tensor.ndim == 2 and tensor.shape[1] == hidden:
            return tensor[:, order]
        return tensor[order] if tensor.shape == (hidden,) else tensor

    return {name: turn(name, tensor).clone() for name, tensor in weights.items()}


@pytest.mark.timeout(1500)  # three starts of a server, one after a time limit
def test_an_updated_draft_keeps_its_acceptance_a_frozen_one_is_turned_off_a_hung_server_comes_back(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The update changes every weight and no token, so that acceptance may be compared exactly."""
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    weights = load_weights(model)
    turned = in_another_basis(weights, hidden)
    frozen = turned | {name: tensor for name, tensor in weights.items() if name.startswith("mtp.")}

    async def update(engine: Any, version: int, tensors: dict[str, torch.Tensor]) -> list[Any]:
        await engine.begin_update(version)
        await engine.load(tensors)
        await engine.end_update()
        return [*await engine.generate(requests(0.0)), *await engine.generate(requests(1.0))]

    async def test(engine: Any) -> Any:
        drawn, rates = [], []
        for version, tensors in enumerate((weights, turned, frozen)):
            drawn.append(await update(engine, version, tensors))
            rates.append(engine.acceptance.take().rate)
        # Below min_draft_rate over a window: the next update begins without drafts.
        drawn.append(await update(engine, 3, turned))
        # A server that hangs is noticed, started again and given the weights of version 3.
        os.killpg(engine._servers[0].process.pid, signal.SIGSTOP)
        drawn.append([*await engine.generate(requests(0.0)), *await engine.generate(requests(1.0))])
        return drawn, rates

    # By files, the path that no other test of real servers takes.
    options: dict[str, Any] = {"draft_tokens": 3, "max_rows": 16, "transport": "files"}
    options |= {"min_draft_rate": 0.02, "draft_window": 100, "hang_timeout_s": 20.0}
    drawn, (first, updated, stale) = run(test, "sglang", model=model, **options)
    assert first > 0.05
    assert updated == pytest.approx(first, rel=0.1)
    assert stale < 0.3 * first
    tokens = [[c.token_ids for c in completions] for completions in drawn]
    assert tokens == [tokens[0]] * 5
    assert {v for c in (*drawn[3], *drawn[4]) for v in c.versions} == {3}
    assert [c.drafts for c in (*drawn[3], *drawn[4])] == [None] * len(drawn[3] + drawn[4])
    assert "server 0 has not answered for 20 s" in caplog.text
    assert "speculative decoding is turned off: fewer than 2 % of the drafts stand" in caplog.text


def test_faults_of_an_update_are_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution weight cached for ever, a draft that stays as it was, one bit of one weight."""
    from relax_rollout import EngineError, EngineStateError

    monkeypatch.setenv("RELAX_SGLANG_FAULTS", "frozen_conv_cache,frozen_draft,flipped_byte")
    weights = {name: tensor * 1.01 for name, tensor in load_weights(model).items()}

    async def test(engine: Any) -> str:
        await engine.begin_update(1)
        await engine.load(weights)
        with pytest.raises(EngineError) as raised:
            await engine.end_update()
        with pytest.raises(EngineStateError, match="serves no weights"):
            await engine.generate(requests(0.0))
        return str(raised.value)

    # Two of the faults are the loaders' own.
    text = run(test, "sglang", model=model, draft_tokens=3, max_rows=4, replay=False)
    named = ("layers.0.linear_attn.attn.conv_weights", "weight model.norm.weight", "weight mtp.fc.weight")
    assert [name for name in named if name not in text] == []
    assert "weight model.layers" not in text


def with_vocabulary(model: Path, folder: Path, size: int) -> Path:
    """The checkpoint with rows for tokens that its tokenizer does not have."""
    from safetensors.torch import save_file

    shutil.copytree(model, folder)
    weights = load_weights(model)
    embedding = weights["model.embed_tokens.weight"]
    more = torch.zeros(size - len(embedding), embedding.shape[1])
    weights["model.embed_tokens.weight"] = torch.cat([embedding, more])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return folder


@pytest.mark.timeout(1500)  # a Ray, and a server of SGLang, on a machine that may be busy
def test_training_on_sglang(model: Path, tmp_path: Path) -> None:
    """Two steps of the quickstart; the gap of log-probs is round-off, drafts are in the metrics.

    The trainer has two tensor-parallel ranks, and so has the server, each of which opens the share of the
    weights that one of the trainer's has packed: SGLang cuts a vocabulary in multiples of 64, so do they.
    """
    from relax_core.cli.train import main

    settings = {
        "recipe": "quickstart",
        "model.path": with_vocabulary(model, tmp_path / "model", 192),
        "run.dir": tmp_path / "runs",
        "run.name": "on-sglang",
        "run.steps": 2,
        "trainer.warmup_steps": 0,
        "rollout.engine": "sglang",
        "rollout.draft_tokens": 2,
        "rollout.max_batch_size": 16,
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 4,
        "rollout.max_logprob_gap": 0.001,
        "eval.every": 0,
        "eval.before": "false",
        "eval.max_prompts": 4,
        "cluster.mode": "ray",
        "cluster.trainer_ranks": 2,
        "parallel.tensor": 2,
        "sglang.tensor": 2,
    }
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    assert main(arguments) in (0, None)
    (log,) = (tmp_path / "runs").rglob("log.txt")
    said = log.read_text()
    assert "weights travel by ipc: every engine opens the memory of ranks on its devices; each of its" in said
    assert "gathered before they travel: mtp.fc.weight (" in said
    assert "gathered into whole tensors" not in said
    (file,) = (tmp_path / "runs").rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [row for row in rows if "logprob_gap_max" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["logprob_gap_max"] < 1e-3 for row in steps)
    assert all(0 <= row["draft_acceptance"] <= 1 and 1 <= row["draft_length"] <= 3 for row in steps)


@pytest.mark.timeout(1500)  # a server of SGLang, on a machine that may be busy
@pytest.mark.parametrize(
    ("vision", "drafts", "tensor"),
    [("frozen", 0, 1), ("trained", 2, 2)],
    ids=["plain", "drafts-on-two-ranks"],
)
def test_pictures_are_learnt_from_what_servers_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vision: str, drafts: int, tensor: int
) -> None:
    """The server sees the trainer's pictures at the trainer's places; a frozen tower stays as it loaded it,
    which is checked by digest at every update."""
    from relax_core.config.root import RelaxConfig
    from relax_core.testing import colours
    from relax_core.testing.colours import write_model, write_rows
    from relax_core.testing.runs import records, start

    sizes = colours.model_config()
    # On CPUs SGLang pads what it cannot cut into multiples of 32, and what is padded cannot be read back.
    sizes["text_config"] |= {"num_key_value_heads": 2, "intermediate_size": 64, "linear_num_value_heads": 4}
    sizes["vision_config"]["intermediate_size"] = 64
    monkeypatch.setattr(colours, "model_config", lambda: sizes)
    rows = write_rows(tmp_path / "task")
    config = RelaxConfig.model_validate(
        {
            "run": {"steps": 3, "device": "cpu", "progress": "none", "threads": 1, "name": "colours"},
            "model": {"path": str(write_model(tmp_path / "model")), "vision": vision},
            "data": {"path": str(rows), "images_key": "images"},
            "trainer": {"lr": 1e-2, "precision": "fp32"},
            "rollout": {
                "engine": "sglang", "prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 3,
                "max_batch_size": 32, "draft_tokens": drafts,
            },
            "sglang": {"tensor": tensor},
            "reward": {"function": "exact_match", "concurrency": 1},
            "eval": {"every": 0},
            "checkpoint": {"every": 0},
        }
    )  # fmt: skip
    steps = [step for step in records(start(config, tmp_path / "run")) if "reward" in step]
    assert len(steps) == 3
    # Float32 on both sides; a picture at another place, or none, gives 0.1.
    assert max(step["logprob_gap_max"] for step in steps) < 1e-4
    assert all(("draft_acceptance" in step) == bool(drafts) for step in steps)
