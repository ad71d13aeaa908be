"""What a worker process does with a tool call."""

import asyncio
import inspect
import json
from typing import Any, get_type_hints

from relax_rollout.rewards import RewardInput, RewardResult
from relax_rollout.rewards.calls import resolve


def call_tool(item: RewardInput) -> RewardResult:
    """Calls `item.completion`, a `module:function`, with the arguments in `item.metadata`.

    Tools run where rewards do, in processes with a time limit that may crash; a call therefore travels as a
    `RewardInput`, and what it gave as the text `extracted`.
    """
    function = resolve(item.completion)
    value = function(**_typed(function, dict(item.metadata)))
    if inspect.isawaitable(value):
        value = asyncio.run(_wait(value))
    return RewardResult(0.0, extracted=value if isinstance(value, str) else json.dumps(value, default=str))


def _typed(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Text becomes a number or a truth value where the signature asks for one."""
    hints = get_type_hints(function)
    return {
        name: json.loads(value) if isinstance(value, str) and hints.get(name) in (int, float, bool) else value
        for name, value in arguments.items()
    }


async def _wait(value: Any) -> Any:
    return await value
