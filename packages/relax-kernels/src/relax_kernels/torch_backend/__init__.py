"""The `torch` backend: plain torch, any device, any float dtype; the reference for every other backend."""

from relax_kernels.torch_backend.backend import TorchBackend


def create() -> TorchBackend:
    """Entry point of the registry."""
    return TorchBackend()
