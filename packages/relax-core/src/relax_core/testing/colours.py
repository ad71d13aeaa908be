"""A made task with pictures: say which of four colours a picture has; a model that sees, and rows.

    python -m relax_core.testing.colours FOLDER

draws pictures into FOLDER, with FOLDER/rows.jsonl and held_out.jsonl for reinforcement learning, and puts a
tiny model with random weights, a vision tower and a draft layer into FOLDER/model. Every prompt is the same
text: who does not see the picture is right in one of four cases at best.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from relax_bridge import Checkpoint, model_map, write_checkpoint

COLOURS = {"red": (230, 30, 30), "green": (30, 200, 40), "blue": (30, 50, 230), "white": (240, 240, 240)}
_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|image_pad|>",
    "<|vision_end|>",
)
_WORDS = ("user", "assistant", "\n", "which", " colour", "?", *COLOURS)
_TEMPLATE = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.content is string %}{{- m.content }}{%- else %}
{%- for part in m.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{{- '<|im_end|>' + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' + '\n' }}{%- endif %}
"""
_PATCH = {"patch_size": 4, "temporal_patch_size": 2}


def model_config() -> dict[str, Any]:
    """The `config.json`: Qwen3.5's layout with every size small."""
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": len(_SPECIAL) + len(_WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 256,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": _SPECIAL.index("<|im_end|>"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "model_type": "qwen3_5",
        "depth": 1,
        "hidden_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 24,
        "num_heads": 2,
        "in_channels": 3,
        "spatial_merge_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
        **_PATCH,
    }
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "image_token_id": _SPECIAL.index("<|image_pad|>"),
        "vision_start_token_id": _SPECIAL.index("<|vision_start|>"),
        "vision_end_token_id": _SPECIAL.index("<|vision_end|>"),
        "text_config": text,
        "vision_config": vision,
    }


def write_model(folder: Path, *, seed: int = 0) -> Path:
    """A new Hugging Face directory of random weights, with tokenizer and image processor."""
    bare = folder.with_name(f"{folder.name}.bare")
    _write_tokenizer(bare)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        **_PATCH,
    }
    (bare / "preprocessor_config.json").write_text(json.dumps(processor))
    config = model_config()
    (bare / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 0.3)
        for name, shape in model_map(config, vision=True).hf_shapes().items()
    }
    return write_checkpoint(folder, tensors, like=Checkpoint.open(bare, weights=False))


def write_rows(folder: Path, name: str = "rows", *, count: int = 32, seed: int = 0) -> Path:
    """Pictures of one colour each, of several sizes and shades, and `name`.jsonl, whose rows ask for it."""
    from PIL import Image

    generator = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        colour = list(COLOURS)[number % len(COLOURS)]
        shade = tuple(min(255, max(0, part + generator.randint(-20, 20))) for part in COLOURS[colour])
        size = (generator.choice([8, 16, 24]), generator.choice([8, 16]))
        picture = f"{name}-{number}.png"
        Image.new("RGB", size, shade).save(folder / picture)
        content = [{"type": "image"}, {"type": "text", "text": "which colour?"}]
        row = {"messages": [{"role": "user", "content": content}], "images": [picture], "answer": colour}
        lines.append(json.dumps(row) + "\n")
    rows = folder / f"{name}.jsonl"
    rows.write_text("".join(lines))
    return rows


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast

    vocabulary = (*_SPECIAL, *_WORDS)
    model = models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=_SPECIAL[0])
    tokenizer = Tokenizer(model)
    words = "|".join(sorted((word.replace("?", r"\?") for word in _WORDS), key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(words), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[token for token in _SPECIAL if token not in ("<|im_end|>", "<|endoftext|>")],
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)


def main() -> None:
    """Draws everything into a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    write_rows(folder)
    write_rows(folder, "held_out", count=12, seed=1)
    write_model(folder / "model")


if __name__ == "__main__":
    main()
