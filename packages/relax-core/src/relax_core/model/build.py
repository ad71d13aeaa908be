"""`build_model` and `build_chunks`: the one way to make a model, or this rank's share of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state

from relax_core.device import ParallelConfig
from relax_core.model.config import Qwen35Config
from relax_core.model.critic import Qwen35Critic
from relax_core.model.lora import refuse_idle_targets, train_adapters_alone
from relax_core.model.lora_config import LoraConfig
from relax_core.model.megatron_config import Recompute, megatron_config
from relax_core.model.mtp_config import MtpConfig
from relax_core.model.qwen35 import Qwen35Model
from relax_core.model.stages import stage_layers


def build_model(
    model: Qwen35Config,
    parallel: ParallelConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = "none",
    mtp: MtpConfig | None = None,
    device: torch.device | str = "cpu",
    random_weights: bool = True,
) -> Qwen35Model:
    """A model, or this rank's share of it, on `device`; call `relax_core.device.initialise` before.

    Args:
        model: sizes, from `Qwen35Config.from_hf`.
        parallel: the sizes that `initialise` was given; all 1 when None.
        dtype: of weights and activations. `A_log`, `dt_bias` and the delta net's output norm are at least
            float32.
        recompute: "none" keeps every activation; "selective" computes norms, feed-forward activations and the
            token mixers' cores again; "full" keeps only each layer's input.
        mtp: what the draft layers' gradient may reach; everything detached when None.
        device: where the weights lie.
        random_weights: draw weights as Hugging Face does; False leaves the large ones unset, for a
            checkpoint.

    Raises:
        RuntimeError: Megatron's process groups do not exist yet.
        ValueError: this rank holds several pieces of the layers (use `build_chunks`), or the model cannot be
            spread as `parallel` says.
    """
    if parallel is not None and parallel.pipeline_chunks > 1:
        raise ValueError(
            f"pipeline_chunks is {parallel.pipeline_chunks}: this rank holds several pieces of the layers; "
            "build_chunks gives them all"
        )
    options: dict[str, Any] = {"dtype": dtype, "recompute": recompute, "mtp": mtp, "device": device}
    (chunk,) = build_chunks(model, parallel, **options, random_weights=random_weights)
    return chunk


def build_chunks(
    model: Qwen35Config,
    parallel: ParallelConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = "none",
    mtp: MtpConfig | None = None,
    device: torch.device | str = "cpu",
    random_weights: bool = True,
    critic: bool = False,
    lora: LoraConfig | None = None,
    seed: int = 0,
) -> list[Qwen35Model]:
    """All pieces of the layers that this rank holds, in order: `parallel.pipeline_chunks` models.

    See `build_model` for the arguments. With `critic` they are `Qwen35Critic`s, without draft layers and with
    a head of its own. With `lora` projections of the trunk, and of draft layers if it says so, have
    adapters, drawn with `seed`, and nothing else can be trained.

    Raises:
        RuntimeError: Megatron's process groups do not exist yet.
        ValueError: the layers do not divide by the pieces, or heads cannot be spread over the ranks.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError("call relax_core.device.initialise(...) before building a model")
    parallel = parallel or ParallelConfig()
    if critic:
        model = replace(model, mtp_layers=0, tied=False)
    stage_layers(model.num_layers, parallel)
    refuse_idle_targets(model, lora)
    detached = mtp is None or mtp.detach_embedding
    if model.vision and model.mtp_layers and parallel.pipeline > 1 and not detached:
        raise ValueError(
            f"parallel.pipeline is {parallel.pipeline}, the model has a vision tower and draft layers, and "
            "mtp.detach_embedding is false: what the tower saw goes from the first stage to the last without "
            "a way back for its gradient; set mtp.detach_embedding to true or parallel.pipeline to 1"
        )
    chunks = []
    for chunk in range(parallel.pipeline_chunks):
        stage = chunk if parallel.pipeline_chunks > 1 else None
        where: dict[str, Any] = {"ignore_virtual": stage is None, "vp_stage": stage}
        # Megatron's own parts write into their config, so each chunk has one of its own.
        config = megatron_config(
            model, parallel, dtype=dtype, recompute=recompute, random_weights=random_weights, lora=lora
        )
        with torch.device(device):
            chunks.append(
                (Qwen35Critic if critic else Qwen35Model)(
                    config,
                    model,
                    mtp=mtp or MtpConfig(),
                    pre_process=parallel_state.is_pipeline_first_stage(**where),
                    post_process=parallel_state.is_pipeline_last_stage(**where),
                    vp_stage=stage,
                )
            )
        if config.lora is not None:
            train_adapters_alone(chunks[-1], seed=seed)
    return chunks


def freeze_tower(chunks: Sequence[Qwen35Model]) -> None:
    """Keeps the vision tower, on whichever stage it is, as it stands; before the trainer is made."""
    for chunk in chunks:
        if chunk.visual is not None:
            chunk.visual.requires_grad_(False)
