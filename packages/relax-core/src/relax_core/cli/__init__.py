"""The commands `relax-train` and `relax-report`."""
