"""What a device can do: a small table, each row with its source.

Rates are makers' figures for dense bfloat16; the shares of them that our operators reach were measured on an
H200 (benchmarks/kernels/README.md, benchmarks/plan/README.md) and are taken for the others too, which is said
where a plan uses them.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Shares:
    """Parts of a rate that our operators reach.

    Attributes:
        matmul: of the matrix rate, large products.
        attention: of the matrix rate, flash attention of head dim 256, both passes.
        dense_attention: the same for sequences of one length (cuDNN).
        scan: of the matrix rate, the gated delta rule.
        memory: of the memory's bandwidth, operators that only read and write.
        link: of a link's bandwidth, collectives.
        measured: whether these are measured on this device.
    """

    matmul: float = 0.70
    attention: float = 0.26
    dense_attention: float = 0.42
    scan: float = 0.20
    memory: float = 0.80
    link: float = 0.75
    measured: bool = False


@dataclass(frozen=True)
class DeviceSpec:
    """One device, as `relax-train --plan` reckons with it.

    Attributes:
        name: for `--plan-device`.
        kind: the device of `run.device`.
        memory: bytes that torch sees.
        flops: dense bfloat16 operations per second.
        bandwidth: of its memory, bytes per second.
        link: to another device of the same host, bytes per second each way.
        network: to a device of another host, bytes per second each way.
        per_host: devices of a host.
        outside: bytes that the runtime and the collectives' library take beside torch's allocator.
        shares: what of the rates our operators reach.
        op_seconds: what the host needs to launch one operation of a layer.
        chunk_seconds: of one step in the delta rule's chain of chunks.
        source: of the figures.
        flops_fp32: float32 operations per second, not rounded to TF32, of the same source; None if it gives
            none. Only MFU reads it.
    """

    name: str
    kind: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    per_host: int
    outside: float
    shares: Shares
    op_seconds: float
    chunk_seconds: float
    source: str
    flops_fp32: float | None = None


DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        DeviceSpec(
            "h200", "cuda", 139.8 * GIB, 989.5e12, 4.8e12, 450e9, 50e9, 8, 1.5 * GIB, Shares(measured=True),
            35e-6, 1.3e-6,
            "NVIDIA H200 SXM data sheet (2024): 141 GB HBM3e, 4.8 TB/s, 989 TFLOP/s dense bfloat16, NVLink "
            "900 GB/s both ways; one 400 Gb/s adapter a GPU",
            flops_fp32=67e12,
        ),
        DeviceSpec(
            "h100", "cuda", 79.1 * GIB, 989.5e12, 3.35e12, 450e9, 50e9, 8, 1.5 * GIB, Shares(), 35e-6, 1.3e-6,
            "NVIDIA H100 SXM data sheet (2023): 80 GB HBM3, 3.35 TB/s, 989 TFLOP/s dense bfloat16, NVLink "
            "900 GB/s both ways; one 400 Gb/s adapter a GPU",
            flops_fp32=67e12,
        ),
        DeviceSpec(
            "a100", "cuda", 79.1 * GIB, 312e12, 2.039e12, 300e9, 25e9, 8, 1.5 * GIB, Shares(), 35e-6, 2e-6,
            "NVIDIA A100 80GB SXM data sheet (2021): 80 GB HBM2e, 2,039 GB/s, 312 TFLOP/s dense bfloat16, "
            "NVLink 600 GB/s both ways; one 200 Gb/s adapter a GPU",
            flops_fp32=19.5e12,
        ),
        DeviceSpec(
            "910c-die", "npu", 61.0 * GIB, 376e12, 1.6e12, 196e9, 25e9, 16, 2.0 * GIB, Shares(), 50e-6, 3e-6,
            "Zuo et al. 2025, Serving Large Language Models on Huawei CloudMatrix384, arXiv 2506.12708: a "
            "910C card is two dies of 64 GB, 376 TFLOP/s dense bfloat16 and 1.6 TB/s each, 196 GB/s over UB "
            "and 200 Gb/s over RDMA a die",
        ),
    )
}  # fmt: skip
DEFAULTS = {"cuda": "h200", "npu": "910c-die", "auto": "h200"}
"""The device a plan takes for `run.device`; that of auto stands in for a CPU, whose speed is not tabled."""


def device_spec(name: str) -> DeviceSpec:
    """A device of the table.

    Raises:
        ValueError: it has no such device; the text lists those it has.
    """
    if name not in DEVICES:
        raise ValueError(f"there is no device {name!r} in the plan's table: it has {', '.join(DEVICES)}")
    return DEVICES[name]
