"""`python -m relax_bridge`: the command `relax-bridge`."""

from relax_bridge.cli import main

raise SystemExit(main())
