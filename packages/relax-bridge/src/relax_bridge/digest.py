"""A short fingerprint of a tensor's bytes."""

import hashlib

from torch import Tensor

from relax_bridge.safetensors_writer import raw


def digest(x: Tensor) -> str:
    """The first 16 hexadecimal digits of SHA-256 over the tensor's bytes, row-major."""
    return hashlib.sha256(raw(x)).hexdigest()[:16]
