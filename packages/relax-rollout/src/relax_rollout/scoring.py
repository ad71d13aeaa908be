"""Log-probabilities of given tokens under a model that SGLang servers hold: a teacher, for instance."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from relax_rollout.engine import EngineError
from relax_rollout.engines.sglang.http import Http, ServerRefusedError, ServerUnreachableError


async def score_tokens(
    urls: Sequence[str], sequences: Sequence[Sequence[int]], *, timeout_s: float = 600.0, retries: int = 3
) -> list[list[float]]:
    """The log-prob of every token given those before it, at temperature 1; 0.0 for the first of each.

    Sequences go round the servers, all at once; a server queues what it cannot take. Nothing is sampled.

    Args:
        urls: of servers of one model, for instance "http://10.0.0.1:30000"; at least one.
        sequences: token ids, each at least one.
        timeout_s: of one sequence.
        retries: of one sequence, where a server does not answer.

    Raises:
        EngineError: a server does not answer or refuses, or answers for other tokens.
        ValueError: there is no server, or a sequence is empty.
    """
    if not urls:
        raise ValueError("no server is named: give at least one URL")
    if not all(sequences):
        raise ValueError("a sequence is empty: every one needs a token")
    servers = [Http(url, timeout_s, retries) for url in urls]
    try:
        calls = [_score(servers[at % len(servers)], ids, timeout_s) for at, ids in enumerate(sequences)]
        return list(await asyncio.gather(*calls))
    finally:
        for server in servers:
            await server.close()


async def _score(server: Http, ids: Sequence[int], timeout_s: float) -> list[float]:
    body = {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    try:
        answer = await server.control("/generate", body, timeout_s=timeout_s)
    except (ServerUnreachableError, ServerRefusedError) as error:
        raise EngineError(f"tokens cannot be scored: {error}") from error
    return _logprobs(answer, ids, server.url)


def _logprobs(answer: Mapping[str, Any], ids: Sequence[int], url: str) -> list[float]:
    scored = answer.get("meta_info", {}).get("input_token_logprobs")
    if scored is None or [entry[1] for entry in scored] != list(ids):
        given = "none" if scored is None else f"those of {len(scored)} tokens"
        raise EngineError(
            f"{url} was asked for log-probs of {len(ids)} tokens and gave {given}: it must be an SGLang "
            "server that returns input_token_logprobs, without a prefix cache that hides them"
        )
    return [0.0, *(float(entry[0]) for entry in scored[1:])]
