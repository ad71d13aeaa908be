"""Python's garbage collector during the start of a run.

Start-up makes some hundred thousand objects (torch, megatron-core, transformers, the data), and nearly all of
them stay. Searching them for garbage over and over takes a sixth of the start-up, so it is put off until
the first step; and from then on they are left out of every search.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_paused = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """Nothing is collected from here until `resume_collection`, or until the `with` block ends.

    Does nothing where collection is off already: whoever turned it off decides.
    """
    global _paused
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _paused = True
    try:
        yield
    finally:
        resume_collection()
        gc.unfreeze()


def resume_collection() -> None:
    """Ends the pause, if there is one: collects again, but never among the objects made so far."""
    global _paused
    if _paused:
        _paused = False
        gc.freeze()
        gc.enable()
