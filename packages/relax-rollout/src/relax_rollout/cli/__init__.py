"""The ``relax-rollout`` command."""
