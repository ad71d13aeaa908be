"""What this package raises."""

from __future__ import annotations


class InvalidInput(ValueError):
    """An operator was called with a shape, dtype, device or length that it does not take."""


class NoBackend(ValueError):
    """No backend, or not the one asked for, serves a call; the message says why each one does not."""


class BackendUnavailable(Exception):
    """Raised by a backend's factory when what it stands on is not installed or not usable here."""
