"""What a relay has asked the scheduler process, and has no answer to yet."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.live.processes import from_relay, to_relay


class Questions:
    """Numbers questions, and finds those who asked."""

    def __init__(self, send: Callable[[from_relay.FromRelay], None]) -> None:
        self._send = send
        self._asked = 0
        self._open: dict[int, tuple[from_relay.FromRelay, Callable[[Any], None]]] = {}

    def ask(
        self, answer: Callable[[Any], None], message: Callable[[int], from_relay.FromRelay]
    ) -> int:
        """Ask; `message` makes the question, given its number, which is returned."""
        self._asked += 1
        asked = message(self._asked)
        self._open[self._asked] = asked, answer
        self._send(asked)
        return self._asked

    def ask_page(self, path: Any, answer: Callable[[bytes], None]) -> None:
        """Ask for a page that tells of all processes."""
        self.ask(answer, lambda question: from_relay.AskPage(question, path))

    def take(self, message: to_relay.RetryAnswered | to_relay.Page) -> None:
        """Pass an answer on, as it was told."""
        said = message.allowed if isinstance(message, to_relay.RetryAnswered) else message.body
        self.answer(message.question, said)

    def answer(self, question: int, said: object) -> None:
        """Pass an answer on."""
        _, answer = self._open.pop(question)
        answer(said)

    def withdraw(self, question: int) -> None:
        """Ask no more, of a scheduler process that is gone."""
        del self._open[question]

    def renumber(self, prefillers: Mapping[PrefillerId, PrefillerId]) -> None:
        """Name prefillers as another scheduler process does; see `Renumbered`."""
        for number, (asked, answer) in self._open.items():
            self._open[number] = _renumbered(asked, prefillers), answer

    def open(self) -> list[from_relay.FromRelay]:
        """Return the questions without an answer, which another scheduler process is to be asked."""
        return [asked for asked, _ in self._open.values()]


def _renumbered(
    asked: from_relay.FromRelay, prefillers: Mapping[PrefillerId, PrefillerId]
) -> from_relay.FromRelay:
    match asked:
        case from_relay.AskRetry(pulled_from=int(prefiller)):
            return replace(asked, pulled_from=prefillers.get(PrefillerId(prefiller)))
        case from_relay.AskPrefiller(other_than=int(prefiller)):
            return replace(asked, other_than=prefillers.get(PrefillerId(prefiller)))
        case _:
            return asked
