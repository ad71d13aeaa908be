"""Rules over the settings and the sizes of the model: heads, experts, layers, draft layers."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from relax_core.config.problems import Problem
from relax_core.config.root import RelaxConfig
from relax_core.config.rules.rule import ShapeRule, nearest_size, words
from relax_core.device.parallel import ParallelConfig
from relax_core.model import fits
from relax_core.model.config import Qwen35Config
from relax_core.model.stages import stage_layers

_DRAFTS_A_DEPTH = 4


def _refused(
    path: tuple[str, ...],
    given: int,
    check: Callable[[int], None],
    *,
    also: str = "",
    otherwise: str = "another model",
) -> Iterator[Problem]:
    """A problem with the message of `check(given)`, and the sizes that pass."""
    try:
        check(given)
    except ValueError as error:
        message = str(error)
    else:
        return

    def works(size: int) -> bool:
        try:
            check(size)
        except ValueError:
            return False
        return True

    fitting = [size for size in range(1, 65) if works(size)]
    near = nearest_size(given, works)
    allowed = (words(fitting) if fitting else otherwise) + also
    yield Problem(path, message, str(given), allowed=allowed, nearest=None if near is None else str(near))


def _attention_heads_spread(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """Query and key/value heads are spread over tensor-parallel ranks, or several ranks share one of the
    latter."""
    tensor = config.parallel.tensor
    yield from _refused(("parallel", "tensor"), tensor, lambda n: _ignore(fits.ranks_per_kv_head(model, n)))


def _delta_heads_spread(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """Key and value heads of the delta net are spread over tensor-parallel ranks."""
    tensor = config.parallel.tensor
    yield from _refused(("parallel", "tensor"), tensor, lambda n: fits.check_delta_heads(model, n))


def _widths_spread(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """Feed-forward, hidden states and vocabulary are spread over tensor-parallel ranks."""
    tensor = config.parallel.tensor
    yield from _refused(("parallel", "tensor"), tensor, lambda n: fits.check_widths(model, n))


def _layers_make_stages(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """Pipeline stages have equally many layers, but for the first and the last where these say so."""
    parallel = config.parallel

    def check(pipeline: int) -> None:
        stage_layers(model.num_layers, ParallelConfig(**{**parallel.model_dump(), "pipeline": pipeline}))

    def even(pipeline: int) -> bool:
        return model.num_layers % pipeline == 0

    for problem in _refused(
        ("parallel", "pipeline"),
        parallel.pipeline,
        check,
        otherwise="other pipeline_chunks, first_stage_layers or last_stage_layers",
    ):
        if problem.nearest is None and (size := nearest_size(parallel.pipeline, even)) is not None:
            ends = " ".join(f"--parallel.{end}_stage_layers null" for end in ("first", "last"))
            yield replace(problem, nearest=f"{size} --parallel.pipeline_chunks 1 {ends}")
        else:
            yield problem


def _experts_divide(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """Experts are spread over expert-parallel ranks."""
    if model.experts:
        yield from _refused(
            ("parallel", "expert"), config.parallel.expert, lambda n: fits.check_experts(model.experts, n)
        )


def _experts_features_divide(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """An expert's features are spread over expert-tensor-parallel ranks."""
    if model.experts:
        shares = config.parallel.expert_tensor or config.parallel.tensor
        yield from _refused(
            ("parallel", "expert_tensor"), shares, lambda n: fits.check_expert_features(model.ffn_size, n)
        )


