"""The subcommands of `relax-bridge`, one file each: `add` declares it, `run` does it and returns the exit
status."""
