"""What a relay has asked the scheduler process, and has no answer to yet."""

from collections.abc import Callable
from typing import Any

from balanceroute.proxy.live.processes import from_relay


class Questions:
    """Numbers questions, and finds those who asked."""

    def __init__(self, send: Callable[[from_relay.FromRelay], None]) -> None:
        self._send = send
        self._asked = 0
        self._open: dict[int, tuple[from_relay.FromRelay, Callable[[Any], None]]] = {}

    def ask(
        self, answer: Callable[[Any], None], message: Callable[[int], from_relay.FromRelay]
    ) -> None:
        """Ask; `message` makes the question, given its number."""
        self._asked += 1
        asked = message(self._asked)
        self._open[self._asked] = asked, answer
        self._send(asked)

    def answer(self, question: int, said: object) -> None:
        """Pass an answer on."""
        _, answer = self._open.pop(question)
        answer(said)

    def open(self) -> list[from_relay.FromRelay]:
        """Return the questions without an answer, which another scheduler process is to be asked."""
        return [asked for asked, _ in self._open.values()]
