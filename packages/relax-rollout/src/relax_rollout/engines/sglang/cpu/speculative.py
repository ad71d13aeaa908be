"""Speculative decoding on the CPU: what SGLang 0.5.15 runs as Triton kernels or has for no CPU, in torch.

Chains of drafts only (``speculative_eagle_topk`` 1). N rows, D tokens of a row under verification.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def assign_req_to_token_pool(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    *unused: Any,
) -> None:
    """Write each row's new slots into its places from start to end."""
    done = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Read the slots of each row's draft places, behind its tokens."""
    places_ND = seq_lens.long()[:, None] + torch.arange(topk * speculative_num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], places_ND].view(-1))


def fill_bonus_tokens(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """The last token that stands in each row."""
    last_N = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last_N])


def fill_accept_out_cache_loc(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, *unused: Any
) -> None:
    """The slots of the tokens that stand, in order."""
    index = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(index)] = out_cache_loc[index]


def assign_extend_cache_locs_func(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Tensor:
    """The slots of each row's places from start to end, packed, int64."""
    parts = [
        req_to_token[row, start:end]
        for row, start, end in zip(
            req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
        )
    ]
    return torch.cat(parts).long()


def build_chain(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: Any,
) -> None:
    """A chain in place of a tree: each draft follows the one before it; the mask stays as it is, unused."""
    if topk != 1:
        raise NotImplementedError(f"speculative_eagle_topk is {topk}; the CPU verifies chains: set it to 1")
    rows = len(seq_lens)
    place_D = torch.arange(num_verify_tokens)
    positions.copy_((seq_lens.long()[:, None] + place_D).view(-1))
    retrieve_index.copy_(torch.arange(rows * num_verify_tokens).view(rows, -1))
    retrieve_next_token.copy_(torch.where(place_D + 1 < num_verify_tokens, place_D + 1, -1).expand(rows, -1))
    retrieve_next_sibling.fill_(-1)


class _Launch:
    """Called as a Triton kernel is: ``kernel[grid](arguments)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


class CpuDraftSteps:
    """The attention of the draft's steps: all of them the same."""

    def __init__(self, runner: Any, topk: int, steps: int) -> None:
        from relax_rollout.engines.sglang.cpu.attention import CpuAttention

        self.attn_backends = [CpuAttention(runner) for _ in range(max(1, steps - 1))]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing is prepared."""


class _OnCpu(TorchFunctionMode):
    """Where SGLang writes ``device="cuda"`` whatever the device is."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = dict(keywords or {})
        if str(keywords.get("device", "")).startswith("cuda"):
            keywords["device"] = "cpu"
        return function(*arguments, **keywords)


def on_cpu(original: Any, *arguments: Any, **more: Any) -> Any:
    """AROUND hook: allocations of this call go to the CPU."""
    with _OnCpu():
        return original(*arguments, **more)


def decode_backend(original: Any, factory: Any) -> Any:
    """AROUND hook of ``DraftBackendFactory.create_decode_backend``."""
    if factory.speculative_num_steps <= 1:
        return None
    return CpuDraftSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def extend_backend(original: Any, factory: Any) -> Any:
    """AROUND hook of ``DraftBackendFactory.create_draft_extend_backend``."""
    from relax_rollout.engines.sglang.cpu.attention import CpuAttention

    return CpuAttention(factory.draft_model_runner)


def replace_kernels() -> None:
    """Put our functions where SGLang's modules hold Triton kernels, and the chain where they hold nothing."""
    from sglang.srt.speculative import eagle_utils, eagle_worker_v2  # noqa: F401 - its imports are replaced
    from sglang.srt.speculative.triton_ops import cache_locs, eagle

    ours: dict[Any, tuple[Any, ...]] = {
        cache_locs: (assign_req_to_token_pool, assign_draft_cache_locs_contiguous),
        eagle: (fill_bonus_tokens, fill_accept_out_cache_loc),
    }
    for home, functions in ours.items():
        for function in functions:
            kernel, launch = getattr(home, function.__name__), _Launch(function)
            for module in [m for name, m in list(sys.modules.items()) if name.startswith("sglang.")]:
                for name, value in list(vars(module).items()):
                    if value is kernel:
                        setattr(module, name, launch)
    eagle_utils.sgl_build_tree_kernel_efficient = build_chain
    # Models call these after they share the head with the draft.
    torch.cuda.empty_cache = torch.cuda.synchronize = _nothing


def _nothing(*arguments: Any, **more: Any) -> None:
    """Stands for a call of the CUDA runtime."""
