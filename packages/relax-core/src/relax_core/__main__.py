"""`python -m relax_core` is `relax-train`: for launchers that start modules."""

import sys

from relax_core.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
