"""Whether the token that a prefiller says is the first of the answer.

A prefiller of a hybrid model (Mamba layers, compressed KV caches) or with draft layers leaves the last
tokens of a prompt to the decode rank, and says what would follow without them. NIXL tells so; of other
connectors only the comparison with what the ranks say shows it.
"""

import logging

_log = logging.getLogger(__name__)
# Near ties that two engines resolve differently are far rarer.
_LEAST_DIFFERING = 8
_MOST_SHARE = 0.25


class FirstTokens:
    """The first tokens of one prefiller.

    Attributes:
        partial: Whether it left the end of its latest prompt to the rank, as far as it tells.
    """

    __slots__ = ("_differing", "_given", "partial")

    def __init__(self) -> None:
        self.partial = False
        self._given = 0
        self._differing = 0

    @property
    def trusted(self) -> bool:
        """Whether clients may get them before a rank has said the same."""
        return not self.partial and not self._differ

    @property
    def _differ(self) -> bool:
        return self._differing >= max(_LEAST_DIFFERING, _MOST_SHARE * self._given)

    def give(self) -> None:
        """Note that a client got one."""
        self._given += 1

    def take_back(self, prefiller: str) -> None:
        """Note that a rank said another one."""
        differed = self._differ
        self._differing += 1
        if self._differ and not differed:
            fields = {"prefiller": prefiller, "differing": self._differing, "given": self._given}
            _log.warning("first tokens differ: they wait for ranks", extra={"fields": fields})

    def note(self, prefiller: str, *, partial: bool) -> None:
        """Note whether it left the end of a prompt to the rank."""
        if partial and not self.partial:
            fields = {"prefiller": prefiller}
            message = "a prefiller leaves the end of prompts to ranks: first tokens are theirs"
            _log.info(message, extra={"fields": fields})
        self.partial = partial
