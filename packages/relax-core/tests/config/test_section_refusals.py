"""Settings that contradict others of their section, and random mixtures of settings: every refusal names the
setting, the limit and the nearest that works, and what it names is accepted."""

import random
import re

import pytest
from relax_core.config import ConfigError, load_config
from relax_core.config.rules.shapes import shape_problems
from relax_core.model.config import Qwen35Config
from relax_core.plan.shapes import model_facts

NPU, RL, SFT = "qwen35-9b-mtp-8xnpu-thd", "quickstart", "quickstart-sft"
# What only the user knows: a teacher, a folder that all hosts see.
UNKNOWN = {"teacher.path", "rollout.update_folder"}

# Recipe, flags, the setting that is named, words of the limit.
CONTRADICTIONS = [
    (NPU, "parallel.tensor=1 cluster.trainer_ranks=2 cluster.engines=1 sglang.tensor=1", "parallel.sequence",
     "tensor 2"),
    (NPU, "parallel.pipeline_chunks=2", "parallel.pipeline_chunks", "pipeline 2"),
    (NPU, "parallel.first_stage_layers=4", "parallel.first_stage_layers", "pipeline 2"),
    (RL, "trainer.precision=fp32 trainer.gradient_precision=bf16", "trainer.gradient_precision", "fp32"),
    (NPU, "trainer.overlap_param_gather=true", "trainer.overlap_param_gather", "overlap_grad_reduce true"),
    (RL, "trainer.min_lr=1", "trainer.min_lr", "at most"),
    (RL, "rollout.draft_tokens=2", "rollout.engine", "sglang"),
    (NPU, "rollout.update_folder=/w", "rollout.update_folder", "update_path disk"),
    (RL, "rollout.over_sampling=2", "rollout.over_sampling", "early_abort"),
    (NPU, "rollout.early_abort=restart", "rollout.early_abort", "over_sampling above 1"),
    (NPU, "rollout.partial_versions=5", "rollout.partial_versions", "early_abort continue"),
    (NPU, "rollout.urls=[http://a:1] rollout.servers=2", "rollout.servers", "urls []"),
    (RL, "reward.overlong_penalty=0.5", "reward.overlong_penalty", "overlong_tokens"),
    (NPU, "eval.pass_at=[16]", "eval.pass_at", "from 1 to 8"),
    (NPU, "eval.temperature=0", "eval.pass_at", "temperature above 0"),
    (RL, "cluster.engines=2", "cluster.engines", "mode ray"),
    (NPU, "cluster.address=a:1 cluster.object_store_gib=1", "cluster.object_store_gib", "address null"),
    (NPU, "cluster.placement=hybrid", "cluster.placement", "engines 9 or more"),
    ("math-rl", "algorithm.name=sft", "algorithm.clip_low", "its default"),
    (RL, "algorithm.kl_loss_coef=1 algorithm.kl_reward_coef=1", "algorithm.kl_loss_coef", "kl_reward_coef 0"),
    (RL, "lora.alpha=3", "lora.rank", "1 or more"),
    (SFT, "data.overlong=skip data.max_tokens=null", "data.overlong", "max_tokens"),
    (RL, "data.chat=false data.system_prompt=x", "data.system_prompt", "its default"),
    (RL, "data.block_tokens=64", "data.block_tokens", "its default"),
]  # fmt: skip


def refusals(recipe, given):
    """What is wrong with a recipe under some flags."""
    try:
        config = load_config(recipe, [f"--{name}={value}" for name, value in given.items()])
    except ConfigError as error:
        return error.problems
    return shape_problems(config, Qwen35Config.from_hf(model_facts(config.model.path)))


def follow(recipe, given):
    """Takes what every refusal names until none is left."""
    for _ in range(12):
        problems = refusals(recipe, given)
        if not problems:
            return
        before = dict(given)
        for problem in problems:
            field = ".".join(problem.path)
            assert problem.given is not None, problem
            assert problem.allowed, problem
            if field in UNKNOWN:
                return
            assert problem.nearest is not None, problem
            for flag in re.split(r"(?:^| )--", f"--{field} {problem.nearest}")[1:]:
                name, _, value = flag.strip().partition(" ")
                given[name] = value
        assert given != before, problems
    raise AssertionError(f"{recipe} comes to no end: {problems}")


@pytest.mark.parametrize(("recipe", "text", "field", "limit"), CONTRADICTIONS, ids=str)
def test_a_contradiction_inside_a_section_names_its_setting_and_what_works(recipe, text, field, limit):
    given = dict(word.split("=") for word in text.split())
    named = {".".join(problem.path): problem for problem in refusals(recipe, given)}
    assert limit in named[field].allowed
    assert named[field].message
    follow(recipe, given)


CHOICES = {
    "parallel.pipeline": "1 2 3 5", "parallel.tensor": "1 2 3 8 32", "parallel.context": "1 2 3 8",
    "parallel.expert": "1 8 64 128", "parallel.expert_tensor": "null 1 2", "parallel.sequence": "true false",
    "parallel.pipeline_chunks": "1 4", "parallel.context_delta": "auto heads", "mtp.layers": "null 0 3",
    "mtp.init": "null copy random truncate", "mtp.loss_coefficient": "0 0.1", "mtp.repeated": "1 3",
    "mtp.only": "true false", "rollout.draft_tokens": "0 1 16", "rollout.max_batch_size": "1 7 4096",
    "rollout.prompts_per_step": "1 3 100", "rollout.max_new_tokens": "1 100 131072",
    "rollout.update_path": "auto ipc host broadcast", "trainer.micro_batch_tokens": "16 1000 200000",
    "trainer.optimizer_steps_per_batch": "1 7", "trainer.overlap_grad_reduce": "true false",
    "cluster.trainer_ranks": "1 3 8 256", "cluster.engines": "1 3 64", "cluster.mode": "inline ray",
    "cluster.placement": "colocate async hybrid", "sglang.states": "null 1 4000", "sglang.tensor": "1 3 16",
    "sglang.max_tokens": "null 100", "sglang.radix_cache": "true false", "sglang.graph_batches": "[] [8,4]",
    "lora.rank": "0 16", "model.vision": "absent frozen trained", "data.images_key": "null images",
    "data.max_tokens": "null 16 100000", "algorithm.name": "grpo ppo dapo rloo sft dpo",
    "algorithm.kl_loss_coef": "0 0.01", "algorithm.correction": "none truncated icepop",
    "model.path": "Qwen/Qwen3.5-0.8B Qwen/Qwen3.5-35B-A3B", "environment.name": "null tools",
}  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_what_refusals_of_random_settings_name_is_accepted_in_the_end(seed):
    draw = random.Random(seed)
    recipe = draw.choice(
        [NPU, "qwen35-35b-a3b-16xnpu-thd", "qwen35-9b-cp-8xcuda", "qwen35-4b-mtp-1xcuda", "math-rl"]
    )
    names = draw.sample(list(CHOICES), draw.choice([2, 3, 5]))
    follow(recipe, {name: draw.choice(CHOICES[name].split()) for name in names})
