"""The quickstart's tokenizer: digits and printable characters one by one, number words whole.

Text comes back exactly as it went in. A space is part of the word or operator behind it, so that
"forty two plus 17" is the five tokens "forty", " two", " plus ", "1", "7".
"""

import re
from pathlib import Path

from relax_core.data.arithmetic import ONES, OPERATORS, TENS

END_OF_TEXT, TURN_START, TURN_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def arithmetic_vocabulary() -> list[str]:
    """Every token in order of its id, special tokens first."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    numbers = [word for word in (*ONES, *TENS, "hundred") if word]
    operators = [f" {text} " for texts in OPERATORS.values() for text in texts]
    words = [*numbers, *(f" {word}" for word in numbers), *operators, "user", "assistant", "system"]
    return [END_OF_TEXT, TURN_START, TURN_END, UNKNOWN, *characters, *words]


def write_arithmetic_tokenizer(folder: Path) -> None:
    """Writes the tokenizer with its chat template as a Hugging Face folder that `AutoTokenizer` opens.

    A turn ends with <|im_end|>, which is the end-of-text token as well; padding is <|endoftext|>. Characters
    outside of ASCII become <|unknown|>.

    Args:
        folder: made if it is not there; other files in it stay.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast

    vocabulary = arithmetic_vocabulary()
    words = sorted((token for token in vocabulary[4:] if len(token) > 1), key=lambda word: (-len(word), word))
    pattern = "|".join([*(re.escape(word) for word in words), r"[\s\S]"])
    model = models.WordLevel({token: number for number, token in enumerate(vocabulary)}, unk_token=UNKNOWN)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(str(folder))
