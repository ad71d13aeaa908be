"""A whole plan: what is added up where, what is refused, and what a change of settings does."""

import json
import subprocess
import sys

import pytest
from relax_core.config import load_config
from relax_core.plan import DEVICES, Workload, plan
from relax_core.plan.page import render_plan
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
    # 24 delta nets: 32 heads of 128 x 128 float32, and 3 past inputs of 8192 channels in bfloat16.
    assert engine.state_bytes == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    # 8 attention layers and the draft layer: keys and values of 4 heads of 256 in bfloat16.
    assert engine.token_bytes == 9 * 2 * 4 * 256 * 2
    assert engine.cached_tokens == engine.cache // engine.token_bytes
    assert engine.size <= 0.5 * DEVICES["910c-die"].memory + engine.other


def test_what_does_not_fit_is_refused_with_what_would():
    made = planned(NPU, "--sglang.memory_fraction", "0.6")
    (problem,) = made.problems
    assert problem.path == ("sglang", "memory_fraction")
    assert "910c-die has 59.0 GiB" in problem.message
    assert not made.fits
    most = float(problem.allowed.split("at most ")[1].split(",")[0])
    assert planned(NPU, "--sglang.memory_fraction", str(most)).fits, "what is proposed works"


def test_an_engine_without_room_for_a_sequence_is_refused():
    (problem,) = planned(NPU, "--sglang.memory_fraction", "0.3").problems
    assert "no room for the keys and values" in problem.message
    assert "a larger share" in problem.allowed


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--trainer.recompute", "none", "--trainer.micro_batch_tokens", "131072"), "trainer.recompute"),
        (("--trainer.moment_precision", "fp32", "--trainer.gradient_precision", "fp32", "--trainer.recompute",
          "full"), "trainer.moment_precision"),
    ],
)  # fmt: skip
def test_a_trainer_that_does_not_fit_is_told_what_takes_less(flags, field):
    made = plan(load_config("qwen35-35b-a3b-sft-mtp-8xnpu", flags))
    (problem,) = made.problems
    assert ".".join(problem.path) == field
    assert problem.allowed


def test_the_models_sizes_are_checked_before_anything_is_reckoned():
    made = planned(NPU, "--mtp.layers", "3")
    assert [".".join(problem.path) for problem in made.problems] == ["mtp.init"]
    assert made.trainer is None
    assert any("Refused: 1 problem" in line for line in plan_lines(made))


def test_a_checkpoints_own_config_wins_over_the_table(tmp_path):
    from relax_core.plan.shapes import model_facts, published

    facts = published()["Qwen3.5-9B"]
    folder = tmp_path / "Qwen3.5-9B"
    folder.mkdir()
    text = {**facts["text_config"], "num_hidden_layers": 16}
    (folder / "config.json").write_text(json.dumps({**facts, "text_config": text}))
    assert model_facts(str(folder))["text_config"]["num_hidden_layers"] == 16
    assert model_facts("anywhere/Qwen3.5-9B") == facts
    small = plan(load_config(NPU, ["--model.path", str(folder)]))
    assert small.parameters < planned().parameters


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
    assert ppo.devices[0].phases["training"] - plain.phases["training"] == trunk
    assert ppo.phases["train"] == pytest.approx(2 * planned(recipe).phases["train"])
    kl = planned(recipe, "--algorithm.kl_loss_coef", "0.01").devices[0]
    assert kl.phases["training"] - plain.phases["training"] == sum(memory.weights.values())


def test_draft_layers_alone_keep_no_activations_of_the_trunk_and_no_gradients_of_its_weights():
    recipe = "qwen35-4b-mtp-1xcuda"
    whole, alone = (planned(recipe, *flags).trainer for flags in ((), ("--mtp.only", "true")))
    assert set(alone.memory[0].gradients) == set(alone.memory[0].activations) == {"draft layers"}
    assert alone.memory[0].weights == whole.memory[0].weights
    assert alone.time.total < whole.time.total / 2
