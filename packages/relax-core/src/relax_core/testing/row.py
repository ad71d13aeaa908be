"""`Row`: one layout to compare with a single rank."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Family = Literal["dense", "moe"]


@dataclass(frozen=True)
class Row:
    """What is trained, and over which ranks.

    Attributes:
        name: unique; the test's name.
        ranks: processes.
        parallel: settings of `ParallelConfig` that differ from their defaults; the data-parallel size is what
            is left.
        family: dense, or mixture of experts.
        layers: of the trunk; every fourth is full attention, the others are delta nets.
        mtp: draft layers of the model.
        draft: settings of `MtpConfig`.
        trainer: settings of `TrainerConfig` that must not change a number: recompute, overlap, micro-batches.
        model: changes of the model's `config.json` (head counts, experts, tied, ...).
        balance: coefficient of the balance loss of a model with experts.
        objective: "sft", "policy" (GRPO with importance ratio, KL, entropy, maxima), an algorithm's name,
            or "value": the critic's loss, on a critic.
        lora: settings of `LoraConfig`; adapters then start from random numbers.
        pictures: whether the model has a vision tower, trained or frozen, and samples have pictures.
        precision: "fp32", or "bf16" on accelerators.
        quick: whether the ordinary tests run it; `nox -s parity` runs all.
    """

    name: str
    ranks: int
    parallel: Mapping[str, Any] = field(default_factory=dict)
    family: Family = "dense"
    layers: int = 4
    mtp: int = 0
    draft: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    balance: float = 0.0
    objective: str = "sft"
    lora: Mapping[str, Any] = field(default_factory=dict)
    pictures: Literal["none", "frozen", "trained"] = "none"
    precision: Literal["fp32", "bf16"] = "fp32"
    quick: bool = False

    @property
    def reference(self) -> "Row":
        """The same training on one rank, in one micro-batch, with everything kept."""
        return replace(
            self, name="reference", ranks=1, parallel={}, trainer={"micro_batch_tokens": 10_000}, quick=False
        )

    def plain(self) -> dict[str, Any]:
        """Plain values, from which `Row(**...)` makes it again."""
        return asdict(self)
