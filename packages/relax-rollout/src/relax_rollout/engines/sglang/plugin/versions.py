"""Which version of the weights drew each token: it travels with the tokens to the client."""

from typing import Any

KEY = "relax_versions"

serving = 0
"""Version of the weights of this process."""


def stamp(request: Any) -> None:
    """Note the serving version for the tokens drawn since the last stamp."""
    if request.customized_info is None:
        request.customized_info = {}
    noted = request.customized_info.setdefault(KEY, [])
    noted.extend([serving] * (len(request.output_ids) - len(noted)))


def around_accept(original: Any, accumulator: Any, *, req: Any) -> None:
    """Before SGLang collects what goes to the client."""
    stamp(req)
    original(accumulator, req=req)
