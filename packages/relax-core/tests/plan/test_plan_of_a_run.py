"""A whole plan: what is added up where, what is refused, and what a change of settings does."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from relax_core.config import load_config
from relax_core.plan import DEVICES, Workload, plan
from relax_core.plan.page import render_plan
from relax_core.plan.shapes import published
from relax_core.plan.text import plan_lines, plan_values
from relax_core.plan.workload import spread

NPU = "qwen35-9b-mtp-8xnpu-thd"
GIB = 2**30


def planned(recipe=NPU, *flags, device=None):
    return plan(load_config(recipe, flags), recipe=recipe, device=device)


def test_parts_of_a_device_add_up_to_its_fullest_phase():
    for use in planned().devices:
        assert sum(use.parts.values()) == use.peak == max(use.phases.values())


def test_weights_gradients_and_optimizer_take_the_bytes_that_the_settings_say():
    # 16 bytes a weight on one rank, but for the few that are float32 themselves; 10 in half.
    made = planned("qwen35-9b-mtp-1xcuda", "--trainer.gradient_precision", "fp32",
                   "--trainer.moment_precision", "fp32")  # fmt: skip
    (memory,) = made.trainer.memory
    three = [sum(part.values()) for part in (memory.weights, memory.gradients, memory.optimizer)]
    assert sum(three) / made.parameters == pytest.approx(16, abs=1e-3)
    half = planned("qwen35-9b-mtp-1xcuda").trainer.memory[0]
    assert sum(sum(p.values()) for p in (half.weights, half.gradients, half.optimizer)) / made.parameters == (
        pytest.approx(10, abs=1e-3)
    )


def test_the_optimizers_state_lies_on_the_data_and_context_parallel_ranks_together():
    one, more = planned("qwen35-9b-cp-16xnpu"), planned("qwen35-9b-mtp-8xnpu-thd")
    # Four context-parallel ranks against two data-parallel ones, of the same tensor-parallel share.
    assert sum(more.trainer.memory[0].optimizer.values()) == pytest.approx(
        2 * sum(one.trainer.memory[0].optimizer.values()), rel=1e-3
    )


def test_recomputing_more_keeps_less_and_takes_longer():
    kept, seconds = zip(
        *(
            (sum(made.trainer.memory[0].activations.values()), made.trainer.time.total)
            for how in ("none", "selective", "full")
            for made in (planned(NPU, "--trainer.recompute", how),)
        ),
        strict=True,
    )
    assert kept[0] > 2 * kept[1] > 4 * kept[2]
    assert seconds[0] < seconds[1] < seconds[2]


def test_the_caches_of_an_engine_are_hand_counted():
    engine = planned(NPU).engine
    # A quarter of 24 delta nets: 8 heads of 128 x 128 bfloat16, and 3 past inputs of 2048 channels.
    matrices, column = 24 * 8 * 128 * 128 * 2, 24 * 2048 * 2
    assert engine.state_bytes == matrices + 3 * column
    # 64 sequences and one more for padding; on an NPU with room for drafts in the convolutions, and the
    # states after each of 3 tokens.
    assert engine.states == 65 * (matrices + 5 * column) + 65 * 3 * (matrices + 3 * column)
    # 8 attention layers and the draft layer: keys and values of one head of 256 in bfloat16.
    assert engine.token_bytes == 9 * 2 * 256 * 2
    assert engine.cached_tokens == engine.cache // engine.token_bytes
    # The share of the device; SGLang reckons without what is there for padding.
    assert engine.size - engine.other == pytest.approx(0.5 * DEVICES["910c-die"].memory, rel=0.01)


def test_a_gpus_states_are_float32_and_prefixes_keep_states_of_their_own():
    flags = ("--sglang.states", "null", "--sglang.tensor", "1", "--cluster.engines", "8",
             "--rollout.max_batch_size", "32", "--rollout.draft_tokens", "0")  # fmt: skip
    bare, kept = (
        planned("qwen35-9b-mtp-8xcuda", *flags, "--sglang.radix_cache", on).engine for on in ("false", "true")
    )
    each = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert bare.states == 33 * each
    # SGLang gives 0.9 of what keys and values get to states, and takes three for each sequence.
    assert kept.states / kept.cache == pytest.approx(0.9, rel=0.01)
    assert kept.states > 3 * bare.states


def test_what_does_not_fit_is_refused_with_what_would():
    made = planned(NPU, "--sglang.memory_fraction", "0.6")
    (problem,) = made.problems
    assert problem.path == ("sglang", "memory_fraction")
    assert "910c-die has 59.0 GiB" in problem.message
    assert problem.given == "0.6"
    assert problem.allowed.startswith(f"at most {problem.nearest}, ")
    assert not made.fits
    assert planned(NPU, "--sglang.memory_fraction", problem.nearest).fits, "what is proposed works"
    more = str(round(float(problem.nearest) + 0.01, 2))
    assert not planned(NPU, "--sglang.memory_fraction", more).fits, "and is the nearest"


def test_an_engine_without_room_for_a_sequence_is_refused():
    (problem,) = planned(NPU, "--sglang.memory_fraction", "0.07").problems
    assert "no room for the keys and values" in problem.message
    assert problem.allowed.startswith(f"at least {problem.nearest}, ")


NOT_FITTING = [
    (NPU, "sglang.memory_fraction=0.6", None, "sglang.memory_fraction"),
    (NPU, "sglang.memory_fraction=0.07", None, "sglang.memory_fraction"),
    (NPU, "trainer.recompute=none trainer.micro_batch_tokens=65536", None, "trainer.recompute"),
    # Nothing is computed again as it is: shorter rows.
    (NPU, "trainer.micro_batch_tokens=1000000", None, "trainer.micro_batch_tokens"),
    ("qwen35-35b-a3b-sft-mtp-8xnpu", "trainer.moment_precision=fp32 trainer.gradient_precision=fp32", None,
     "trainer.moment_precision"),
    # Weights, not rows: a change of rows would not help, and more ranks do.
    ("qwen35-9b-mtp-1xcuda", "", "h100", "sglang.memory_fraction"),
    # Whole weights packed on every device for engines that cut them otherwise: the host's memory has them.
    ("qwen35-35b-a3b-16xnpu-thd", "rollout.update_path=auto", None, "rollout.update_path"),
    ("qwen35-35b-a3b-8xcuda", "", "h100", "sglang.memory_fraction"),
    ("math-rl", "", "910c-die", "sglang.memory_fraction"),
    # Everything is too large on one device: many settings together.
    ("math-rl", "model.path=Qwen/Qwen3.5-35B-A3B", None, "sglang.memory_fraction"),
    # An engine of one die cannot hold the weights.
    ("qwen35-35b-a3b-16xnpu-thd", "sglang.tensor=1", None, "sglang.tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "text", "device", "field"), NOT_FITTING, ids=str)
def test_whatever_does_not_fit_the_nearest_that_is_named_does(recipe, text, device, field):
    given = dict(word.split("=") for word in text.split())

    def with_flags(settings):
        return planned(recipe, *(f"--{name}={value}" for name, value in settings.items()), device=device)

    (problem,) = with_flags(given).problems
    assert ".".join(problem.path) == field
    assert problem.given is not None
    assert "GiB" in problem.message or "no room" in problem.message
    words = f"--{field} {problem.nearest}".split()
    nearest = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    assert with_flags(given | nearest).problems == ()


def test_what_no_change_fits_is_said_to_need_larger_devices(tmp_path):
    facts = published()["Qwen3.5-35B-A3B"]
    text = {**facts["text_config"], "hidden_size": 2048 * 64, "moe_intermediate_size": 512 * 64}
    (tmp_path / "config.json").write_text(json.dumps({**facts, "text_config": text}))
    (problem,) = planned("math-rl", "--model.path", str(tmp_path)).problems
    assert problem.allowed.startswith("devices with more memory")
    assert problem.nearest is None


def test_the_models_sizes_are_checked_before_anything_is_reckoned():
    made = planned(NPU, "--mtp.layers", "3")
    assert [".".join(problem.path) for problem in made.problems] == ["mtp.init"]
    assert made.trainer is None
    assert any("Refused: 1 problem" in line for line in plan_lines(made))


def test_a_checkpoints_own_config_wins_over_the_table(tmp_path):
    from relax_core.plan.shapes import model_facts

    facts = published()["Qwen3.5-9B"]
    folder = tmp_path / "Qwen3.5-9B"
    folder.mkdir()
    text = {**facts["text_config"], "num_hidden_layers": 16}
    (folder / "config.json").write_text(json.dumps({**facts, "text_config": text}))
    assert model_facts(str(folder))["text_config"]["num_hidden_layers"] == 16
    assert model_facts("anywhere/Qwen3.5-9B") == facts
    small = plan(load_config(NPU, ["--model.path", str(folder)]))
    assert small.parameters < planned().parameters


def test_a_device_that_the_settings_do_not_name_is_said_to_stand_in():
    assert any("assumed: h200s, for run.device cpu" in note for note in planned("quickstart").notes)
    assert not any("run.device" in note for note in planned("quickstart", device="h100").notes)
    assert not any("run.device" in note for note in planned().notes)


def test_drafts_pay_where_reading_weights_takes_the_time():
    made = planned()
    talk = made.rollout.speculation
    assert talk.per_step == pytest.approx(1 + 0.65 + 0.65**2)
    assert 1 < talk.speedup < talk.per_step
    assert talk.pays_below >= made.engine.rows
    # Without drafts the same steps take longer by that factor.
    plain = planned(NPU, "--rollout.draft_tokens", "0")
    assert plain.rollout.decode / made.rollout.decode == pytest.approx(talk.speedup, rel=0.05)


def test_pipelines_wait_and_hold_more_micro_batches_on_their_first_stage():
    made = planned("qwen35-35b-a3b-16xnpu-thd")
    assert [memory.in_flight for memory in made.trainer.memory] == [2, 1]
    time = made.trainer.time
    per = time.forward.total + time.backward.total
    assert time.bubble == pytest.approx(per), "one micro-batch's time for two stages"


def test_lengths_are_spread_around_their_mean():
    assert spread(8192, 256, 0.5)[-1] == 8192
    assert sum(spread(8192, 256, 0.5)) / 256 == pytest.approx(4096, rel=1e-3)
    workload = Workload.of(load_config(NPU))
    assert len(workload.lengths) == 256
    assert max(workload.lengths) == 8192 + 512


def test_blocks_of_documents_are_full_and_all_their_tokens_are_targets():
    flags = ("--data.text_key", "text", "--data.block_tokens", "256", "--sft.samples_per_step", "8")
    workload = Workload.of(load_config("quickstart-sft", flags))
    assert (workload.lengths, workload.scored) == ((256,) * 8, 1.0)


def test_values_are_json_and_the_page_draws_every_group_of_devices():
    made = planned("qwen35-35b-a3b-16xnpu-thd")
    values = json.loads(json.dumps(plan_values(made)))
    assert values["fits"] is True
    assert len(values["devices"]) == 16
    assert values["device_seconds_per_step"] == pytest.approx(16 * made.step_seconds)
    page = render_plan(made)
    assert "rank 0-7 + engine 0" in page
    assert "rank 8-15 + engine 1" in page
    assert page.count("<rect") > 20
    assert "<script" not in page


def test_every_kind_of_memory_has_a_look_of_its_own_in_every_bar_and_in_the_legend():
    page = render_plan(planned("qwen35-35b-a3b-16xnpu-thd", "--sglang.memory_fraction", "0.6"))
    bars = re.findall(r"<rect x=[^>]*?(fill=[^>]*)><title>([^:]*): [^<]* GiB", page)
    legend = re.findall(r"<rect width=\"10\" height=\"10\" (fill=[^/]*)/></svg>([^<]*)<", page)
    looks = {}
    for look, kind in (*bars, *legend):
        if kind not in ("sampling", "score", "train", "update"):
            looks.setdefault(kind, set()).add(look)
    assert len(looks) > 8
    assert all(len(one) == 1 for one in looks.values()), looks
    assert len(set.union(*looks.values())) == len(looks), "no two kinds look alike"


def test_planning_needs_neither_torch_nor_two_seconds_of_work():
    code = (
        "import sys, time; from relax_core.cli.train import main\n"
        f"code = main(['--plan', '--json', '--recipe', {NPU!r}])\n"
        "print(code, sorted({'torch', 'megatron', 'transformers', 'ray'} & set(sys.modules)),\n"
        "      time.process_time() < 2, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip() == "0 [] True"
    assert json.loads(done.stdout)["recipe"] == NPU


def test_a_critic_and_a_reference_lie_beside_the_policy():
    recipe = "qwen35-9b-cp-8xcuda"
    plain = planned(recipe).devices[0]
    ppo = planned(recipe, "--algorithm.name", "ppo")
    memory = ppo.trainer.memory[0]
    kinds = (memory.weights, memory.gradients, memory.optimizer)
    trunk = sum(size for kind in kinds for part, size in kind.items() if part not in ("head", "draft layers"))
    # Its head is a row of 4096 weights: 2 bytes, 4 of gradient, and 8 + 2 of states shared by two ranks.
    critic = ppo.devices[0].phases["training"] - plain.phases["training"]
    assert critic == ppo.devices[0].parts["critic"]
    assert critic - trunk == 4096 * (2 + 4 + 10 // 2)
    assert ppo.phases["train"] == pytest.approx(2 * planned(recipe).phases["train"])
    kl = planned(recipe, "--algorithm.kl_loss_coef", "0.01").devices[0]
    assert kl.phases["training"] - plain.phases["training"] == sum(memory.weights.values())


def test_draft_layers_alone_keep_no_activations_of_the_trunk_and_no_gradients_of_its_weights():
    recipe = "qwen35-4b-mtp-1xcuda"
    whole, alone = (planned(recipe, *flags).trainer for flags in ((), ("--mtp.only", "true")))
    assert set(alone.memory[0].gradients) == set(alone.memory[0].activations) == {"draft layers"}
    assert alone.memory[0].weights == whole.memory[0].weights
    assert alone.time.total < whole.time.total / 2


CAPTIONS = "qwen35-35b-a3b-sft-mtp-8xnpu"


def test_a_frozen_tower_takes_its_weights_and_a_trained_one_what_trained_weights_take():
    frozen, trained = (
        planned(CAPTIONS, "--model.vision", how).trainer.memory[0] for how in ("frozen", "trained")
    )
    # Depth 27 of width 1152: counted by hand from the published sizes, biases and norms included.
    block = 4 * 1152**2 + 4 * 1152 + 2 * 1152 * 4304 + 4304 + 1152 + 4 * 1152
    merger = 2 * 1152 + 4608**2 + 4608 + 4608 * 2048 + 2048
    tower = 3 * 2 * 16 * 16 * 1152 + 1152 + 2304 * 1152 + 27 * block + merger
    assert frozen.weights["vision tower"] == trained.weights["vision tower"] == 2 * tower
    assert "vision tower" not in frozen.gradients
    assert "vision tower" not in frozen.optimizer
    # Gradients and both means in bfloat16 here, and the lower half of the weight; two ranks share states.
    assert trained.gradients["vision tower"] == 2 * tower
    assert trained.optimizer["vision tower"] == 6 * tower // 2
    kept = [memory.activations["vision tower"] for memory in (frozen, trained)]
    assert kept[1] > 4 * kept[0]


def test_only_the_first_stage_has_the_tower_and_its_pictures():
    memory = planned(CAPTIONS, "--parallel.pipeline", "2", "--parallel.expert", "4", "--mtp.layers", "0",
                     "--mtp.init", "truncate",
                     "--mtp.loss_coefficient", "0").trainer.memory  # fmt: skip
    assert ["vision tower" in stage.weights for stage in memory] == [True, False]
    assert ["vision tower" in stage.activations for stage in memory] == [True, False]


def test_adapters_alone_take_gradients_and_states():
    recipe = "qwen35-9b-mtp-1xcuda"
    flags = ("--mtp.loss_coefficient", "0", "--rollout.draft_tokens", "0")
    whole, lora = (planned(recipe, *flags, *more) for more in ((), ("--lora.rank", "16")))
    (memory,), (before,) = lora.trainer.memory, whole.trainer.memory
    # Eight layers of full attention, 24 delta nets: inputs and outputs of each of their projections.
    full = (4096 + 2 * 4096 + 2 * 1024) + (4096 + 4096)
    delta = (4096 + 2 * 2048 + 2 * 4096 + 2 * 32) + (4096 + 4096)
    feed = (4096 + 2 * 12288) + (12288 + 4096)
    adapters = 16 * (8 * full + 24 * delta + 32 * feed)
    assert memory.weights["adapters"] == 2 * adapters
    assert set(memory.gradients) == set(memory.optimizer) == {"adapters"}
    assert {part: size for part, size in memory.weights.items() if part != "adapters"} == before.weights
    assert lora.devices[0].phases["training"] < whole.devices[0].phases["training"] / 2
    # What adapters are added to goes to the engine as a copy.
    merged = 8 * 4096 * (2 * 4096 + 2 * 1024 + 4096) + 32 * 3 * 4096 * 12288
    merged += 24 * (4096 * (2 * 2048 + 2 * 4096 + 2 * 32 + 4096))
    assert lora.devices[0].parts["packed weights"] == pytest.approx(2 * merged, rel=1e-3)
    assert lora.trainer.time.total < 0.85 * whole.trainer.time.total


def test_adapters_need_no_second_copy_for_a_reference():
    recipe, kl = "qwen35-9b-mtp-1xcuda", ("--algorithm.kl_loss_coef", "0.01", "--lora.rank", "16")
    flags = ("--mtp.loss_coefficient", "0", "--rollout.draft_tokens", "0")
    assert planned(recipe, *flags, *kl).trainer.memory[0].beside == {}


def test_a_teachers_weights_are_spread_as_the_policys_are():
    recipe = "qwen35-9b-cp-8xcuda"
    flags = ("--algorithm.name", "on_policy_distillation", "--teacher.path", "Qwen/Qwen3.5-27B",
             "--algorithm.kl_loss_coef", "0", "--trainer.optimizer_steps_per_batch", "1")  # fmt: skip
    made = planned(recipe, *flags)
    alone = planned(recipe).parameters
    teacher = made.trainer.memory[0].beside["teacher"]
    assert teacher == pytest.approx(made.trainer.memory[0].parts["weights"] * 27e9 / alone, rel=0.1)
    assert made.devices[0].parts["teacher"] == teacher
    assert not any("not planned" in note for note in made.notes)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--algorithm.name", "ppo"), "critic"),
        (
            ("--algorithm.name", "on_policy_distillation", "--teacher.path", "Qwen/Qwen3.5-122B-A10B"),
            "teacher",
        ),
    ],
)
def test_a_further_model_that_does_not_fit_is_refused_and_named(flags, words):
    made = planned("qwen35-9b-mtp-1xcuda", *flags, device="h100")
    assert not made.fits
    assert any(words in problem.message for problem in made.problems), [p.message for p in made.problems]


def test_a_tower_that_fits_frozen_is_refused_trained(monkeypatch):
    """On a device with room for the one, and not for what gradients and states take."""
    flags = ("--trainer.gradient_precision", "fp32", "--trainer.moment_precision", "fp32")
    frozen, trained = (planned(CAPTIONS, "--model.vision", how, *flags) for how in ("frozen", "trained"))
    static = [made.trainer.memory[0].static for made in (frozen, trained)]
    # 446 million weights: 4 bytes of gradient, and 10 of states shared by two ranks.
    assert static[1] - static[0] == 446_571_248 * (4 + 5)
    room = frozen.devices[0].peak + 2 * GIB
    spec = DEVICES["910c-die"]
    monkeypatch.setitem(DEVICES, "910c-die", replace(spec, memory=room + spec.outside))
    assert planned(CAPTIONS, "--model.vision", "frozen", *flags).fits
    (problem,) = planned(CAPTIONS, "--model.vision", "trained", *flags).problems
    assert "GiB while training" in problem.message
    assert problem.path == ("trainer", "moment_precision")


def test_engines_hold_the_tower_of_a_checkpoint_that_has_one():
    servers = planned("qwen35-9b-mtp-8xnpu-thd").engine
    assert servers.parts["engine tower"] == 2 * 456_010_480 // servers.devices
    flags = ("--model.path", "Qwen/Qwen3.5-9B")
    blind, seeing = (
        planned("quickstart", *flags, *more, device="h200")
        for more in ((), ("--model.vision", "frozen", "--data.images_key", "images"))
    )
    assert [made.engine.tower for made in (blind, seeing)] == [0, 2 * 456_010_480]
    assert blind.engine.weights == seeing.engine.weights
