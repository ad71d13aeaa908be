"""The rules of PYTORCH_NPU_ALLOC_CONF that torch_npu or a shared die break on."""

VARIABLE = "PYTORCH_NPU_ALLOC_CONF"
_EXPANDABLE = "expandable_segments"
_EXCLUDED_BY_EXPANDABLE = ("max_split_size_mb", "garbage_collection_threshold")


def allocator_problems(text: str, *, shares_memory: bool = False) -> list[str]:
    """What is wrong with a value of PYTORCH_NPU_ALLOC_CONF, one sentence each with the remedy.

    Args:
        text: the variable's value, `key:value` pairs joined by commas; "" when it is not set.
        shares_memory: the process gives its memory back while another one uses the die (colocated training
            and sampling); segments must then be set not expandable, for leaving the key out is not enough.
    """
    pairs = [part.partition(":") for part in text.split(",") if part.strip()]
    found = [f"{key!r} has no value; write {key}:<value>" for key, colon, _ in pairs if not colon]
    settings = {key.strip(): value.strip() for key, colon, value in pairs if colon}
    expandable = settings.get(_EXPANDABLE, "").lower() == "true"
    if expandable:
        found += [
            f"{key} and {_EXPANDABLE}:True exclude one another; drop {key} or set {_EXPANDABLE}:False"
            for key in _EXCLUDED_BY_EXPANDABLE
            if key in settings
        ]
    if shares_memory and settings.get(_EXPANDABLE, "").lower() != "false":
        found.append(f"a die shared by two processes needs {_EXPANDABLE}:False, set and not merely left out")
    return found
