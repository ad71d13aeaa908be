"""What every loop needs before its first step: the model with its weights, and the tokenizer."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from relax_bridge import Checkpoint

from relax_core.config.root import RelaxConfig
from relax_core.data import load_tokenizer
from relax_core.loop.checkpoints import open_model
from relax_core.loop.policy import Policy
from relax_core.loop.rollout import Rollout, open_local_rollout

if TYPE_CHECKING:
    from relax_core.loop.local import LocalPolicy

P_co = TypeVar("P_co", bound=Policy, covariant=True)


@dataclass(frozen=True)
class Session(Generic[P_co]):
    """A model that can be trained.

    Attributes:
        source: the Hugging Face checkpoint the run starts from.
        tokenizer: the checkpoint's own.
        policy: the model.
        rollout: starts what samples from it and scores; ends it again.
    """

    source: Checkpoint
    tokenizer: Any
    policy: P_co
    rollout: Callable[[], AbstractContextManager[Rollout]]


@contextmanager
def open_session(config: RelaxConfig) -> Iterator["Session[LocalPolicy]"]:
    """Takes the device and loads the model into this process; leaves the process as it was.

    Raises:
        ValueError: the checkpoint does not fit, naming every tensor or setting that is wrong.
    """
    from relax_core.loop.local import open_policy

    source, weights = open_model(config)
    tokenizer = load_tokenizer(source.path)
    with open_policy(config, source, weights) as policy:
        device = str(policy.world.torch_device)
        yield Session(source, tokenizer, policy, partial(open_local_rollout, config, source.path, device))
