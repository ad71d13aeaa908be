"""The entry point `sglang.srt.plugins`: `relax_npu`, which SGLang calls in every process of a server.

It acts only where SGLANG_PLUGINS names it, as Relax does for servers on the NPU: other servers of a machine
with relax-npu are left alone.
"""

import os

NAME = "relax_npu"
CHOSEN = "SGLANG_PLUGINS"


def register() -> None:
    """Corrects SGLang in this process.

    Raises:
        SystemExit: a correction does not fit this SGLang. SGLang only logs what a plugin raises as an
            exception, and would serve without the corrections.
    """
    if NAME not in {name.strip() for name in os.environ.get(CHOSEN, "").split(",")}:
        return
    from relax_npu.sglang.plugins import install
    from relax_npu.upstream.fix import FixMismatchError

    try:
        install()
    except FixMismatchError as error:
        raise SystemExit(f"relax-npu does not fit this SGLang: {error}") from error
