"""Every rule of the registry is seen to refuse, with field, limit and what would work."""

from time import process_time

import pytest
from relax_core.config import ConfigError, load_config
from relax_core.config.checks import CHECKS
from relax_core.config.root import RelaxConfig
from relax_core.config.rules import RULES
from relax_core.config.rules.shapes import SHAPE_RULES, shape_problems
from relax_core.model.config import Qwen35Config
from relax_core.plan import plan
from relax_core.plan.shapes import model_facts, published

NPU = "qwen35-9b-mtp-8xnpu-thd"
MOE = "qwen35-35b-a3b-16xnpu-thd"
SFT = "quickstart-sft"
QUICK = "quickstart"
GPU = "qwen35-9b-mtp-1xcuda"

# Rule, recipe, flags, the field that is refused, words of the limit, the nearest that works; None leaves it
# to `test_the_nearest_that_a_rule_names_works`.
CASES = [
    ("the-budget-holds-the-longest-sample", NPU, "trainer.micro_batch_tokens=8192",
     "trainer.micro_batch_tokens", "at least 10240", "10240"),
    ("the-budget-holds-the-longest-sample", SFT, "data.text_key=text data.block_tokens=100000",
     "trainer.micro_batch_tokens", "at least 100000", "100000"),
    ("documents-are-fine-tuned-on", QUICK, "data.text_key=text", "data.text_key", "algorithm.name sft", None),
    ("every-replica-has-samples", NPU, "rollout.prompts_per_step=8 rollout.samples_per_prompt=2 "
     "cluster.trainer_ranks=128", "cluster.trainer_ranks", "at most 64", "64"),
    ("a-step-has-a-bounded-number-of-samples", QUICK, "rollout.prompts_per_step=60000",
     "rollout.prompts_per_step", "at most 16384", "16384"),
    ("rows-are-longer-than-their-padding", "qwen35-9b-cp-16xnpu",
     "trainer.micro_batch_tokens=16 data.max_tokens=4 rollout.max_new_tokens=8",
     "trainer.micro_batch_tokens", "at least 32", "32"),
    ("overlap-has-ranks", GPU, "trainer.overlap_grad_reduce=true", "trainer.overlap_grad_reduce",
     "false", None),
    ("experts-spread-over-a-stage", MOE, "parallel.expert=16", "parallel.expert", "1, 2, 4, 8", "8"),
    ("pictures-are-seen", SFT, "data.images_key=images", "model.vision", "frozen or trained", None),
    ("a-tower-has-pictures", SFT, "model.vision=frozen", "model.vision", "absent, or data.images_key", None),
    ("teachers-see-pictures", QUICK, "model.vision=frozen data.images_key=images rollout.temperature=1 "
     "algorithm.name=on_policy_distillation teacher.urls=[http://teacher:30000]", "teacher.urls",
     "teacher.path", None),
    ("adapters-leave-the-tower", SFT, "model.vision=trained data.images_key=images lora.rank=4",
     "model.vision", "frozen, or lora.rank 0", None),
    ("drafts-alone-need-a-loss", QUICK, "mtp.only=true mtp.loss_coefficient=0", "mtp.loss_coefficient",
     "above 0", None),
    ("drafts-alone-are-not-overlapped", NPU, "mtp.only=true trainer.overlap_grad_reduce=true",
     "trainer.overlap_grad_reduce", "false", None),
    ("drafts-alone-reach-nothing-else", QUICK, "mtp.only=true mtp.detach_trunk=false", "mtp.detach_trunk",
     "true", None),
    ("a-way-to-more-drafts-needs-their-number", QUICK, "mtp.init=copy", "mtp.init", "null", None),
    ("drafts-keep-up-with-the-trunk", NPU, "mtp.loss_coefficient=0", "rollout.draft_tokens", "0, or", None),
    ("server-settings-have-servers", QUICK, "sglang.memory_fraction=0.5", "sglang.memory_fraction",
     "its default null", "null"),
    ("hybrid-models-keep-no-radix-cache-on-npu", NPU, "sglang.radix_cache=true", "sglang.radix_cache",
     "false", None),
    ("attention-is-the-devices", NPU, "sglang.attention=flashinfer", "sglang.attention", "ascend", "ascend"),
    ("graphs-reach-the-largest-batch", NPU, "rollout.max_batch_size=96", "sglang.graph_batches",
     "at least 96", "[1, 2, 4, 8, 16, 24, 32, 48, 64, 96]"),
    ("graph-batches-ascend", NPU, "sglang.graph_batches=[8,4,64]", "sglang.graph_batches", "ascending",
     "[4, 8, 64]"),
    ("every-sequence-has-a-state", NPU, "sglang.states=16", "sglang.states", "at least 64", "64"),
    ("every-sequence-has-a-state", "math-rl", "sglang.states=64", "sglang.states", "at least 192", "192"),
    ("the-cache-holds-a-completion", NPU, "sglang.max_tokens=4096", "sglang.max_tokens", "above 8192", None),
    ("weights-have-a-way", QUICK, "rollout.update_path=disk", "rollout.update_path", "auto or ipc", "auto"),
    ("weights-have-a-way", GPU, "rollout.update_path=broadcast", "rollout.update_path",
     "devices of their own", "auto"),
    ("weights-have-a-way", NPU, "rollout.update_path=disk cluster.address=head:6379", "rollout.update_folder",
     "all of them share", None),
    ("engines-serve-merged-adapters", QUICK, "lora.rank=4 lora.sync=adapter", "lora.sync", "merge", "merge"),
    ("one-server-an-engine-of-a-cluster", NPU, "rollout.servers=2", "rollout.servers", "1, and", "1"),
    ("servers-belong-to-one-engine", QUICK,
     "rollout.engine=sglang rollout.urls=[http://a:1] cluster.mode=ray cluster.engines=2", "cluster.engines",
     "1, which", "1"),
    ("colocated-engines-have-devices", NPU, "cluster.engines=3", "cluster.engines", "at most 2", "2"),
    ("every-engine-has-prompts", NPU, "rollout.prompts_per_step=1", "cluster.engines", "at most 1", "1"),
    ("warmup-fits", QUICK, "trainer.warmup_steps=40", "trainer.warmup_steps", "at most 39", None),
    ("batch-can-be-split", QUICK, "trainer.optimizer_steps_per_batch=64",
     "trainer.optimizer_steps_per_batch", "at most 32", None),
    ("group-gives-a-signal", QUICK, "rollout.samples_per_prompt=1", "rollout.samples_per_prompt",
     "at least 2", None),
    ("policy-is-sampled", QUICK, "rollout.temperature=0", "rollout.temperature", "above 0", None),
    ("evaluation-has-rows", QUICK, "data.eval_path=null", "eval.every", "0 without", None),
    ("ranks-hold-whole-models", NPU, "cluster.trainer_ranks=6 cluster.engines=6", "cluster.trainer_ranks",
     "a multiple of 4", "8"),
    ("experts-spread-over-a-stage", MOE,
     "cluster.trainer_ranks=24 parallel.expert=1 parallel.expert_tensor=16", "parallel.expert_tensor",
     "1, 2, 3, 4, 6, 12", "12"),
    ("only-sampling-can-run-ahead", "qwen35-35b-a3b-sft-mtp-8xnpu", "cluster.engines=2", "cluster.engines",
     "1", None),
    ("only-samples-are-passed", SFT, "eval.pass_at=[4] eval.samples_per_prompt=4 eval.temperature=1",
     "eval.pass_at", "nothing", None),
    ("stale-samples-are-corrected", NPU, "cluster.placement=async algorithm.correction=none",
     "algorithm.correction", "truncated or icepop", None),
    ("streams-sample-no-more-than-is-trained", NPU, "cluster.placement=async rollout.early_abort=restart "
     "rollout.over_sampling=2", "rollout.early_abort", "colocate", None),
    ("partial-rollouts-are-corrected", QUICK, "rollout.early_abort=continue rollout.over_sampling=2 "
     "algorithm.correction=none", "algorithm.correction", "truncated or icepop", None),
    ("environments-need-conversations", QUICK,
     "environment.name=tools environment.tools=[tools:add] data.chat=false", "data.chat", "true", None),
    ("reference-is-read", QUICK, "model.reference_path=somewhere", "model.reference_path", "null", None),
    ("on-policy-alone", QUICK, "algorithm.name=rloo trainer.optimizer_steps_per_batch=2",
     "trainer.optimizer_steps_per_batch", "1", None),
    ("groups-are-filtered", QUICK, "algorithm.name=dapo", "rollout.dynamic_sampling", "true", None),
    ("overlong-zone-fits", QUICK, "reward.overlong_tokens=7", "reward.overlong_tokens", "at most 6", None),
    ("critic-is-trained", QUICK, "critic.warmup_steps=3", "critic.warmup_steps", "algorithm.name ppo", None),
]  # fmt: skip

