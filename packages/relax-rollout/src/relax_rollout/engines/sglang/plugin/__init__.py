"""Relax's plugin of SGLang (entry point ``sglang.srt.plugins``): runs in every process of a server.

It does nothing in servers that Relax did not start. SGLang only logs when a plugin fails, so the server's
start (``relax_rollout.engines.sglang.serve``) asks :func:`missing_hooks` and ends if there is any.
"""

import os

SERVER = "RELAX_SGLANG_SERVER"
TEXT_ONLY = "RELAX_SGLANG_TEXT_ONLY"
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"


def register() -> None:
    """Called by SGLang when a process starts."""
    if os.environ.get(SERVER) != "1":
        return
    from relax_rollout.engines.sglang.plugin import hooks

    hooks.register(text_only=os.environ.get(TEXT_ONLY) == "1")
    if os.environ.get(CPU_ENGINE) == "1":
        from relax_rollout.engines.sglang.cpu import hooks as cpu_hooks

        cpu_hooks.register()


def missing_hooks() -> list[str]:
    """What should be hooked in this process and is not."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = set(HookRegistry._hooks)
    return sorted(targets - HookRegistry._patched) if targets else ["every hook of Relax's plugin"]
