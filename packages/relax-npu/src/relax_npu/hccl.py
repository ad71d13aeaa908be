"""HCCL, the collectives of Ascend: its name in torch.distributed and the ports that its processes listen on.

Without a range HCCL binds fixed ports. Two processes on one die (a trainer and an engine that share it) then
collide, so both ranges have to be set, alike on every rank of a communicator.
"""

import re

BACKEND = "hccl"
DEVICE_PORTS = "HCCL_NPU_SOCKET_PORT_RANGE"
HOST_PORTS = "HCCL_HOST_SOCKET_PORT_RANGE"
HOST_BASE_PORT = "HCCL_IF_BASE_PORT"
AUTO = "auto"
_HIGHEST_PORT = 65535
_PORT = re.compile(r"[0-9]{1,9}")

Ranges = tuple[tuple[int, int], ...]


class PortRangeError(ValueError):
    """A port range that HCCL cannot use."""


def parse_ports(text: str) -> Ranges | None:
    """Reads a port range variable of HCCL.

    Args:
        text: "auto", or ports and ranges joined by commas: "50000-50031,50100".

    Returns:
        The first and last port of each range, or None for "auto" (the system chooses free ones).

    Raises:
        PortRangeError: with the part that is wrong.
    """
    if text == AUTO:
        return None
    ranges = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        numbers = (first, last if dash else first)
        if not all(_PORT.fullmatch(number) for number in numbers):
            raise PortRangeError(
                f"{part!r} in {text!r} is no port range; allowed: auto, or for instance 50000-50031,50100"
            )
        low, high = int(numbers[0]), int(numbers[1])
        if not 1 <= low <= high <= _HIGHEST_PORT:
            raise PortRangeError(
                f"{part!r} in {text!r}: ports are 1 to {_HIGHEST_PORT}, the smaller one first"
            )
        ranges.append((low, high))
    return tuple(ranges)


def hccl_environment(
    processes_per_die: int, *, device_ports: str = AUTO, host_ports: str = AUTO
) -> dict[str, str]:
    """The environment that every rank of a communicator needs before its first collective.

    Args:
        processes_per_die: how many processes use one die at a time (2 when trainer and engine share it).
        device_ports: range for the die's own network, see `parse_ports`.
        host_ports: range for the host's sockets.

    Returns:
        Nothing for one process per die, for HCCL's defaults do then; both ranges otherwise.

    Raises:
        PortRangeError: a range is malformed, or has fewer ports than processes.
        ValueError: `processes_per_die` is below 1.
    """
    if processes_per_die < 1:
        raise ValueError(f"processes_per_die={processes_per_die}: a die has at least 1 process")
    if processes_per_die == 1 and device_ports == host_ports == AUTO:
        return {}
    for variable, text in ((DEVICE_PORTS, device_ports), (HOST_PORTS, host_ports)):
        ranges = parse_ports(text)
        if ranges is not None and (count := port_count(ranges)) < processes_per_die:
            raise PortRangeError(
                f"{variable}={text} has {count} ports for {processes_per_die} processes on a die; "
                "widen it or use auto"
            )
    return {DEVICE_PORTS: device_ports, HOST_PORTS: host_ports}


def port_count(ranges: Ranges) -> int:
    """How many different ports the ranges hold."""
    return len({port for low, high in ranges for port in range(low, high + 1)})
