"""Writes docs/algorithms.md from the registry of relax-core's algorithms."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from relax_core.algorithms import Algorithm, algorithm_names, get_algorithm
from relax_core.algorithms.algorithm import POLICY_SETTINGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "algorithms.md"
HEAD = """# Algorithms

Written by `nox -s docs` from what the algorithms declare (`relax_core.algorithms.builtin`); a test compares.
`relax-train --algorithm.name NAME` takes one of them, `--algorithm.name module:NAME` one of yours:
[adding-an-algorithm.md](adding-an-algorithm.md).

Every objective is the same number, with the same gradients, however a batch is packed, split into
micro-batches and spread over ranks; `nox -s parity` has rows of each, and
`packages/relax-core/tests/loop/test_formulas.py` compares each with its source, token by token. What couples
tokens of a completion is summed over the ranks that share it, without gradient; what couples completions of a
batch is taken from log-probs before the step, which costs one more forward pass (*scores*).

r is pi / pi_old of a token, A its advantage, x the score of its completion, sg(.) has no gradient. Each loss
is multiplied by the importance weight of trainer over engine (`algorithm.correction`) where the algorithm has
one; it is a completion's where the ratio is. KL (`algorithm.kl_loss_coef`) and entropy
(`algorithm.entropy_coef`) may be added.
"""
REST = """
## Settings around them

- `rollout.dynamic_sampling` drops groups whose rewards are all equal and samples others (DAPO, equation 11).
- `reward.overlong_tokens` takes up to `reward.overlong_penalty` from completions near the length limit (DAPO,
  equation 13); with `algorithm.mask_truncated` those that were cut carry no loss (its overlong filtering).
- `algorithm.kl_loss_coef` or `algorithm.kl_reward_coef` hold the policy near `model.reference_path`; with
  adapters (`lora.rank`) the policy without them is the reference, and no second model is kept.
- `critic.*` belongs to ppo: the critic is the policy's trunk with a value head, trained beside it on the same
  ranks; its checkpoints lie in `checkpoints/critic/`.
- `teacher.path` (a checkpoint in the trainer) or `teacher.urls` (SGLang servers) belongs to
  on_policy_distillation.
- dpo reads rows with a prompt, `data.chosen_key` and `data.rejected_key`; `sft.samples_per_step` counts
  pairs.
"""


def needs(algorithm: Algorithm) -> str:
    """What a run must bring, in words."""
    found = {
        "pairs": algorithm.loop == "pairs",
        "reference": algorithm.needs_reference,
        "teacher": algorithm.needs_teacher,
        "critic": algorithm.needs_critic,
        "scores": algorithm.needs_scores,
        "dynamic sampling": algorithm.needs_dynamic_sampling,
        "one optimizer step a batch": algorithm.on_policy,
        f"{algorithm.min_group_size} completions a prompt": algorithm.min_group_size > 1,
    }
    return ", ".join(name for name, needed in found.items() if needed) or "-"


def page() -> str:
    """The whole page."""
    algorithms = [get_algorithm(name) for name in algorithm_names()]
    lines = [
        HEAD,
        "## Objectives\n",
        "| name | what it is | loss of a token | advantage |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{a.name}` | {a.summary} | {_cell(a.objective)} | {_cell(a.advantage_formula) or '-'} |"
        for a in algorithms
    ]
    lines += ["\n## What they need and allow\n"]
    lines += ["| name | ratio of | needs | reduction (others) | clip low, high | source |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for a in algorithms:
        others = ", ".join(sorted(a.reductions - {a.default_reduction}))
        reduction = f"{a.default_reduction} ({others})" if others else a.default_reduction
        clip = f"{a.clip[0]:g}, {a.clip[1]:g}" if "clip_low" in a.settings else "-"
        ratio = f"a {a.level}" + (", to the engine" if a.ratio_to == "rollout" else "")
        ratio = ratio if a.policy_loss else "-"
        lines.append(f"| `{a.name}` | {ratio} | {needs(a)} | {reduction} | {clip} | {a.source} |")
    lines += [
        "\n## Their settings\n",
        f"Algorithms that sample read these fields of `algorithm`: {_fields(POLICY_SETTINGS)}.",
        "What one reads beside them, and which it does not read, is in the table; any other is refused.\n",
        "| name | reads beside them | does not read |",
        "| --- | --- | --- |",
    ]
    for a in algorithms:
        read = POLICY_SETTINGS & a.settings
        less = (
            _fields(POLICY_SETTINGS - read)
            if a.loop == "rl"
            else f"all but {_fields(read)}"
            if read
            else "all"
        )
        lines.append(f"| `{a.name}` | {_fields(a.settings - POLICY_SETTINGS)} | {less} |")
    return "\n".join(lines) + "\n" + REST


def _fields(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "-"


def _cell(text: str) -> str:
    return f"`{text}`" if text else ""


def main() -> None:
    """Prints the page, or writes it."""
    parser = argparse.ArgumentParser(description="The page docs/algorithms.md.")
    parser.add_argument("--write", action="store_true", help="write it")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
