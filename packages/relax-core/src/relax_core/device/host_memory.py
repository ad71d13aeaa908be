"""Memory of this process and of the host, in bytes."""

import resource

import psutil


def resident_bytes() -> int:
    """The resident set of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_bytes() -> tuple[int, int]:
    """What the host has available, and in total."""
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)
