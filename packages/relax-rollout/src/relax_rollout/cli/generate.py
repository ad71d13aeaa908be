"""``relax-rollout generate``."""

import argparse
import asyncio
import json
import sys
from typing import Any

from relax_rollout.registry import available_engines, create_engine
from relax_rollout.requests import Completion, Request, SamplingParams
from relax_rollout.seeds import derive_seed


def add_arguments(commands: Any) -> None:
    """Add the sub-command to ``argparse``'s sub-parsers."""
    command: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="draw completions of a prompt",
        description="Draw completions of prompts and print one JSON object per completion.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument(
        "--model", required=True, help="directory of a Hugging Face model with its tokenizer"
    )
    command.add_argument(
        "--prompt", required=True, action="append", help="prompt text; may come several times"
    )
    command.add_argument("--chat", action="store_true", help="put the prompt through the chat template")
    command.add_argument("--n", type=int, default=1, help="completions per prompt")
    command.add_argument("--max-new-tokens", type=int, default=64, help="the most tokens of a completion")
    command.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    command.add_argument("--top-p", type=float, default=1.0, help="probability mass kept; 1 keeps all")
    command.add_argument("--top-k", type=int, default=0, help="tokens kept; 0 keeps all")
    command.add_argument("--seed", type=int, default=0, help="seed of the whole call")
    command.add_argument("--engine", choices=available_engines(), default="transformers", help="engine")
    command.add_argument("--device", default="cpu", help="torch device of the transformers engine")
    command.add_argument("--dtype", default="auto", help="dtype of the transformers engine")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Draw and print.

    Raises:
        ValueError: an argument that the tokenizer or the engine refuses.
    """
    if arguments.n < 1:
        raise ValueError(f"--n is {arguments.n}; it must be at least 1")
    from transformers import AutoTokenizer  # takes seconds; --help does not wait for it

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    requests = [
        Request(f"{place}.{sample}", tuple(_ids(tokenizer, prompt, arguments.chat)), _sampling(
            arguments, tokenizer, place, sample
        ))
        for place, prompt in enumerate(arguments.prompt)
        for sample in range(arguments.n)
    ]  # fmt: skip
    for request, completion in zip(requests, asyncio.run(_draw(arguments, requests)), strict=True):
        place, sample = (int(part) for part in request.id.split("."))
        line = {
            "prompt": arguments.prompt[place],
            "sample": sample,
            "completion": tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.token_ids),
            "logprob": round(sum(completion.logprobs), 4),
        }
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")


def _ids(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise ValueError("--chat was given, but the tokenizer has no chat template; leave it out")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _sampling(arguments: argparse.Namespace, tokenizer: Any, place: int, sample: int) -> SamplingParams:
    stop = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        stop_token_ids=stop,
        seed=derive_seed(arguments.seed, place, sample),
    )


async def _draw(arguments: argparse.Namespace, requests: list[Request]) -> list[Completion]:
    options: dict[str, Any] = {"model": arguments.model}
    if arguments.engine == "transformers":
        options |= {"device": arguments.device, "dtype": arguments.dtype}
    engine = create_engine(arguments.engine, **options)
    try:
        return await engine.generate(requests)
    finally:
        await engine.close()
