"""Text that an engine says again, and that the client has."""


class RepeatedText:
    """What comes first in an answer, and is left out.

    Attributes:
        left: What of it has yet to come.
    """

    __slots__ = ("left",)

    def __init__(self, text: str = "") -> None:
        self.left = text

    def trim(self, text: str) -> str | None:
        """Return what of the next text is new; None if it is not what the client has."""
        both = min(len(text), len(self.left))
        if text[:both] != self.left[:both]:
            return None
        self.left = self.left[both:]
        return text[both:]
