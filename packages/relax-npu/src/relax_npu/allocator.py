"""Settings of torch_npu's memory allocator: those it does not have, and those that exclude one another."""

from collections.abc import Callable

VARIABLE = "PYTORCH_NPU_ALLOC_CONF"
_EXPANDABLE = "expandable_segments"
_EXCLUDED_BY_EXPANDABLE = ("max_split_size_mb", "garbage_collection_threshold")


def _flag(text: str) -> bool:
    return text in ("True", "False")


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _share(text: str) -> bool:
    try:
        return 0 < float(text) < 1
    except ValueError:
        return False


def _any(text: str) -> bool:
    return bool(text)


_KEYS: dict[str, tuple[Callable[[str], bool], str]] = {
    _EXPANDABLE: (_flag, "True or False"),
    "max_split_size_mb": (_number, "a whole number"),
    "garbage_collection_threshold": (_share, "a number between 0 and 1"),
    "base_addr_aligned_kb": (_number, "a whole number"),
    "segment_size_mb": (_number, "a whole number"),
    "multi_stream_lazy_reclaim": (_flag, "True or False"),
    "pin_memory_expandable_segments": (_flag, "True or False"),
    "page_size": (_any, "a size"),
    "roundup_power2_divisions": (_any, "divisions"),
}
"""The keys that torch_npu 2.9.0.post4 reads."""


def allocator_problems(text: str, *, shares_memory: bool = False) -> list[str]:
    """What is wrong with a value of PYTORCH_NPU_ALLOC_CONF; each with its remedy behind a semicolon.

    Args:
        text: the variable's value, "" when it is not set.
        shares_memory: whether two processes take turns on a die's memory (trainer and engine on one die): the
            memory that one gives back then has to leave its process, which expandable segments prevent.
    """
    pairs = [part.partition(":") for part in text.split(",") if part.strip()]
    found = [f"{key!r} has no value; write {key}:<value>" for key, colon, _ in pairs if not colon]
    settings = {key.strip(): value.strip() for key, colon, value in pairs if colon}
    for key, value in settings.items():
        if key not in _KEYS:
            found.append(f"{key!r} is no key of torch_npu's; take one of {', '.join(_KEYS)}")
        elif not _KEYS[key][0](value):
            found.append(f"{key}:{value} is not {_KEYS[key][1]}; write {key}:<{_KEYS[key][1]}>")
    if settings.get(_EXPANDABLE) == "True":
        found += [
            f"{key} and {_EXPANDABLE}:True exclude one another; drop {key} or set {_EXPANDABLE}:False"
            for key in _EXCLUDED_BY_EXPANDABLE
            if key in settings
        ]
    if shares_memory and settings.get(_EXPANDABLE) != "False":
        found.append(f"a die shared by two processes needs {_EXPANDABLE}:False, set and not merely left out")
    return found
