"""SGLang on the NPU: corrections for 0.5.15 as objects of ours; no source is patched.

`install()` runs in the engine's process before its workers are imported. Each correction knows the exact
version and interface that it was made for and refuses to start on another one. The arguments and the
environment of a server are `relax_npu.engine`'s.
"""

from relax_npu.sglang.plugins import PLUGINS, install
from relax_npu.sglang.weights import refresh_derived_weights

__all__ = ["PLUGINS", "install", "refresh_derived_weights"]
