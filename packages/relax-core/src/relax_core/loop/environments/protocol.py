"""What an environment is, and how one of the user's own is found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from relax_core.data.examples import Message, Prompt


@dataclass(frozen=True, slots=True)
class Reply:
    """What follows a turn of the model.

    Attributes:
        messages: what the model is told before its next turn; none ends the completion.
        metadata: handed to the reward beside the row's own, later replies over earlier ones.
    """

    messages: tuple[Message, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """The other side of one conversation."""

    async def reply(self, turn: str) -> Reply:
        """Answers a turn of the model.

        Args:
            turn: its text, special tokens left out.
        """
        ...


EnvironmentFactory = Callable[[Prompt], Environment]
"""Makes the environment of one completion; called once for each member of a group."""


def load_environment(spec: str) -> EnvironmentFactory:
    """The factory called `module:function`.

    Raises:
        ValueError: there is none.
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ValueError(
            f"environment.name is {spec!r}: give tools, or a factory of your own as module:function"
        )
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"environment.name is {spec!r}, which cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(
            f"environment.name is {spec!r}, a {type(found).__name__}: it must be called with a prompt and "
            "give an environment"
        )
    factory: EnvironmentFactory = found
    return factory
