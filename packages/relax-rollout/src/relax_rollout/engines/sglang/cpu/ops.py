"""The CPU operators that SGLang's Qwen3.5 calls, in plain torch.

SGLang takes them from its compiled kernel package, whose published wheel has none for the CPU; the folder
``path`` offers these in its place. Argument names and orders are SGLang 0.5.15's.

N rows, T tokens, S slots of the state pool, H key heads, U value heads, K key dim, V value dim, C channels,
W conv width, D width of a token, R head dim.
Formula of the rule: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", eq. 10.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

PAD_SLOT = -1


def fused_gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay -exp(A_log) softplus(a + dt_bias) and write strength sigmoid(b), both [1, T, U] float32."""
    g_TU = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g_TU[None], torch.sigmoid(b.float())[None]


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _rule(
    q_NLUK: Tensor, k_NLUK: Tensor, v_NLUV: Tensor, g_NLU: Tensor, beta_NLU: Tensor, state_NUVK: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The recurrence over L places of N rows, all float32; the state after each place is given too."""
    outputs, states = [], []
    for place in range(q_NLUK.shape[1]):
        q_NUK, k_NUK, v_NUV = q_NLUK[:, place], k_NLUK[:, place], v_NLUV[:, place]
        state_NUVK = state_NUVK * g_NLU[:, place, :, None, None].exp()
        read_NUV = (state_NUVK @ k_NUK[..., None])[..., 0]
        delta_NUV = (v_NUV - read_NUV) * beta_NLU[:, place, :, None]
        state_NUVK = state_NUVK + delta_NUV[..., None] * k_NUK[..., None, :]
        outputs.append((state_NUVK @ q_NUK[..., None])[..., 0])
        states.append(state_NUVK)
    return torch.stack(outputs, 1) * q_NLUK.shape[-1] ** -0.5, states


def _heads(q: Tensor, k: Tensor, value_heads: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """float32 queries and keys, one head per value head: value head u reads key head u // (U / H)."""
    q, k = q.float(), k.float()
    if normalise:
        q, k = _l2norm(q), _l2norm(k)
    times = value_heads // q.shape[-2]
    return q.repeat_interleave(times, -2), k.repeat_interleave(times, -2)


def _packed(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Row and place of each packed token."""
    lengths_N = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    row_T = torch.repeat_interleave(torch.arange(len(lengths_N)), lengths_N)
    place_T = torch.arange(len(row_T)) - cu_seqlens[:-1].long()[row_T]
    return row_T, place_T


def chunk_gated_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
) -> tuple[Tensor, Tensor, None]:
    """Prefill of packed rows; the rows' slots of the state pool are read and written.

    Args:
        q: [1, T, H, K].
        k: [1, T, H, K].
        v: [1, T, U, V].
        g: [1, T, U] float32, log decay.
        beta: [1, T, U].
        initial_state: pool [S, U, V, K].
        initial_state_indices: [N], slots.
        cu_seqlens: [N + 1].
        head_first: must be False.
        use_qk_l2norm_in_kernel: normalise queries and keys first.

    Returns:
        output [1, T, U, V] in the dtype of ``q``, the pool, and None (no states between chunks).
    """
    if head_first:
        raise ValueError("head_first is True; only token-first tensors are served")
    rows_T, place_T = _packed(cu_seqlens)
    slots_N = initial_state_indices.long()
    rows, longest = len(slots_N), int(place_T.max()) + 1 if len(place_T) else 0
    heads = v.shape[2]
    q_TUK, k_TUK = _heads(q[0], k[0], heads, use_qk_l2norm_in_kernel)

    def padded(x_T: Tensor) -> Tensor:
        full = x_T.new_zeros(rows, longest, *x_T.shape[1:])
        full[rows_T, place_T] = x_T
        return full

    # A place behind a row's end has g = 0 and beta = 0: it leaves the state as it is.
    out_NLUV, states = _rule(
        padded(q_TUK),
        padded(k_TUK),
        padded(v[0].float()),
        padded(g[0].float()),
        padded(beta[0].float()),
        initial_state[slots_N].float(),
    )
    if states:
        initial_state[slots_N] = states[-1].to(initial_state.dtype)
    return out_NLUV[rows_T, place_T][None].to(q.dtype), initial_state, None


def fused_sigmoid_gating_delta_rule_update(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Decode (one token per row) or verify (``cache_steps`` drafted tokens per row, in a chain).

    Args:
        A_log: [U].
        dt_bias: [U].
        q: [1, T, H, K], T = N or N * cache_steps.
        k: as ``q``.
        v: [1, T, U, V].
        a: [T, U].
        b: [T, U].
        initial_state_source: pool [S, U, V, K].
        initial_state_indices: [N], slots; PAD_SLOT rows compute and store nothing.
        cu_seqlens: [N + 1]; rows have equal lengths.
        use_qk_l2norm_in_kernel: normalise queries and keys first.
        softplus_beta: must be 1.
        softplus_threshold: above it softplus is the identity (torch's own is 20).
        is_kda: must be False.
        disable_state_update: leave the pool as it is (verify).
        intermediate_states_buffer: [N', steps, U, V, K], the states after each drafted token (verify).
        intermediate_state_indices: [N'], where each row's states go in that buffer.
        cache_steps: number of drafted tokens per row.
        retrieve_parent_token: the draft tree; None is a chain.

    Returns:
        [1, T, U, V] in the dtype of ``q``.
    """
    if is_kda or softplus_beta != 1.0 or retrieve_parent_token is not None:
        raise NotImplementedError("the CPU rule serves chains of drafts of the gated delta net only")
    slots_N = initial_state_indices.long()
    rows = len(slots_N)
    steps = q.shape[1] // rows
    x_TU = a.float() + dt_bias.float()
    softplus_TU = torch.where(x_TU > softplus_threshold, x_TU, F.softplus(x_TU))
    g_NLU = (-A_log.float().exp() * softplus_TU).view(rows, steps, -1)
    beta_NLU = torch.sigmoid(b.float()).view(rows, steps, -1)
    heads = v.shape[2]
    q_TUK, k_TUK = _heads(q[0], k[0], heads, use_qk_l2norm_in_kernel)
    out_NLUV, states = _rule(
        q_TUK.view(rows, steps, heads, -1),
        k_TUK.view(rows, steps, heads, -1),
        v[0].float().view(rows, steps, heads, -1),
        g_NLU,
        beta_NLU,
        initial_state_source[slots_N].float(),
    )
    real_N = slots_N != PAD_SLOT
    if intermediate_states_buffer is not None and intermediate_state_indices is not None:
        target_N = intermediate_state_indices[:rows].long()[real_N]
        for step, state_NUVK in enumerate(states):
            kept = intermediate_states_buffer.select(1, step)
            kept[target_N] = state_NUVK[real_N].to(kept.dtype)
    if not disable_state_update:
        initial_state_source[slots_N[real_N]] = states[-1][real_N].to(initial_state_source.dtype)
    return out_NLUV.reshape(1, rows * steps, heads, -1).to(q.dtype)


def _convolve(x_NCL: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None) -> Tensor:
    """Causal convolution of rows that begin with their W - 1 earlier inputs, in float32."""
    bias = None if bias_C is None else bias_C.float()
    y_NCL = F.conv1d(x_NCL.float(), weight_CW.float()[:, None], bias, groups=len(weight_CW))
    return F.silu(y_NCL) if activation in ("silu", "swish") else y_NCL


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    conv_states: Tensor,
    has_initial_state: Tensor | None,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Sequence[int] | None = None,
) -> Tensor:
    """Prefill of packed rows; the rows' slots get the last W - 1 inputs.

    Args:
        x: [C, T].
        weight: [C, W].
        bias: [C] or None.
        activation: "silu" or None.
        conv_states: pool [S, C, W - 1].
        has_initial_state: [N] bool; a row without one begins with zeros.
        cache_indices: [N], slots.
        query_start_loc: [N + 1].
        seq_lens_cpu: unused.

    Returns:
        [C, T] in the dtype of ``x``.
    """
    out_CT = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        start, end = bounds[row], bounds[row + 1]
        if slot == PAD_SLOT or start == end:
            continue
        known = has_initial_state is not None and bool(has_initial_state[row])
        tail_CW = conv_states[slot] if known else torch.zeros_like(conv_states[slot])
        run_CL = torch.cat([tail_CW.to(x.dtype), x[:, start:end]], dim=1)
        out_CT[:, start:end] = _convolve(run_CL[None], weight, bias, activation)[0].to(x.dtype)
        conv_states[slot] = run_CL[:, -conv_states.shape[-1] :].to(conv_states.dtype)
    return out_CT


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Decode or verify: some new inputs per row.

    Args:
        x: [N, C], or [N, C, L] to verify L drafted tokens.
        conv_state: pool [S, C, W - 1]; changed only by decode, as verify's states are chosen later.
        weight: [C, W].
        bias: [C] or None.
        activation: "silu" or None.
        conv_state_indices: [N], slots.
        intermediate_conv_window: [N', L, C, W - 1], the window after each drafted token (verify).
        intermediate_state_indices: [N'], where each row's windows go.
        retrieve_next_token: the draft tree, as the next two: None for a chain.
        retrieve_next_sibling: None.
        retrieve_parent_token: None.

    Returns:
        the shape and dtype of ``x``.
    """
    if (
        retrieve_next_token is not None
        or retrieve_next_sibling is not None
        or retrieve_parent_token is not None
    ):
        raise NotImplementedError("the CPU convolution verifies chains of drafts only")
    single = x.dim() == 2
    x_NCL = x[..., None] if single else x
    slots_N = conv_state_indices.long()
    run_NCL = torch.cat([conv_state[slots_N].to(x.dtype), x_NCL], dim=-1)
    out_NCL = _convolve(run_NCL, weight, bias, activation).to(x.dtype)
    real_N = slots_N != PAD_SLOT
    width = conv_state.shape[-1]
    if intermediate_conv_window is not None and intermediate_state_indices is not None:
        target_N = intermediate_state_indices[: len(slots_N)].long()[real_N]
        for step in range(x_NCL.shape[-1]):
            window_NCW = run_NCL[real_N, :, step + 1 : step + 1 + width]
            # Windows of neighbouring steps share memory: each is written as a whole, one after the other.
            intermediate_conv_window.select(1, step)[target_N] = window_NCW.to(intermediate_conv_window.dtype)
    else:
        conv_state[slots_N[real_N]] = run_NCL[real_N, :, -width:].to(conv_state.dtype)
    # SGLang views the result through the strides of what it gave.
    return out_NCL[..., 0] if single else torch.empty_like(x).copy_(out_NCL)


def _gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight.float())


def fused_qk_gemma_rmsnorm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Zero-centred norm over each head of queries and keys, in their dtype, shaped [-1, R]."""
    q_R, k_R = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    return _gemma_norm(q_R, q_weight, eps).to(q.dtype), _gemma_norm(k_R, k_weight, eps).to(k.dtype)


def fused_qk_gemma_rmsnorm_with_gate(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for queries that carry their gate behind each head; all three [T, heads * R]."""
    tokens = q_gate.shape[0]
    q_THR, gate_THR = q_gate.view(tokens, num_heads, 2 * head_dim).chunk(2, dim=-1)
    q_N, k_N = fused_qk_gemma_rmsnorm(q_THR, k, q_weight, k_weight, eps, head_dim)
    return q_N.view(tokens, -1), k_N.view(tokens, -1), gate_THR.reshape(tokens, -1)


def fused_sigmoid_mul(x: Tensor, gate: Tensor, inplace: bool = True) -> Tensor:
    """x * sigmoid(gate), in float32, in the shape and dtype of ``x``; into ``x`` if ``inplace``."""
    out = (x.float() * torch.sigmoid(gate.float().reshape(x.shape))).to(x.dtype)
    return x.copy_(out) if inplace else out


def rms_norm_gated(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = True,
    activation: str = "swish",
) -> Tensor:
    """norm(x) * weight * act(z), act SiLU or sigmoid, in float32, in the dtype of ``x``.

    Args:
        x: [T, D].
        weight: [D].
        bias: must be None.
        z: gate [T, D] or None.
        eps: under the root.
        group_size: None or D.
        norm_before_gate: must be True.
        is_rms_norm: must be True.
        activation: "swish", "silu" or "sigmoid".
    """
    if bias is not None or not norm_before_gate or not is_rms_norm or group_size not in (None, x.shape[-1]):
        raise NotImplementedError("the CPU norm serves norm(x) * weight * act(z) only")
    wide = x.float()
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    if z is not None:
        gate = z.float()
        out = out * (torch.sigmoid(gate) if activation == "sigmoid" else F.silu(gate))
    return out.to(x.dtype)


def fused_mamba_state_scatter_with_mask(
    dst: Tensor, src: Tensor, dst_indices_raw: Tensor, step_indices_raw: Tensor
) -> None:
    """After a verification: keep of each row the state behind its last accepted token.

    Args:
        dst: pool [layers, S, ...].
        src: [layers, N', steps, ...], the states after each drafted token.
        dst_indices_raw: [N], slots.
        step_indices_raw: [N], the last accepted step; below 0 leaves the slot as it is.
    """
    step_N = step_indices_raw.long()
    row_N = (step_N >= 0).nonzero()[:, 0]
    dst[:, dst_indices_raw.long()[row_N]] = src[:, row_N, step_N[row_N]].to(dst.dtype)
