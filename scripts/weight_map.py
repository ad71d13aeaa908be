"""Writes docs/weight-map.md from the tables of relax-bridge."""

import argparse
from pathlib import Path

from relax_bridge import model_map
from relax_bridge.models.published import KNOWN
from relax_bridge.rendering import layers_text, shape_text

PAGE = Path(__file__).resolve().parent.parent / "docs" / "weight-map.md"
SHOWN = ("Qwen3.5-9B", "Qwen3.5-35B-A3B", "Qwen3-Next-80B-A3B", "Qwen3-8B", "Qwen3-30B-A3B")
HEAD = """# Weight map

Written by `nox -s docs` from the tables of relax-bridge; a test compares. `relax-bridge map MODEL` prints
the same for any model, `relax-bridge audit DIR` for a checkpoint, with digests and the ranks that own each
tensor. How a model is added: [adding-a-model.md](adding-a-model.md).

Shapes are `rows x columns` as stored. *Transform* says how the Hugging Face tensors become one: `concat`
stacks them, `gated_qkv` interleaves query, gate, key and value by key/value group, `grouped_delta_net` takes
apart Qwen3-Next's projections by key head; `identity` leaves a tensor as it is, norms included. *Cut* is the
axis that tensor-parallel ranks split and the components that are split one by one. `{i}` counts layers,
`{e}` experts; a tensor of all experts is stacked along its first axis.
"""


def section(size: str) -> str:
    """The table of one model."""
    table = model_map(KNOWN[size])
    lines = [f"\n## {size} (`{table.model}`)\n", "| Megatron | Hugging Face | transform | cut | where |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in table.rows:
        stored = "<br>".join(
            f"`{name}` {shape_text(shape)}" for name, shape in zip(row.hf, row.hf_shapes, strict=True)
        )
        cells = (
            f"`{row.megatron}` {shape_text(row.megatron_shape)}",
            stored,
            row.transform.name,
            row.partition.describe(),
            layers_text(row.at),
        )
        lines.append(f"| {' | '.join(cells)} |")
    if table.passthrough:
        kept = ", ".join(f"`{prefix}*`" for prefix in table.passthrough)
        lines.append(f"\nNot held by the trainer, carried through an export untouched: {kept}.")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(map(section, SHOWN))


def main() -> None:
    """Prints the page, or writes it."""
    parser = argparse.ArgumentParser(description="The page docs/weight-map.md.")
    parser.add_argument("--write", action="store_true", help="write it")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
