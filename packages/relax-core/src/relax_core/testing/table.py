"""The table of layouts: every row must give the numbers of one rank.

A new axis is one row: name it, give its sizes, and it is trained for three steps on ragged samples and
compared in every loss, metric, gradient, score and weight. `quick=True` puts it into the ordinary tests; a
row costs one to three seconds of two cores. To run one:
`pytest packages/relax-core/tests/parity -m "parity or not parity" -k NAME`.
"""

from typing import Any

from relax_core.testing.row import Row

_OVERLAP = {"overlap_grad_reduce": True}
_OVERLAP_BOTH = {**_OVERLAP, "overlap_param_gather": True}
_JOINED = {"detach_embedding": False, "detach_trunk": False, "detach_head": False}
_TIED = {"tie_word_embeddings": True}
_TP = {"tensor": 2}
_SP = {"tensor": 2, "sequence": True}
_INTERLEAVED = {"pipeline": 2, "pipeline_chunks": 2}

_SELECTIVE, _FULL = {"recompute": "selective"}, {"recompute": "full"}
_PP = {"pipeline": 2}
_TP4_SP = {"tensor": 4, "sequence": True}
_BSHD = {"packing": "bshd", "micro_batch_tokens": 64}
_ENDS = {"pipeline": 4, "first_stage_layers": 1, "last_stage_layers": 1}
_CP = {"context": 2}
_GATHERED = {"context_attention": "gather"}
_BY_HEADS, _BY_STATE = {"context_attention": "heads"}, {"context_delta": "state"}
_ONE_KV_HEAD = {"num_key_value_heads": 1}
_EIGHT_HEADS = {"num_attention_heads": 8, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
_EP = {"expert": 2}
_MANY_EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 4}
_TIED_JOINED: dict[str, Any] = {"model": _TIED, "draft": _JOINED}

_LORA = {"rank": 3, "alpha": 6.0}
_LORA_DRAFTS = {**_LORA, "drafts": True}
_LORA_EXPERTS = {**_LORA, "targets": ("in_proj", "linear_qkv", "linear_fc1", "linear_fc2", "experts")}
_SMALL = {"micro_batch_tokens": 16}
ALGORITHMS = ("dr_grpo", "gspo", "cispo", "sapo", "rloo", "reinforce_plus_plus", "m2po", "dpo")
"""One of each loss and reduction; the others differ in advantages, which are taken before any split."""

