"""The `triton` backend: kernels for CUDA devices, and torch's own where those are best."""

from relax_kernels.triton_backend.backend import TritonBackend, create

__all__ = ["TritonBackend", "create"]
