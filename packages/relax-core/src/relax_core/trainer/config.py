"""Settings of the trainer: optimizer, schedule, micro-batches, recompute and precision."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import model_validator

from relax_core.config.section import Section, SettingError, setting


class TrainerConfig(Section):
    """How one batch becomes one weight update."""

    lr: float = setting(1e-6, "Peak learning rate of Adam.", ge=0, le=1e6)
    min_lr: float = setting(0.0, "Learning rate at the end of a linear or cosine schedule.", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", "Shape of the learning rate after the warm-up, over all steps of the run."
    )
    warmup_steps: int = setting(
        0, "Steps over which the learning rate rises linearly from 0.", unit="optimizer steps", ge=0
    )
    weight_decay: float = setting(0.0, "Decoupled weight decay (AdamW) of every matrix.", ge=0)
    beta1: float = setting(0.9, "Adam's decay of the mean of gradients.", ge=0, lt=1)
    beta2: float = setting(0.95, "Adam's decay of the mean of squared gradients.", ge=0, lt=1)
    eps: float = setting(1e-8, "Adam's term against division by zero.", gt=0)
    clip_grad: float = setting(1.0, "Global gradient norm above which gradients are scaled; 0 is off.", ge=0)
    optimizer_steps_per_batch: int = setting(
        1, "Parts a batch is split into, each giving one optimizer step.", unit="optimizer steps", ge=1
    )
    micro_batch_tokens: int = setting(
        8192,
        "Tokens packed into one forward and backward pass at most; longer samples go alone.",
        unit="tokens",
        ge=1,
    )
    packing: Literal["thd", "bshd"] = setting(
        "thd",
        "How samples share a micro-batch: back to back, or each in as many positions as the longest of the "
        "batch has tokens. The numbers are the same; padding costs time.",
    )
    balance_coefficient: float = setting(
        0.0,
        "Weight of the loss that evens out the use of experts, summed over layers; 0 only measures it. Above "
        "0 each step takes one more forward pass, which counts the choices of the whole batch.",
        ge=0,
    )
    recompute: Literal["none", "selective", "full"] = setting(
        "none", "Activations computed again in the backward pass instead of kept."
    )
    gradient_precision: Literal["fp32", "bf16"] = setting(
        "fp32",
        "Number format in which gradients add up over micro-batches and ranks; bf16 takes 2 bytes per weight "
        "less. With precision bf16 a weight takes 16 bytes in all: 4 as bfloat16 and what that lacks of "
        "float32, 4 of gradient, 8 of Adam's means; 10 with gradients and means in bf16.",
    )
    moment_precision: Literal["fp32", "bf16"] = setting(
        "fp32",
        "Number format of Adam's two running means; bf16 takes 4 bytes per weight less. It rounds at random, "
        "right on average whatever beta1 and beta2 are.",
    )
    overlap_grad_reduce: bool = setting(
        False, "Sums gradients over data-parallel ranks while the backward pass still runs."
    )
    overlap_param_gather: bool = setting(
        False,
        "Gathers updated weights over data-parallel ranks while the next forward pass runs; needs "
        "overlap_grad_reduce.",
    )
    precision: Literal["fp32", "bf16"] = setting(
        "bf16", "Number format of weights and activations; the optimizer always keeps fp32 weights."
    )

    def spaces(self, lengths: Sequence[int]) -> list[int]:
        """Positions that samples of these `lengths`, all of a mini-batch, take in their micro-batches."""
        if self.packing == "thd":
            return list(lengths)
        return [max(lengths, default=0)] * len(lengths)

    @model_validator(mode="after")
    def _half_formats_fit(self) -> Self:
        if self.gradient_precision == "bf16" and self.precision == "fp32":
            raise SettingError(
                "gradient_precision",
                "gradient_precision is bf16 and precision fp32: gradients are kept in no fewer bits than "
                "weights; set gradient_precision to fp32, or precision to bf16",
                given="bf16",
                allowed="fp32, or precision bf16",
                nearest="fp32",
            )
        return self

    @model_validator(mode="after")
    def _gather_overlaps_only_with_reduce(self) -> Self:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise SettingError(
                "overlap_param_gather",
                "overlap_param_gather is true and overlap_grad_reduce false: Megatron overlaps both or the "
                "reduction alone; set overlap_grad_reduce to true",
                given=True,
                allowed="false, or overlap_grad_reduce true",
                nearest=False,
            )
        return self

    @model_validator(mode="after")
    def _min_lr_below_peak(self) -> Self:
        if self.min_lr > self.lr:
            raise SettingError(
                "min_lr",
                f"min_lr {self.min_lr:g} is above lr {self.lr:g}: give a min_lr of at most {self.lr:g}",
                given=self.min_lr,
                allowed=f"at most {self.lr:g}",
                nearest=self.lr,
            )
        return self
