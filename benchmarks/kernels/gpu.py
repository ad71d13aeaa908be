"""Speed of the triton backend on one CUDA device: one JSON line a case.

    python benchmarks/kernels/gpu.py [--only SUBSTRING] [--profile]

Each call is first compared, values and gradients, with the torch backend in float32 on the same inputs; a
case whose parity fails prints no time and makes the exit status 1. Times are medians over CUDA events.
`ms` is the
time of the call as a caller sees it, `kernels_ms` what the device spent in it: where they differ, the
host was too slow to keep the device busy at this size. `floor_ms` is the larger of bytes over the copy
bandwidth and operations over the matrix rate, both measured in this run; `of_floor` is floor_ms / kernels_ms,
so 1 is as fast as the card. `extra_gib` is the peak of a forward and backward pass beyond the inputs and
their gradients. `peers` are compared with the same reference and timed in the same run where installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from gpu_cases import Case, Peer, cases
from triton.testing import do_bench


def milliseconds(call: Callable[[], object], repeat: int = 150) -> float:
    return float(do_bench(call, warmup=30, rep=repeat, return_mode="median"))


def ceilings() -> tuple[float, float]:
    """Return bytes per ms of a copy (read and written) and operations per ms of a bfloat16 product."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 4 * source.numel() / milliseconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return copy, 2 * 8192**3 / milliseconds(lambda: a @ b)


def leaves(case: Case, inputs: tuple[Any, ...], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Return the inputs as leaves that want gradients where they are floats."""
    return tuple(
        x.detach().to(dtype or x.dtype).requires_grad_(case.backward)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in inputs
    )


def wanted(inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    return [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]


def gradients(outputs: tuple[torch.Tensor, ...], given: list[torch.Tensor], weights: list[torch.Tensor]):
    """Backpropagate the outputs that depend on the given leaves."""
    pairs = [(x, weight) for x, weight in zip(outputs, weights, strict=True) if x.requires_grad]
    return torch.autograd.grad([x for x, _ in pairs], given, [weight for _, weight in pairs])


def reference(case: Case, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return results and gradients of the torch backend in float32."""
    return results(case, lambda given: case.run("torch", given), leaves(case, inputs, torch.float32))


def results(case: Case, call: Callable[..., Any], given: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return results and gradients of a call; the outputs' gradients are the same numbers for every call."""
    outputs = call(given)
    generator = torch.Generator("cuda").manual_seed(9)
    weights = [torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype) for x in outputs]
    grads = gradients(outputs, wanted(given), weights) if case.backward else ()
    return [x.detach() for x in (*outputs, *grads)]


def differences(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """Return each result's largest difference as a fraction of the expected one's largest value."""
    found = []
    for mine, other in zip(actual, expected, strict=True):
        scale = max(other.float().abs().max().item(), 1e-3)
        difference = (mine.float() - other.float()).abs().max().item() / scale
        found.append(float(f"{difference:.2g}") if difference == difference else float("inf"))
    return found


def measure(case: Case, copy: float, matrix: float, profile: bool) -> bool:
    inputs = case.inputs()
    expected = reference(case, inputs)
    found = differences(
        results(case, lambda given: case.run("triton", given), leaves(case, inputs, None)), expected
    )
    line: dict[str, object] = {"case": case.name, "errors": found}
    peers = {name: peer_times(case, peer, inputs, expected) for name, peer in case.peers.items()}
    del expected
    torch.cuda.empty_cache()
    if max(found) > case.allowed:
        print(json.dumps({**line, "parity": f"failed: more than {case.allowed}"}), flush=True)
        return False
    given = leaves(case, inputs, None)
    with torch.no_grad():
        weights = [torch.randn_like(x, dtype=torch.float32).to(x.dtype) for x in case.run("triton", given)]

    def forward() -> None:
        with torch.no_grad():
            case.run("triton", given)

    def both() -> None:
        gradients(case.run("triton", given), wanted(given), weights)

    passes = [("forward", forward, case.forward_bytes, case.forward_flops)]
    if case.backward:
        passes.append(("both", both, case.both_bytes, case.both_flops))
        both()
        size = sum(x.numel() * x.element_size() for x in wanted(given))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        line["extra_gib"] = round((torch.cuda.max_memory_allocated() - before - size) / 2**30, 3)
    for name, call, size, flops in passes:
        time, floor, kernels = milliseconds(call), max(size / copy, flops / matrix), kernel_times(call)
        busy = sum(kernels.values())
        line |= {f"{name}_ms": round(time, 4), f"{name}_kernels_ms": round(busy, 4)}
        line |= {f"{name}_floor_ms": round(floor, 4), f"{name}_of_floor": round(floor / busy, 3)}
    print(json.dumps(line | ({"peers": peers} if peers else {})), flush=True)
    if profile:
        for kernel, spent in sorted(kernels.items(), key=lambda pair: -pair[1])[:8]:
            print(f"    {spent:8.4f} ms  {kernel[:90]}", flush=True)
    return True


def peer_times(
    case: Case, peer: Peer, inputs: tuple[Any, ...], expected: list[torch.Tensor]
) -> dict[str, object]:
    """Return a peer's differences from the reference and its times, or why there are none."""
    given = leaves(case, inputs, None)
    try:
        found = differences(results(case, lambda given: (peer(*given),), given), expected)
    except (ImportError, RuntimeError) as error:
        return {"none": f"{type(error).__name__}: {error}"[:200]}
    weight = torch.randn_like(expected[0], dtype=torch.float32).to(inputs[0].dtype)

    def forward() -> None:
        with torch.no_grad():
            peer(*given)

    def both() -> None:
        torch.autograd.grad(peer(*given), wanted(given), weight)

    times = {"forward": milliseconds(forward), "both": milliseconds(both)}
    times |= {
        f"{name}_kernels": sum(kernel_times(call).values())
        for name, call in (("forward", forward), ("both", both))
    }
    return {"errors": found, **{f"{name}_ms": round(time, 4) for name, time in times.items()}}


def kernel_times(call: Callable[[], object], repeat: int = 5) -> dict[str, float]:
    """Return the milliseconds that one call spends in each kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(repeat):
            call()
        torch.cuda.synchronize()
    spent = {event.key: event.self_device_time_total / 1000 / repeat for event in recorded.key_averages()}
    return {name: time for name, time in spent.items() if time}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--profile", action="store_true", help="list each case's kernels")
    options = parser.parse_args()
    copy, matrix = ceilings()
    card = torch.cuda.get_device_name()
    measured = {
        "card": card,
        "torch": torch.__version__,
        "copy_gb_s": round(copy / 1e6),
        "tflops": round(matrix / 1e9),
    }
    print(json.dumps(measured), flush=True)
    good = [measure(case, copy, matrix, options.profile) for case in cases() if options.only in case.name]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
