"""`build_model`: the one way to make a model."""

import torch
from megatron.core import parallel_state

from relax_core.device import ParallelConfig
from relax_core.model.config import Qwen35Config
from relax_core.model.megatron_config import Recompute, megatron_config
from relax_core.model.mtp_config import MtpConfig
from relax_core.model.qwen35 import Qwen35Model


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
        ValueError: a parallel axis that the model does not have yet, or heads that cannot be spread over the
            tensor-parallel ranks.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError("call relax_core.device.initialise(...) before build_model(...)")
    parallel = parallel or ParallelConfig()
    _refuse_unbuilt(parallel)
    config = megatron_config(
        model,
        parallel,
        dtype=dtype,
        recompute=recompute,
        random_weights=random_weights,
    )
    with torch.device(device):
        return Qwen35Model(
            config,
            model,
            mtp=mtp or MtpConfig(),
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )


def _refuse_unbuilt(parallel: ParallelConfig) -> None:
    """Raises ValueError for parallel axes whose numbers are not proven."""
    sizes = {axis: getattr(parallel, axis) for axis in ("pipeline", "expert")}
    wrong = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    wrong += ["sequence true"] if parallel.sequence else []
    if wrong:
        raise ValueError(
            f"parallel sizes not supported yet: {', '.join(wrong)}; "
            "use tensor, context and data parallelism, and leave these at their defaults"
        )