ROWS: tuple[Row, ...] = (
    # One rank: what must not matter there either.
    Row("micro-batches", 1, trainer={"micro_batch_tokens": 16}, mtp=1, quick=True),
    # Every sample in a row of its own, padding inside the row.
    Row("bshd-mtp1", 1, trainer=_BSHD, mtp=1, quick=True),
    Row("tp2-sp-bshd-mtp1-policy", 2, _SP, trainer=_BSHD, mtp=1, objective="policy"),
    Row("cp2-bshd-mtp2-joined", 2, _CP, trainer=_BSHD, mtp=2, draft=_JOINED),
    Row("cp2-bshd-state", 2, {**_CP, **_BY_HEADS, **_BY_STATE}, trainer=_BSHD),
    Row("pp2-bshd-mtp1", 2, _PP, trainer=_BSHD, mtp=1),
    # The second step leaves a replica without a sample: its stages exchange a row of padding alone.
    Row("pp2-dp2-bshd-mtp1", 4, _PP, trainer=_BSHD, mtp=1),
    Row("dp2-bshd-overlap", 2, trainer={**_BSHD, **_OVERLAP_BOTH}, mtp=1),
    Row("moe-ep2-bshd-mtp1", 2, _EP, family="moe", trainer=_BSHD, mtp=1, balance=0.5),
    # Tensor and sequence parallel.
    Row("tp2", 2, _TP, quick=True),
    Row("tp2-mtp2-policy", 2, _TP, mtp=2, draft=_JOINED, objective="policy"),
    Row("tp2-sp", 2, _SP, quick=True),
    Row("tp2-sp-mtp2-policy", 2, _SP, mtp=2, draft=_JOINED, objective="policy"),
    Row("tp2-sp-mtp1-tied", 2, _SP, mtp=1, model=_TIED),
    Row("tp2-sp-mtp3", 2, _SP, mtp=3, draft=_JOINED),
    Row("tp2-sp-mtp1-repeated2", 2, _SP, mtp=1, draft={"repeated": 2}),
    Row("tp2-sp-mtp1-only", 2, _SP, mtp=1, draft={"only": True}),
    # Data parallel; gradients and weights travel with and without overlap.
    Row("dp2", 2, quick=True),
    Row("dp2-mtp2-policy", 2, mtp=2, objective="policy"),
    Row("dp2-overlap-reduce", 2, trainer=_OVERLAP, mtp=1),
    Row("dp2-overlap-both", 2, trainer=_OVERLAP_BOTH, mtp=1),
    Row("dp2-mtp1-only", 2, mtp=1, draft={"only": True}),
    # Pipelines, in order and interleaved.
    Row("pp2", 2, _PP, quick=True),
    Row("pp2-tied", 2, _PP, model=_TIED),
    Row("pp2-mtp1", 2, _PP, mtp=1),
    Row("pp2-mtp2-joined", 2, _PP, mtp=2, draft=_JOINED, objective="policy"),
    Row("pp2-mtp1-tied-joined", 2, _PP, mtp=1, **_TIED_JOINED),
    Row("pp2-mtp1-repeated3-joined", 2, _PP, mtp=1, draft={**_JOINED, "repeated": 3}),
    Row("pp2-mtp2-only", 2, _PP, mtp=2, draft={"only": True}),
    Row("pp2-chunks2", 2, _INTERLEAVED),
    Row("pp2-chunks2-mtp2-tied-joined", 2, _INTERLEAVED, layers=8, mtp=2, **_TIED_JOINED),
    # Stages with layers of their own number, a refused cut otherwise.
    Row("pp2-last-1-mtp1-tied", 2, {**_PP, "last_stage_layers": 1}, mtp=1, **_TIED_JOINED),
    Row("pp2-first-2-of-7", 2, {**_PP, "first_stage_layers": 2}, layers=7, trainer=_FULL),
    Row("pp2-chunks2-last-2-of-6-mtp1", 2, {**_INTERLEAVED, "last_stage_layers": 2}, layers=6, mtp=1),
    Row("pp4-first-1-last-1-of-6", 4, _ENDS, layers=6, model=_TIED, trainer=_OVERLAP),
    # Context parallel, both ways for each kind of layer.
    Row("cp2", 2, _CP, quick=True),
    Row("cp2-gather-mtp2-joined-policy", 2, {**_CP, **_GATHERED}, mtp=2, draft=_JOINED, objective="policy"),
    Row("cp2-heads-state-mtp1", 2, {**_CP, **_BY_HEADS, **_BY_STATE}, mtp=1),
    Row("cp2-heads-heads-mtp1", 2, {**_CP, **_BY_HEADS}, mtp=1),
    Row("cp2-gather-state-mtp1-policy", 2, {**_CP, **_GATHERED, **_BY_STATE}, mtp=1, objective="policy"),
    # Pieces of a few tokens: states and convolutions reach over several ranks.
    Row("cp4-gather", 4, {"context": 4, **_GATHERED}, quick=True),
    Row("cp4-heads-mtp1", 4, {"context": 4, **_BY_HEADS}, mtp=1),
    # Pictures: every rank computes those of its row, and has the gradient of its own tokens.
    Row("pictures-micro-batches", 1, trainer=_SMALL, mtp=1, draft=_JOINED, pictures="trained"),
    Row("pictures-tp2-mtp1", 2, _TP, mtp=1, draft=_JOINED, pictures="trained"),
    Row("pictures-tp2-sp-mtp1", 2, _SP, mtp=1, draft=_JOINED, pictures="trained", quick=True),
    Row("pictures-tp2-sp-full-frozen", 2, _SP, trainer=_FULL, pictures="frozen"),
    Row("pictures-cp2-mtp1", 2, _CP, mtp=1, draft=_JOINED, pictures="trained", quick=True),
    Row(
        "pictures-cp2-gather-state-full",
        2,
        {**_CP, **_GATHERED, **_BY_STATE},
        trainer=_FULL,
        pictures="trained",
    ),
    Row("pictures-pp2-tied", 2, _PP, model=_TIED, pictures="trained"),
    Row("pictures-pp2-chunks2", 2, _INTERLEAVED, pictures="trained"),
    Row("pictures-pp2-mtp2", 2, _PP, mtp=2, pictures="trained", quick=True),
    Row("pictures-pp2-chunks2-mtp1-tied", 2, _INTERLEAVED, layers=8, mtp=1, model=_TIED, pictures="frozen"),
    Row("pictures-pp2-mtp2-only", 2, _PP, mtp=2, draft={"only": True}, pictures="frozen"),
    Row("pictures-tp2-sp-pp2-mtp1", 4, {**_SP, **_PP}, mtp=1, pictures="trained"),
    Row("pictures-dp2-overlap-both", 2, trainer=_OVERLAP_BOTH, mtp=1, pictures="trained"),
    Row("pictures-moe-ep2", 2, _EP, family="moe", balance=0.01, mtp=1, pictures="trained"),
    Row("pictures-tp2-sp-cp2", 4, {**_SP, **_CP}, mtp=1, draft=_JOINED, pictures="trained"),
    # More tensor-parallel ranks than key/value heads.
    Row("tp2-one-kv-head", 2, _TP, model=_ONE_KV_HEAD, mtp=1, quick=True),
    Row("tp2-sp-one-kv-head-selective", 2, _SP, model=_ONE_KV_HEAD, trainer=_SELECTIVE),
    Row("tp4-sp-two-kv-heads", 4, _TP4_SP, model={"linear_num_key_heads": 4}, mtp=1),
    Row("tp4-sp-one-kv-head", 4, _TP4_SP, model={**_ONE_KV_HEAD, "linear_num_key_heads": 4}, mtp=1),
    # As the published models are cut over a host: four ranks for each of two key/value heads.
    Row("tp8-sp-two-kv-heads", 8, {"tensor": 8, "sequence": True}, model=_EIGHT_HEADS, mtp=1),
    Row("tp2-cp2-one-kv-head-gather", 4, {**_TP, **_CP, **_GATHERED}, model=_ONE_KV_HEAD),
    Row("tp2-cp2-one-kv-head-heads", 4, {**_TP, **_CP, **_BY_HEADS}, model=_ONE_KV_HEAD),
    Row("tp2-cp2-heads-heads-mtp1", 4, {**_TP, **_CP, **_BY_HEADS}, model={"linear_num_key_heads": 4}, mtp=1),
    # Experts: with the balance loss on, over expert ranks, with experts cut by tensor ranks and whole.
    Row(
        "moe-micro-batches",
        1,
        family="moe",
        trainer={"micro_batch_tokens": 16},
        mtp=1,
        balance=0.5,
        quick=True,
    ),
    Row("moe-dp2", 2, family="moe", trainer=_OVERLAP_BOTH, mtp=1, balance=0.5),
    Row("moe-ep2", 2, _EP, family="moe", mtp=1, balance=0.5, quick=True),
    Row("moe-ep2-mtp2-joined-policy", 2, _EP, family="moe", mtp=2, draft=_JOINED, objective="policy"),
    Row("moe-ep2-tied-overlap", 2, _EP, family="moe", model=_TIED, trainer=_OVERLAP_BOTH, balance=0.5),
    Row("moe-tp2-sp", 2, _SP, family="moe", mtp=1, balance=0.5),
    Row("moe-tp2-sp-etp1", 2, {**_SP, "expert_tensor": 1}, family="moe", mtp=1, balance=0.5),
    Row("moe-tp2-sp-ep2-etp1", 2, {**_SP, **_EP, "expert_tensor": 1}, family="moe", mtp=1, balance=0.5),
    Row("moe-pp2", 2, _PP, family="moe", mtp=1, balance=0.5),
    Row("moe-pp2-chunks2-full", 2, _INTERLEAVED, family="moe", trainer=_FULL, balance=0.5),
    Row("moe-cp2-gather", 2, {**_CP, **_GATHERED}, family="moe", mtp=1, balance=0.5),
    Row("moe-cp2-ep2", 2, {**_CP, **_EP}, family="moe", mtp=1, balance=0.5),
    Row("moe-ep2-full-mtp1", 2, _EP, family="moe", trainer=_FULL, mtp=1, balance=0.5),
    Row("moe-ep2-selective-mtp1", 2, _EP, family="moe", trainer=_SELECTIVE, mtp=1, balance=0.5),
    Row("moe-ep2-mtp1-repeated2", 2, _EP, family="moe", mtp=1, draft={"repeated": 2}, balance=0.5),
    Row(
        "moe-tp2-sp-mtp1-repeated3-full",
        2,
        _SP,
        family="moe",
        mtp=1,
        draft={"repeated": 3},
        trainer=_FULL,
        balance=0.5,
    ),
    Row("moe-ep2-256-experts-top8", 2, _EP, family="moe", model=_MANY_EXPERTS, balance=0.5),
    Row("moe-ep2-one-of-4", 2, _EP, family="moe", model={"num_experts_per_tok": 1}, balance=0.5),
    Row("moe-ep4-mtp1", 4, {"expert": 4}, family="moe", mtp=1, balance=0.5),
    Row("moe-ep2-etp2-dp4", 4, {**_EP, "expert_tensor": 2}, family="moe", mtp=1, balance=0.5),
    Row("moe-ep2-cp2-dp2", 4, {**_EP, **_CP}, family="moe", mtp=1, balance=0.5),
    Row("moe-tp2-sp-ep2", 4, {**_SP, **_EP}, family="moe", mtp=1, balance=0.5),
    Row("moe-tp2-sp-ep2-etp1-dp2", 4, {**_SP, **_EP, "expert_tensor": 1}, family="moe", mtp=1, balance=0.5),
    Row("moe-tp2-sp-cp2-ep2-etp1", 4, {**_SP, **_CP, **_EP, "expert_tensor": 1}, family="moe", balance=0.5),
    Row("moe-tp2-sp-pp2-ep2-etp1", 4, {**_SP, **_PP, **_EP, "expert_tensor": 1}, family="moe", balance=0.5),
    Row("moe-pp2-cp2-ep2-mtp1", 4, {**_PP, **_CP, **_EP}, family="moe", mtp=1, balance=0.5),
    Row("moe-pp2-ep2-mtp1-tied", 4, {**_PP, **_EP}, family="moe", mtp=1, balance=0.5, **_TIED_JOINED),
    # Algorithms: any split of a batch, and completions that lie on two ranks.
    *(Row(f"micro-batches-{name}", 1, trainer=_SMALL, objective=name, quick=True) for name in ALGORITHMS),
    *(Row(f"cp2-{name}", 2, _CP, objective=name) for name in ALGORITHMS),
    # Pairs whose members lie on other replicas, and scores that come from the last stage.
    Row("dp2-dpo", 2, objective="dpo"),
    Row("pp2-dpo-mtp1", 2, _PP, mtp=1, objective="dpo"),
    # A mask over the tokens of all replicas.
    Row("dp2-m2po", 2, objective="m2po"),
    Row("micro-batches-value", 1, trainer=_SMALL, objective="value", quick=True),
    Row("cp2-value", 2, _CP, objective="value"),
    Row("tp2-sp-value", 2, _SP, objective="value"),
    Row("pp2-value", 2, _PP, objective="value"),
    Row("dp2-overlap-both-value", 2, trainer=_OVERLAP_BOTH, objective="value"),
    Row("moe-ep2-value", 2, _EP, family="moe", objective="value"),
    # Low-rank adapters on every projection, and nothing else trained.
    Row("micro-batches-lora", 1, trainer=_SMALL, lora=_LORA, quick=True),
    Row("tp2-lora", 2, _TP, lora=_LORA),
    Row("tp2-sp-lora-policy", 2, _SP, lora=_LORA, objective="policy", quick=True),
    Row("tp2-sp-one-kv-head-lora", 2, _SP, model=_ONE_KV_HEAD, lora=_LORA),
    Row("cp2-lora", 2, _CP, lora=_LORA),
    Row("pp2-lora-tied", 2, _PP, model=_TIED, mtp=1, lora=_LORA),
    Row("tp2-sp-lora-drafts", 2, _SP, mtp=2, lora=_LORA_DRAFTS, quick=True),
    Row("pp2-full-lora-drafts", 2, _PP, trainer=_FULL, mtp=1, lora=_LORA_DRAFTS),
    Row("selective-lora-drafts", 1, trainer=_SELECTIVE, mtp=2, lora=_LORA_DRAFTS, quick=True),
    Row("moe-ep2-selective-lora-drafts", 2, _EP, family="moe", trainer=_SELECTIVE, mtp=1, lora=_LORA_DRAFTS),
    Row("dp2-overlap-both-lora", 2, trainer=_OVERLAP_BOTH, lora=_LORA),
    Row("tp2-sp-full-lora", 2, _SP, trainer=_FULL, lora=_LORA),
    Row("tp2-selective-lora", 2, _TP, trainer=_SELECTIVE, lora=_LORA),
    Row("moe-ep2-lora", 2, _EP, family="moe", lora=_LORA_EXPERTS, balance=0.5),
    Row("moe-tp2-sp-ep2-etp1-lora", 2, {**_SP, **_EP, "expert_tensor": 1}, family="moe", lora=_LORA_EXPERTS),
    # Draft layers alone, whose trunk runs without gradients and whose tokens lie on several ranks.
    Row("cp2-state-mtp2-only", 2, {**_CP, **_BY_STATE}, mtp=2, draft={"only": True}),
    Row("moe-cp2-ep2-mtp1-only", 2, {**_CP, **_EP}, family="moe", mtp=1, draft={"only": True}, balance=0.5),
    # Recompute on top.
    Row("tp2-sp-selective-mtp1", 2, _SP, trainer=_SELECTIVE, mtp=1),
    Row("tp2-sp-full-mtp1", 2, _SP, trainer=_FULL, mtp=1),
    Row("pp2-full-mtp2-joined", 2, _PP, trainer=_FULL, mtp=2, draft=_JOINED),
    Row("cp2-full-mtp1", 2, _CP, trainer=_FULL, mtp=1),
    Row("cp2-state-full-mtp1", 2, {**_CP, **_BY_HEADS, **_BY_STATE}, trainer=_FULL, mtp=1),
    Row("cp2-state-selective", 2, {**_CP, **_BY_HEADS, **_BY_STATE}, trainer=_SELECTIVE),
    # Products.
    Row("tp2-sp-cp2-mtp1", 4, {**_SP, **_CP}, mtp=1),
    Row("pp2-cp2-mtp1-tied", 4, {**_PP, **_CP}, mtp=1, **_TIED_JOINED),
    Row("dp2-cp2-mtp1", 4, _CP, trainer=_OVERLAP_BOTH, mtp=1),
    Row("tp2-sp-pp2-mtp1-tied", 4, {**_SP, **_PP}, mtp=1, **_TIED_JOINED),
    # The last stage's copy of the embedding is gathered for the draft layers alone.
    Row("pp2-dp2-overlap-both-mtp1", 4, _PP, trainer=_OVERLAP_BOTH, mtp=1),
    Row("tp2-dp2-overlap", 4, _TP, trainer=_OVERLAP_BOTH, mtp=1),
    Row("tp2-sp-pp2-cp2-mtp1", 8, {**_SP, **_PP, **_CP}, mtp=1),
    Row("pp2-dp2-mtp1-tied", 4, _PP, trainer=_OVERLAP, mtp=1, **_TIED_JOINED),
)