SHAPE_CASES = [
    ("attention-heads-spread", "qwen35-35b-a3b-8xcuda",
     "cluster.trainer_ranks=24 parallel.tensor=3 parallel.expert=1 cluster.engines=8",
     "parallel.tensor", "1, 2, 4, 8 or 16", "2"),
    ("delta-heads-spread", NPU, "cluster.trainer_ranks=32 parallel.tensor=32", "parallel.tensor",
     "1, 2, 4, 8 or 16", "16"),
    ("widths-spread", NPU, "cluster.trainer_ranks=20 parallel.tensor=5", "parallel.tensor", "1, 2, 4", "4"),
    ("layers-make-stages", NPU, "cluster.trainer_ranks=24 parallel.tensor=8 parallel.pipeline=3",
     "parallel.pipeline", "1, 2, 4, 8, 16 or 32", "2"),
    ("layers-make-stages", NPU, "cluster.trainer_ranks=16 parallel.tensor=8 parallel.pipeline=2 "
     "parallel.pipeline_chunks=3", "parallel.pipeline", "other pipeline_chunks, first_stage", None),
    ("layers-make-stages", NPU, "cluster.trainer_ranks=16 parallel.tensor=8 parallel.pipeline=2 "
     "parallel.first_stage_layers=32", "parallel.pipeline", "other pipeline_chunks, first_stage", None),
    ("experts-divide", MOE, "cluster.trainer_ranks=24 parallel.expert=3", "parallel.expert", "1, 2, 4", "2"),
    ("experts-features-divide", MOE, "cluster.trainer_ranks=24 parallel.expert=1 parallel.expert_tensor=3",
     "parallel.expert_tensor", "1, 2, 4", "2"),
    ("experts-route-their-own-tokens", MOE, "parallel.sequence=false", "parallel.sequence", "true", "true"),
    ("expert-ranks-have-experts", NPU, "parallel.expert=2 parallel.expert_tensor=1", "parallel.expert", "1",
     None),
    ("attention-heads-exchange", "qwen35-9b-cp-16xnpu",
     "cluster.trainer_ranks=32 parallel.context=8 parallel.context_attention=heads", "parallel.context",
     "context_attention auto", "4"),
    ("delta-heads-exchange", "qwen35-9b-cp-16xnpu",
     "cluster.trainer_ranks=32 parallel.context=8 parallel.context_delta=heads", "parallel.context",
     "context_delta auto", "4"),
    ("draft-layers-are-the-checkpoints", NPU, "mtp.layers=2", "mtp.init", "copy or random", "copy"),
    ("one-draft-layer-is-repeated", NPU, "mtp.layers=2 mtp.init=copy mtp.repeated=2", "mtp.repeated",
     "1, or mtp.layers 1", "1"),
    ("drafts-have-a-layer", NPU, "mtp.layers=0 mtp.init=truncate", "rollout.draft_tokens", "0, or", None),
    ("drafts-are-not-far-beyond-their-depth", NPU, "rollout.draft_tokens=5", "rollout.draft_tokens",
     "at most 4", "4"),
    ("pictures-cross-stages-without-gradients", "qwen35-35b-a3b-sft-mtp-8xnpu",
     "parallel.pipeline=2 parallel.expert=4 mtp.detach_embedding=false", "mtp.detach_embedding",
     "true, or parallel.pipeline 1", "true"),
    ("engines-spread-heads", MOE, "sglang.tensor=3 cluster.engines=5", "sglang.tensor", "1, 2, 4", "2"),
]  # fmt: skip


