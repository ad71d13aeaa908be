"""Runs one SGLang server with Relax's plugin: ``python -m relax_rollout.engines.sglang.serve ARGUMENTS``.

The arguments are those of SGLang's own server. It ends when the process that started it ends.
"""

import argparse
import os
import sys
from importlib.metadata import entry_points
from typing import Any

from relax_rollout.engines.sglang import plugin
from relax_rollout.engines.sglang.parent import end_with_parent


def main() -> None:
    """Parse, start, serve; ends with a text if SGLang is not what the plugin is for."""
    end_with_parent()
    os.environ[plugin.SERVER] = "1"

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    _require_plugins()
    load_plugins()
    missing = plugin.missing_hooks()
    if missing:
        sys.exit(f"Relax's plugin does not fit this SGLang; not hooked: {', '.join(missing)}")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments: Any = parser.parse_args()
    if os.environ.get(plugin.TEXT_ONLY) == "1":
        arguments.enable_multimodal = False
    launch_server(ServerArgs.from_cli_args(arguments))


def _require_plugins() -> None:
    """Ends with a text if a plugin that was named is not there: SGLang passes over it without a word."""
    installed = {entry.name: entry for entry in entry_points(group="sglang.srt.plugins")}
    for name in filter(None, os.environ.get("SGLANG_PLUGINS", "").split(",")):
        if name not in installed:
            sys.exit(f"SGLang's plugin {name} is not installed; there are: {', '.join(sorted(installed))}")
        # SGLang would only log what goes wrong here.
        installed[name].load()


if __name__ == "__main__":
    main()
