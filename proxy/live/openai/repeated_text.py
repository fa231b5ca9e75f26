"""What an engine says again, and the client has."""

from msgspec import Struct


class RepeatedText(Struct, eq=False):
    """What comes first in an answer, and is left out.

    Attributes:
        left: What of the text has yet to come.
        tokens: Of how many tokens the log-probabilities have.
    """

    left: str = ""
    tokens: int = 0

    @property
    def over(self) -> bool:
        """Whether all of it has come."""
        return not self.left and not self.tokens

    def trim(self, text: str) -> str | None:
        """Return what of the next text is new; None if it is not what the client has."""
        both = min(len(text), len(self.left))
        if text[:both] != self.left[:both]:
            return None
        self.left = self.left[both:]
        return text[both:]
