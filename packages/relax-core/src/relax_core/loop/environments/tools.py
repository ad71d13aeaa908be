"""The environment `tools`: the model calls functions and is told what they gave."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from relax_rollout.rewards import Reward, RewardInput
from relax_rollout.rewards.calls import resolve
from relax_rollout.rewards.pool import WorkerPool
from relax_rollout.rewards.runner import Pool, RewardLimits

from relax_core.data.examples import Prompt
from relax_core.loop.environments.calls import ToolCall, tool_calls
from relax_core.loop.environments.protocol import Reply

_WORKER = Reward(
    name="tools", quick=lambda item: None, worker="relax_core.loop.environments.worker:call_tool"
)


class Tools:
    """Functions by the name that the model calls them by; close it when done, or use it with `with`.

    A call runs in a worker process. What goes wrong there (an exception, a call over its time, a crash, a
    name or arguments that do not fit) is what the model is told.

    Args:
        specs: `module:function` each.
        timeout_s: of one call, in seconds.
        concurrency: calls at the same time.
        start_pool: makes the pool once it is needed; worker processes of this machine if None.

    Raises:
        ValueError: a function that cannot be imported, or two of one name.
    """

    def __init__(
        self,
        specs: Sequence[str],
        *,
        timeout_s: float,
        concurrency: int,
        start_pool: Callable[[Reward, RewardLimits], Pool] | None = None,
    ) -> None:
        self._specs = tools_by_name(specs)
        self._limits = RewardLimits(timeout_s, concurrency)
        self._start_pool = start_pool or _worker_processes
        self._pool: Pool | None = None

    def environment(self, prompt: Prompt) -> "ToolEnvironment":
        """That of one completion."""
        return ToolEnvironment(self)

    async def call(self, call: ToolCall) -> str:
        """What the model is told of a call."""
        if call.problem is not None:
            return f"error: {call.problem}"
        spec = self._specs.get(call.name)
        if spec is None:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self._specs)}"
        if self._pool is None:
            self._pool = self._start_pool(_WORKER, self._limits)
        message: Future[dict[str, Any]] = Future()
        self._pool.submit(RewardInput("", spec, metadata=call.arguments), message.set_result)
        answer = await asyncio.wrap_future(message)
        return self._text(answer)

    def _text(self, message: dict[str, Any]) -> str:
        if message.get("late"):
            return f"error: no answer within {self._limits.timeout_s:g} s"
        if "failed" in message:
            return f"error: {message['failed']}"
        return str(message["extracted"])

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ToolEnvironment:
    """Answers every tool call of a turn with a message of the role `tool`; a turn without one is the last."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    async def reply(self, turn: str) -> Reply:
        """See `Environment`; calls of one turn run at the same time."""
        calls = tool_calls(turn)
        texts = await asyncio.gather(*map(self._tools.call, calls))
        return Reply(
            tuple(
                {"role": "tool", "name": call.name, "content": text}
                for call, text in zip(calls, texts, strict=True)
            )
        )


def tools_by_name(specs: Iterable[str]) -> dict[str, str]:
    """`module:function` by the function's own name.

    Raises:
        ValueError: a function that cannot be imported, or two of one name.
    """
    by_name: dict[str, str] = {}
    for spec in specs:
        try:
            resolve(spec)
        except ValueError as error:
            raise ValueError(str(error).replace("reward", "tool", 1)) from error
        name = spec.rpartition(":")[2].rpartition(".")[2]
        if name in by_name:
            raise ValueError(f"tools {by_name[name]!r} and {spec!r} have one name: rename one of them")
        by_name[name] = spec
    return by_name


def tool_schemas(specs: Iterable[str]) -> list[dict[str, Any]]:
    """How a chat template is told of the tools: JSON schemas, from signatures and docstrings.

    Raises:
        ValueError: a function without type hints, or whose docstring does not describe its arguments.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    schemas = []
    for spec in specs:
        try:
            schemas.append(get_json_schema(resolve(spec)))
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ValueError(
                f"the tool {spec!r} cannot be described to the model: {error}. Give it type hints and a "
                "docstring with `Args:`"
            ) from error
    return schemas


def _worker_processes(reward: Reward, limits: RewardLimits) -> Pool:
    return WorkerPool(reward, timeout_s=limits.timeout_s, concurrency=limits.concurrency)
