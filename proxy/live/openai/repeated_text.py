"""What an engine says again, and the client has."""


class RepeatedText:
    """What comes first in an answer, and is left out.

    Attributes:
        left: What of the text has yet to come.
        tokens: Of how many tokens the log-probabilities have.
    """

    __slots__ = ("left", "tokens")

    def __init__(self, text: str = "", tokens: int = 0) -> None:
        self.left = text
        self.tokens = tokens

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
