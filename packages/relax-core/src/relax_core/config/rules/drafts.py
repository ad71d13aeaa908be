"""Rules of the draft layers, in training and in sampling."""

from collections.abc import Iterator

from relax_core.config.problems import Problem
from relax_core.config.rules.rule import Check
from relax_core.loop.config import RolloutConfig
from relax_core.model.mtp_config import MtpConfig
from relax_core.trainer.config import TrainerConfig


def _drafts_alone_need_a_loss(mtp: MtpConfig) -> Iterator[Problem]:
    """Training the draft layers alone without their loss trains nothing."""
    if mtp.only and mtp.loss_coefficient == 0:
        yield Problem(
            ("mtp", "loss_coefficient"),
            "mtp.only trains the draft layers alone, whose loss has no weight",
            given="0",
            allowed="a number, above 0, or mtp.only false",
            nearest="0.1",
        )


def _drafts_alone_are_not_overlapped(mtp: MtpConfig, trainer: TrainerConfig) -> Iterator[Problem]:
    """The few gradients of draft layers are taken after the pass, not during it."""
    if mtp.only and trainer.overlap_grad_reduce:
        yield Problem(
            ("trainer", "overlap_grad_reduce"),
            "with mtp.only the few gradients of the draft layers are not overlapped",
            given="true",
            allowed="false, and overlap_param_gather false",
            nearest="false",
        )


def _drafts_alone_reach_nothing_else(mtp: MtpConfig) -> Iterator[Problem]:
    """What stays as it is cannot get a gradient."""
    attached = [
        name for name in ("detach_embedding", "detach_trunk", "detach_head") if not getattr(mtp, name)
    ]
    if mtp.only and attached:
        yield Problem(
            ("mtp", attached[0]),
            "mtp.only leaves trunk, embedding and head as they are: no gradient may reach them",
            given="false",
            allowed="true, or mtp.only false",
            nearest="true",
        )


def _a_way_to_more_drafts_needs_their_number(mtp: MtpConfig) -> Iterator[Problem]:
    """`mtp.init` says how to get from the checkpoint's number of draft layers to another one."""
    if mtp.init is not None and mtp.layers is None:
        yield Problem(
            ("mtp", "init"),
            "it has no effect while mtp.layers takes the checkpoint's number",
            given=mtp.init,
            allowed="null, or set mtp.layers",
            nearest="null",
        )


def _drafts_keep_up_with_the_trunk(mtp: MtpConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    """Drafts of layers that stay behind a moving trunk are rejected more and more often."""
    if rollout.draft_tokens and mtp.loss_coefficient == 0:
        yield Problem(
            ("rollout", "draft_tokens"),
            "the draft layers are not trained (mtp.loss_coefficient 0) while the trunk moves on: their "
            "drafts are rejected more and more often",
            given=str(rollout.draft_tokens),
            allowed="0, or mtp.loss_coefficient above 0",
            nearest="0",
        )


RULES = (
    Check(("mtp",), _drafts_alone_need_a_loss),
    Check(("mtp", "trainer"), _drafts_alone_are_not_overlapped),
    Check(("mtp",), _drafts_alone_reach_nothing_else),
    Check(("mtp",), _a_way_to_more_drafts_needs_their_number),
    Check(("mtp", "rollout"), _drafts_keep_up_with_the_trunk),
)
