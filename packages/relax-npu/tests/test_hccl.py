"""HCCL's port ranges."""

import pytest
from relax_npu import PortRangeError, hccl_environment, parse_ports


@pytest.mark.parametrize(
    ("text", "ranges"),
    [("auto", None), ("50000", ((50000, 50000),)), ("50000-50031,50100", ((50000, 50031), (50100, 50100)))],
)
def test_ranges(text: str, ranges: tuple[tuple[int, int], ...] | None) -> None:
    assert parse_ports(text) == ranges


@pytest.mark.parametrize("text", ["", "a", "1-", "-5", "9-8", "0-5", "65536", "1,,2", "1 - 2", "AUTO"])
def test_malformed_ranges(text: str) -> None:
    with pytest.raises(PortRangeError):
        parse_ports(text)


def test_one_process_per_die_needs_nothing() -> None:
    assert hccl_environment(1) == {}


def test_processes_that_share_a_die_get_both_ranges() -> None:
    names = {"HCCL_NPU_SOCKET_PORT_RANGE", "HCCL_HOST_SOCKET_PORT_RANGE"}
    assert hccl_environment(2) == dict.fromkeys(names, "auto")
    assert hccl_environment(2, device_ports="16666-16667")["HCCL_NPU_SOCKET_PORT_RANGE"] == "16666-16667"
    assert set(hccl_environment(1, host_ports="60000-60015")) == names


def test_too_few_ports() -> None:
    with pytest.raises(PortRangeError, match="has 2 ports for 3 processes"):
        hccl_environment(3, host_ports="60000-60001,60001")


def test_a_die_without_a_process() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        hccl_environment(0)
