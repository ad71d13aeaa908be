"""Which NPUs a process may use: the rules of ASCEND_RT_VISIBLE_DEVICES, and physical against logical ids."""

import re
from collections.abc import Iterable, Sequence

VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
_ID = re.compile(r"0|[1-9][0-9]{0,5}")
_NUMBER = re.compile(r"[0-9]{1,6}")
_RULE = "plain ids, ascending, each once, joined by commas without spaces, for instance 0,2,3"


class VisibleDevicesError(ValueError):
    """A list of device ids that CANN would not take as it was meant."""


def parse_visible(text: str) -> tuple[int, ...]:
    """Reads a value of ASCEND_RT_VISIBLE_DEVICES and refuses what CANN takes another way than it reads.

    CANN reports no error for a list that breaks its rules: it stops at the first token that it cannot use, or
    sees no device at all (a list such as "1,0"). So a value with a mistake is an error here.

    Args:
        text: the variable's value. "" hides every device.

    Returns:
        The physical ids, ascending.

    Raises:
        VisibleDevicesError: with the value that was probably meant.
    """
    if text == "":
        return ()
    tokens = text.split(",")
    ids: list[int] = []
    for token in tokens:
        if not _ID.fullmatch(token):
            raise _refused(text, f"{token!r} is not a device id", tokens)
        ids.append(int(token))
    if len(set(ids)) != len(ids):
        raise _refused(text, "an id is there twice", tokens)
    if ids != sorted(ids):
        raise _refused(text, "the ids do not ascend", tokens)
    return tuple(ids)


def format_visible(ids: Iterable[int]) -> str:
    """Writes ids the way that CANN accepts them: ascending, without spaces.

    Schedulers hand ids out in any order (Ray: in that of allocation), hence the sorting.

    Raises:
        VisibleDevicesError: a negative id, or one that is there twice.
    """
    given = list(ids)
    if any(number < 0 for number in given) or len(set(given)) != len(given):
        raise VisibleDevicesError(f"cannot make {VARIABLE} of {given}: ids are 0 or greater, each once")
    return ",".join(str(number) for number in sorted(given))


def logical_index(physical: int, visible: Sequence[int]) -> int:
    """The index that torch_npu gives to a physical device: its place among the visible ones.

    Args:
        physical: the id on the host, as /dev/davinci<id>.
        visible: the physical ids that the process sees, ascending.

    Raises:
        VisibleDevicesError: the process does not see that device.
    """
    if physical not in visible:
        raise VisibleDevicesError(
            f"NPU {physical} is not visible to this process, which sees {list(visible)}; add it to {VARIABLE}"
        )
    return list(visible).index(physical)


def _refused(text: str, why: str, tokens: Sequence[str]) -> VisibleDevicesError:
    numbers = sorted({int(token) for token in map(str.strip, tokens) if _NUMBER.fullmatch(token)})
    meant = f"; set {VARIABLE}={','.join(map(str, numbers))}" if numbers else ""
    return VisibleDevicesError(f"{VARIABLE}={text!r}: {why}. Allowed: {_RULE}{meant}")
