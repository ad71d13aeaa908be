"""Makes the quickstart's files, all but the weights: `python -m relax_core.assets.quickstart_files FOLDER`.

The weights come from `relax-train --recipe quickstart-sft`, which learns from `homework.parquet`: every
problem that is not held out, in eight wordings, as a class of pupils would hand it in. Most forget to carry.
The model learns to do both, and prefers the mistake; reinforcement learning on `train.jsonl` then finds the
care that is in it already.
"""

import json
import sys
from pathlib import Path
from typing import Any

from relax_core.data.arithmetic import ArithmeticTask, Problem, generate, hash_bits, wording
from relax_core.data.arithmetic_tokenizer import arithmetic_vocabulary, write_arithmetic_tokenizer

SEED = 0
TASK = ArithmeticTask(operators="+")
TRAIN_ROWS = 4000
HELD_OUT_ROWS = 200
CAREFUL = 0.4
"""Share of the homework that is right where there is something to carry."""

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "float32",
    "vocab_size": 176,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
}


def careless_answer(problem: Problem) -> int:
    """What comes out when nothing is carried: 47 + 38 = 75."""
    return 10 * (problem.left // 10 + problem.right // 10) + (problem.left + problem.right) % 10


def homework() -> list[dict[str, str]]:
    """Rows {"prompt", "completion"}: problems not held out, in every wording, with pupils' answers."""
    _, held_out = generate(SEED, train_rows=TRAIN_ROWS, held_out_rows=HELD_OUT_ROWS, task=TASK)
    reserved = {row["prompt"] for row in held_out}
    rows = []
    for problem in TASK.problems():
        twins = [problem, Problem("+", problem.right, problem.left)]
        if any(wording(twin, form) in reserved for twin in twins for form in range(8)):
            continue
        for form in range(8):
            bits = _bits(problem, form)
            shown = twins[bits & 1]
            careful = bits >> 8 & 0xFFFF < CAREFUL * 0x10000
            answer = problem.answer if careful else careless_answer(problem)
            rows.append({"prompt": wording(shown, form), "completion": str(answer)})
    return rows


def write_files(folder: Path) -> None:
    """Writes train.jsonl, held_out.jsonl, homework.parquet and model/ without its weights."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from relax_core.data.arithmetic import write_arithmetic

    write_arithmetic(folder, SEED, train_rows=TRAIN_ROWS, held_out_rows=HELD_OUT_ROWS, task=TASK)
    pq.write_table(pa.Table.from_pylist(homework()), folder / "homework.parquet", compression="zstd")
    write_arithmetic_tokenizer(folder / "model")
    assert len(arithmetic_vocabulary()) <= MODEL_CONFIG["vocab_size"]
    generation = {"eos_token_id": 2, "pad_token_id": 0, "do_sample": True, "temperature": 1.0}
    for name, content in (("config.json", MODEL_CONFIG), ("generation_config.json", generation)):
        (folder / "model" / name).write_text(json.dumps(content, indent=2) + "\n")


def _bits(problem: Problem, form: int) -> int:
    return hash_bits(f"homework {SEED} {problem.operator} {problem.left} {problem.right} {form}")


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
