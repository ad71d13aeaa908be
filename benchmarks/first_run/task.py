"""The checkpoint and the data that both sides start from: random weights, additions of two numbers.

    python task.py FOLDER    # prints the token ids of prompts and completions that both sides are to score

The end token is all but impossible, and digits and spaces are likely: every completion runs to its limit, so
that both sides sample and train on the same number of tokens, and some completions are right, so that there
are advantages and gradients.
"""

import json
import math
import random
import sys
from pathlib import Path

import torch
from gate import Example
from sizes import MAX_NEW_TOKENS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

_END, _PAD = "<|end|>", "<|pad|>"
_CHARACTERS = "0123456789 +=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
_VOCABULARY = [_PAD, _END, *_CHARACTERS]
_SPACE_SHARE = 0.7


def write_task(folder: Path) -> None:
    """Writes `model/` (a Hugging Face directory) and `train.jsonl`; the same bytes every time."""
    tokenizer(_VOCABULARY).save_pretrained(folder / "model")
    model(_VOCABULARY).save_pretrained(folder / "model")
    sums = [{"prompt": f"{a:02}+{b:02}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums * 40))


def examples(tokenizer: PreTrainedTokenizerFast, count: int) -> list[Example]:
    """Prompts of different lengths with completions of different lengths."""
    chosen = random.Random(0)
    found = []
    for _ in range(count):
        prompt = f"{chosen.randrange(1000)}+{chosen.randrange(1000)}="
        completion = "".join(chosen.choices(_CHARACTERS, k=chosen.randint(1, MAX_NEW_TOKENS)))
        found.append((tokenizer(prompt)["input_ids"], tokenizer(completion)["input_ids"]))
    return found


def tokenizer(vocabulary: list[str]) -> PreTrainedTokenizerFast:
    numbers = {token: number for number, token in enumerate(vocabulary)}
    by_character = Tokenizer(models.WordLevel(numbers, unk_token=_PAD))
    by_character.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    by_character.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=by_character, eos_token=_END, pad_token=_PAD, clean_up_tokenization_spaces=False
    )


def model(vocabulary: list[str]) -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary.index(_END),
        pad_token_id=vocabulary.index(_PAD),
    )
    made = Qwen3_5ForCausalLM(config).float()
    _lean(made.get_input_embeddings().weight, vocabulary)
    return made


@torch.no_grad()
def _lean(embedding_VD: torch.Tensor, vocabulary: list[str]) -> None:
    """Makes some tokens likely whatever the text.

    Embedding and head are one matrix. A large first feature in the tokens of a text outweighs the others,
    whose values are small, so that the final norm gives it sqrt(hidden) everywhere; a token's own first
    feature times that is then a constant part of its logit.
    """
    steepness = math.sqrt(embedding_VD.shape[1])
    spaces = math.log(_SPACE_SHARE / (1 - _SPACE_SHARE) * 10) / steepness
    for number, token in enumerate(vocabulary):
        embedding_VD[number, 0] = {" ": 2 + spaces, "+": 0.5, "=": 0.5}.get(
            token, 2 if token.isdecimal() else -1
        )


if __name__ == "__main__":
    write_task(Path(sys.argv[1]))
    json.dump(examples(tokenizer(_VOCABULARY), 64), sys.stdout)