def _experts_route_their_own_tokens(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """Tensor-parallel ranks route tokens of their own, which sequence parallelism gives them."""
    if not model.experts:
        return
    try:
        fits.check_routing(config.parallel.tensor, sequence=config.parallel.sequence)
    except ValueError as error:
        yield Problem(("parallel", "sequence"), str(error), "false", allowed="true", nearest="true")


def _expert_ranks_have_experts(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """A dense model has no experts to spread, and nothing to balance."""
    if model.experts:
        return
    for name in ("expert", "expert_tensor"):
        given = getattr(config.parallel, name)
        if (given or 1) > 1:
            yield Problem(
                ("parallel", name), "the model is dense: there are no experts", str(given), None, "1", "1"
            )
    if config.trainer.balance_coefficient > 0:
        yield Problem(
            ("trainer", "balance_coefficient"),
            "the model is dense: there are no experts whose use could be evened out",
            given=f"{config.trainer.balance_coefficient:g}",
            allowed="0",
            nearest="0",
        )


def _attention_heads_exchange(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """Where context-parallel ranks exchange tokens for heads, query heads divide by tensor x context."""
    parallel = config.parallel
    if parallel.context_attention == "heads":
        yield from _refused(
            ("parallel", "context"),
            parallel.context,
            lambda n: fits.check_attention_exchange(model, parallel.tensor, n),
            also=", or context_attention auto",
        )


def _delta_heads_exchange(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """Where context-parallel ranks exchange tokens for heads, the delta net's heads divide by tensor x
    context."""
    parallel = config.parallel
    if parallel.context_delta == "heads":
        yield from _refused(
            ("parallel", "context"),
            parallel.context,
            lambda n: fits.check_delta_exchange(model, parallel.tensor, n),
            also=", or context_delta auto",
        )


def _draft_layers_are_the_checkpoints(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """The number of draft layers is the checkpoint's, unless `mtp.init` says how to get another one."""
    wanted, stored, init = config.mtp.layers, model.mtp_layers, config.mtp.init
    if wanted is None or wanted == stored:
        return
    fitting = "truncate" if wanted < stored else "copy or random" if stored else "random"
    if init is None or init not in fitting.split(" or "):
        yield Problem(
            ("mtp", "init"),
            f"the checkpoint holds {stored} draft layers, mtp.layers asks for {wanted}",
            given=str(init or "null"),
            allowed=f"{fitting}, or mtp.layers {stored}",
            nearest=fitting.split(" ")[0],
        )


def _one_draft_layer_is_repeated(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """Only a single draft layer is applied again and again."""
    layers = model.mtp_layers if config.mtp.layers is None else config.mtp.layers
    if config.mtp.repeated > 1 and layers != 1:
        yield Problem(
            ("mtp", "repeated"),
            f"the model has {layers} draft layers: only a single one is applied again and again",
            given=str(config.mtp.repeated),
            allowed="1, or mtp.layers 1",
            nearest="1",
        )


def _drafts_have_a_layer(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """Drafts are made by the checkpoint's draft layers."""
    layers = model.mtp_layers if config.mtp.layers is None else config.mtp.layers
    if layers:
        return
    for path, given, idle in (
        (("rollout", "draft_tokens"), config.rollout.draft_tokens, "0"),
        (("mtp", "only"), config.mtp.only, "false"),
    ):
        if given:
            yield Problem(
                path,
                "the model has no draft layers",
                given=str(given).lower(),
                allowed=f"{idle}, or mtp.layers 1 with mtp.init random",
                nearest=idle,
            )


def _drafts_are_not_far_beyond_their_depth(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """A draft layer that goes on from its own guesses is wrong more often with each."""
    layers = model.mtp_layers if config.mtp.layers is None else config.mtp.layers
    most = _DRAFTS_A_DEPTH * layers * config.mtp.repeated
    if layers and config.rollout.draft_tokens > most:
        yield Problem(
            ("rollout", "draft_tokens"),
            f"the draft layers are trained for {layers * config.mtp.repeated} depths; beyond four times that "
            "a draft hardly ever stands",
            given=str(config.rollout.draft_tokens),
            allowed=f"at most {most}, or a larger mtp.repeated",
            nearest=str(most),
        )


def _pictures_cross_stages_without_gradients(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """What the tower saw goes from the first pipeline stage to the draft layers on the last, and no gradient
    comes back."""
    layers = model.mtp_layers if config.mtp.layers is None else config.mtp.layers
    apart = config.model.vision != "absent" and layers and config.parallel.pipeline > 1
    if apart and not config.mtp.detach_embedding:
        yield Problem(
            ("mtp", "detach_embedding"),
            f"parallel.pipeline is {config.parallel.pipeline}, and the draft layers on the last stage would "
            "give what the first stage saw a gradient",
            given="false",
            allowed="true, or parallel.pipeline 1",
            nearest="true",
        )


def _engines_spread_heads(config: RelaxConfig, model: Qwen35Config) -> Iterator[Problem]:
    """The devices of a server share its heads as tensor-parallel ranks do."""
    if config.rollout.engine != "sglang":
        return

    def check(devices: int) -> None:
        fits.check_delta_heads(model, devices)
        fits.ranks_per_kv_head(model, devices)
        fits.check_widths(model, devices)

    yield from _refused(("sglang", "tensor"), config.sglang.tensor, check)


def _ignore(_: object) -> None:
    """A check by its exception alone."""


SHAPE_RULES = tuple(
    map(
        ShapeRule,
        (
            _attention_heads_spread,
            _delta_heads_spread,
            _widths_spread,
            _layers_make_stages,
            _experts_divide,
            _experts_features_divide,
            _experts_route_their_own_tokens,
            _expert_ranks_have_experts,
            _attention_heads_exchange,
            _delta_heads_exchange,
            _draft_layers_are_the_checkpoints,
            _one_draft_layer_is_repeated,
            _drafts_have_a_layer,
            _drafts_are_not_far_beyond_their_depth,
            _pictures_cross_stages_without_gradients,
            _engines_spread_heads,
        ),
    )
)


def shape_problems(config: RelaxConfig, model: Qwen35Config) -> list[Problem]:
    """What the rules object to, for the sizes of `model` (as its checkpoint has them)."""
    found = [problem for rule in SHAPE_RULES for problem in rule.rule(config, model)]
    # Several rules may object to one size; the first tells.
    return list({(problem.path, problem.given): problem for problem in reversed(found)}.values())[::-1]
