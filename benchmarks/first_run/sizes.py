"""The batch of `step.py`; both environments read it."""

PROMPTS = 32
SAMPLES = 8
MAX_NEW_TOKENS = 6
