"""Faults of other projects that training on an NPU meets, corrected at run time; no source is patched."""
