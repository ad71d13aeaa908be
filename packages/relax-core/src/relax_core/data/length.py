"""What happens to examples above the longest length accepted."""

from typing import Literal

from relax_core.data.problems import RowError


class LengthRule:
    """Accepts, cuts, leaves out or refuses an example by its number of tokens.

    Attributes:
        left_out: examples left out so far.
        cut: examples cut so far.
    """

    def __init__(self, max_tokens: int | None, overlong: Literal["refuse", "skip", "truncate"]) -> None:
        self._max_tokens = max_tokens
        self._overlong = overlong
        self.left_out = 0
        self.cut = 0

    def fit(self, tokens: int, *, keep: Literal["start", "end"]) -> slice | None:
        """The part of an example that is kept, or None if it is left out.

        Raises:
            RowError: the example is too long and that is refused.
        """
        if self._max_tokens is None or tokens <= self._max_tokens:
            return slice(None)
        if self._overlong == "skip":
            self.left_out += 1
            return None
        if self._overlong == "truncate":
            self.cut += 1
            return slice(self._max_tokens) if keep == "start" else slice(-self._max_tokens, None)
        raise RowError(
            f"{tokens} tokens, above data.max_tokens = {self._max_tokens}; data.overlong can skip or cut it"
        )
