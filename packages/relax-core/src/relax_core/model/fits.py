"""What sizes of the parallel axes a model can be spread over. Modules and rules of settings ask the same
functions; nothing here imports torch."""

from relax_core.model.config import Qwen35Config
from relax_core.model.context.choose import choose_attention, choose_delta


def ranks_per_kv_head(model: Qwen35Config, ranks: int) -> int:
    """Tensor-parallel ranks that share one key/value head of full attention.

    Raises:
        ValueError: the heads cannot be spread over so many ranks.
    """
    spread = (model.kv_heads % ranks == 0 and model.attention_heads % ranks == 0) or (
        ranks % model.kv_heads == 0
        and model.attention_heads % ranks == 0
        and model.head_dim % (ranks // model.kv_heads) == 0
    )
    if not spread:
        raise ValueError(
            f"{model.attention_heads} query and {model.kv_heads} key/value heads of {model.head_dim} features"
            f" do not spread over {ranks} tensor-parallel ranks; choose a tensor size that divides "
            f"{model.kv_heads}, or a multiple of {model.kv_heads} that divides {model.attention_heads}"
        )
    return max(1, ranks // model.kv_heads)


def check_delta_heads(model: Qwen35Config, ranks: int) -> None:
    """Raises ValueError: the delta net's heads cannot be spread over `ranks` tensor-parallel ranks."""
    if model.delta_key_heads % ranks:
        raise ValueError(
            f"{model.delta_key_heads} key heads of the delta net cannot be split over {ranks} "
            f"tensor-parallel ranks; choose a tensor size that divides {model.delta_key_heads}"
        )


def check_widths(model: Qwen35Config, ranks: int) -> None:
    """Raises ValueError: features or vocabulary cannot be spread over `ranks` tensor-parallel ranks."""
    widths = {
        "features of the hidden states": model.hidden_size,
        "vocabulary entries": model.vocab_size,
        "features of the feed-forward": model.shared_ffn_size if model.experts else model.ffn_size,
    }
    for what, width in widths.items():
        if width % ranks:
            raise ValueError(
                f"{width} {what} cannot be split over {ranks} tensor-parallel ranks; choose a tensor size "
                f"that divides {width}"
            )


def check_experts(experts: int, places: int) -> None:
    """Raises ValueError: the experts cannot be spread over `places` expert-parallel ranks."""
    if experts % places:
        raise ValueError(
            f"{experts} experts cannot be split over {places} expert-parallel ranks; choose an expert size "
            f"that divides {experts}"
        )


def check_expert_features(ffn: int, shares: int) -> None:
    """Raises ValueError: an expert's features cannot be spread over `shares` ranks."""
    if ffn % shares:
        raise ValueError(
            f"an expert's {ffn} features cannot be split over {shares} ranks; choose an expert_tensor size "
            f"that divides {ffn}"
        )


def check_routing(tensor: int, *, sequence: bool) -> None:
    """Raises ValueError: tensor-parallel ranks would route the same tokens."""
    if tensor > 1 and not sequence:
        raise ValueError(
            f"experts under tensor {tensor} need parallel.sequence true, so that each rank routes tokens of "
            "its own; set it, or use tensor 1"
        )


def check_attention_exchange(model: Qwen35Config, tensor: int, context: int) -> None:
    """Raises ValueError: full attention cannot exchange tokens for heads over `context` ranks."""
    choose_attention("heads", heads=model.attention_heads, tensor=tensor, context=context)


def check_delta_exchange(model: Qwen35Config, tensor: int, context: int) -> None:
    """Raises ValueError: the delta net cannot exchange tokens for heads over `context` ranks."""
    choose_delta(
        "heads",
        key_heads=model.delta_key_heads,
        value_heads=model.delta_value_heads,
        tensor=tensor,
        context=context,
    )