def flags(text: str) -> list[str]:
    return [f"--{word}" for word in text.split()]


@pytest.mark.parametrize(("rule", "recipe", "text", "field", "limit", "near"), CASES, ids=str)
def test_a_rule_over_settings_refuses(rule, recipe, text, field, limit, near):
    load_config(recipe)
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, flags(text))
    (found,) = [check for check in CHECKS if check.id == rule]
    named = [p for p in caught.value.problems if ".".join(p.path) == field]
    assert named, f"{rule} is silent; others say {caught.value}"
    assert any(limit in (p.allowed or "") and near in (None, p.nearest) and p.message for p in named), named
    assert found.rule.__doc__ is None or found.rule.__doc__.strip().endswith(".")


@pytest.mark.parametrize(("rule", "recipe", "text", "field", "limit", "near"), SHAPE_CASES, ids=str)
def test_a_rule_over_the_models_sizes_refuses(rule, recipe, text, field, limit, near):
    config = load_config(recipe, flags(text))
    model = Qwen35Config.from_hf(published()[config.model.path.rpartition("/")[2]])
    (found,) = [one for one in SHAPE_RULES if one.id == rule]
    named = [p for p in found.rule(config, model) if ".".join(p.path) == field]
    assert len(named) == 1, f"{rule} is silent"
    assert limit in named[0].allowed
    assert near in (None, named[0].nearest)
    assert named[0].given is not None
    assert any(p.path == named[0].path for p in shape_problems(config, model))
    assert found.rule(load_config(recipe), model) is not None
    assert list(found.rule(load_config(recipe), model)) == [], "the recipe itself is fine"


