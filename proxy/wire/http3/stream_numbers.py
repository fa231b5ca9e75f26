"""Which of a client's requests have come: a stream may overtake another one on its way."""


class StreamNumbers:
    """The numbers of a client's requests: 0, 4, 8, ..

    Attributes:
        end: The first one above all that came.
    """

    __slots__ = ("_overtaken", "end")

    def __init__(self) -> None:
        self.end = 0
        self._overtaken: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether all below `end` came."""
        return not self._overtaken

    def is_to_come(self, number: int) -> bool:
        """Return whether a stream has not come yet."""
        return number >= self.end or number in self._overtaken

    def come(self, number: int) -> bool:
        """Note that a stream came; return whether it is the first time."""
        if number >= self.end:
            # No more than may be open at a time: the connection sees to that.
            self._overtaken.update(range(self.end, number, 4))
            self.end = number + 4
            return True
        if number in self._overtaken:
            self._overtaken.discard(number)
            return True
        return False
