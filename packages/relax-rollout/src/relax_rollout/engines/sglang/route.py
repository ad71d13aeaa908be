"""Runs sglang-router: ``python -m relax_rollout.engines.sglang.route ARGUMENTS``.

The arguments are the router's own. Its own launcher imports SGLang and torch first, which takes most of its
start. It ends when the process that started it ends.
"""

import argparse

from relax_rollout.engines.sglang.parent import end_with_parent


def main() -> None:
    """Parse, start, route."""
    end_with_parent()
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    Router.from_args(RouterArgs.from_cli_args(parser.parse_args())).start()


if __name__ == "__main__":
    main()