# What only the user knows: a teacher, a folder that all hosts see.
UNKNOWN = {"teacher.path", "teacher.urls", "rollout.update_folder"}


def with_nearest(recipe, text):
    """Applies the nearest of every problem, and of what these lead to, until none is left."""
    given = dict(word.split("=", 1) for word in text.split())
    for _ in range(6):
        try:
            config = load_config(recipe, [f"--{name}={value}" for name, value in given.items()])
        except ConfigError as error:
            problems = error.problems
        else:
            problems = shape_problems(config, Qwen35Config.from_hf(model_facts(config.model.path)))
        if not problems:
            return given
        for problem in problems:
            field = ".".join(problem.path)
            assert problem.given is not None, f"{field}: what was given is missing"
            assert problem.allowed, f"{field}: the limit is missing"
            if field in UNKNOWN:
                return given
            assert problem.nearest is not None, f"{field}: {problem.message}: nothing that works is named"
            words = f"--{field} {problem.nearest}".replace("=", " ")
            for flag in words.split("--")[1:]:
                name, value = flag.strip().split(" ", 1)
                given[name] = value
    raise AssertionError(f"the nearest of {recipe} with {text} lead to {given}, which is refused: {problems}")


@pytest.mark.parametrize(
    ("recipe", "text"), [case[1:3] for case in (*CASES, *SHAPE_CASES)], ids=lambda part: str(part)[:60]
)
def test_the_nearest_that_a_rule_names_works(recipe, text):
    with_nearest(recipe, text)


def out_of_range(flag):
    """What is refused of a single number, and whether anything is."""
    try:
        config = load_config(NPU, [flag])
    except ConfigError as error:
        return [problem for problem in error.problems if problem.message == "not allowed"], None
    return [], config


@pytest.mark.parametrize("name", RelaxConfig.model_fields)
def test_numbers_beyond_their_range_are_told_its_end_and_none_makes_a_plan_run_away(name):
    for field, info in type(getattr(load_config(NPU), name)).model_fields.items():
        types = {
            part.strip() for part in str(getattr(info.annotation, "__name__", info.annotation)).split("|")
        }
        for value in (10**12, -1) if types & {"int", "float"} else ():
            problems, config = out_of_range(f"--{name}.{field}={value}")
            for problem in problems:
                assert problem.allowed
                assert problem.nearest is not None or types & {"float"}, problem
                if problem.nearest is not None:
                    assert out_of_range(f"--{name}.{field}={problem.nearest}")[0] == []
            started = process_time()
            if config is not None:
                plan(config)
            assert process_time() - started < 20, f"{name}.{field} {value} makes a plan run away"


def test_every_rule_of_the_registry_has_a_case_and_there_are_many():
    known = {check.id for check in CHECKS}
    assert {check.id for check in RULES} <= {case[0] for case in CASES} <= known
    assert {case[0] for case in SHAPE_CASES} == {rule.id for rule in SHAPE_RULES}
    assert len(CHECKS) + len(SHAPE_RULES) >= 40


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rollout.draft_tokens=0", "adapts no gates of the delta net"),
        ("rollout.draft_tokens=2 lora.targets=[linear_qkv]", "beside the drafts of an MTP layer"),
        ("rollout.draft_tokens=0 lora.targets=[linear_qkv]", "sends no adapters to SGLang yet"),
        ("rollout.engine=transformers", "the engine transformers is given whole weights"),
    ],
)
def test_adapters_beside_the_weights_are_refused_with_what_stands_in_the_way(text, why):
    base = "" if "engine" in text else "rollout.engine=sglang"
    with pytest.raises(ConfigError, match=why):
        load_config(QUICK, flags(f"lora.rank=4 lora.sync=adapter {base} {text}"))
