"""Secrets stay out of every file and log line: values of key-like environment variables are masked."""

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

_NAME = re.compile(r"(_|^)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_SHORTEST = 6
MASK = "***"


class Masker:
    """Replaces secrets in text by `***`.

    A secret is the value of an environment variable whose name ends in KEY, TOKEN, SECRET, PASSWORD or
    CREDENTIALS, if it has at least 6 characters (shorter ones would blank out ordinary words).
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        env = os.environ if environment is None else environment
        values = [value for name, value in env.items() if _NAME.search(name) and len(value) >= _SHORTEST]
        self._pattern = _alternatives(values)

    def __call__(self, text: str) -> str:
        """`text` without secrets; their form inside JSON text is found as well."""
        return self._pattern.sub(MASK, text) if self._pattern else text

    def tree(self, value: Any) -> Any:
        """Plain data with every text in it masked; numbers stay, so that JSON made of it stays JSON."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {self.tree(key): self.tree(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(inner) for inner in value]
        return value


def _alternatives(values: Iterable[str]) -> re.Pattern[str] | None:
    forms = {form for value in values for form in (value, json.dumps(value)[1:-1])}
    if not forms:
        return None
    # The longest first: a secret that begins another one must not leave its rest behind.
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))))


class MaskingFormatter(logging.Formatter):
    """A log formatter whose finished line, with arguments and traceback, is masked."""

    def __init__(self, masker: Masker, pattern: str) -> None:
        super().__init__(pattern)
        self._mask = masker

    def format(self, record: logging.LogRecord) -> str:
        """The line, masked."""
        return self._mask(super().format(record))
