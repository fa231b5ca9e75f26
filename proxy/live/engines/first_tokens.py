"""Whether the token that a prefiller says is the first of the answer.

A prefiller of a hybrid model (Mamba layers, compressed KV caches) or with draft layers leaves the last
tokens of a prompt to the decode rank, and says what would follow without them. NIXL tells so; of other
connectors only the comparison with what the ranks say shows it, so there it comes before any trust.
"""

import logging

_log = logging.getLogger(__name__)
# Near ties that two engines resolve differently are far rarer.
_LEAST_DIFFERING = 8
_MOST_SHARE = 0.25
# What a prefiller of a hybrid model says is sometimes right by chance, and hardly so often in a row.
_PROBATION = 16


class FirstTokens:
    """The first tokens of one prefiller, since it started.

    Args:
        of: Names its process; None while that is unknown.
        partial: Whether it left the end of its latest prompt to the rank, as far as it tells.
    """

    __slots__ = ("_agreed", "_compared", "_differing", "of", "partial")

    def __init__(self, of: object = None, *, partial: bool = False) -> None:
        self.of = of
        self.partial = partial
        self._compared = 0
        self._differing = 0
        self._agreed = 0  # In a row; those that clients got early are not counted.

    @property
    def credible(self) -> bool:
        """Whether they may be those of the ranks."""
        return not self.partial and not self._differ

    @property
    def proven(self) -> bool:
        """Whether the ranks have said the same for long enough."""
        return self._agreed >= _PROBATION

    @property
    def _differ(self) -> bool:
        return self._differing >= max(_LEAST_DIFFERING, _MOST_SHARE * self._compared)

    def count(self) -> None:
        """Note one that is compared."""
        self._compared += 1

    def agree(self) -> None:
        """Note that a rank said the same."""
        self._agreed += 1

    def differ(self, prefiller: str) -> None:
        """Note that a rank said another one."""
        differed = self._differ
        self._differing += 1
        self._agreed = 0
        if self._differ and not differed:
            fields = {
                "prefiller": prefiller,
                "differing": self._differing,
                "compared": self._compared,
            }
            _log.warning("first tokens differ: they wait for ranks", extra={"fields": fields})

    def note(self, prefiller: str, *, partial: bool) -> None:
        """Note whether it left the end of a prompt to the rank."""
        if partial and not self.partial:
            fields = {"prefiller": prefiller}
            message = "a prefiller leaves the end of prompts to ranks: first tokens are theirs"
            _log.info(message, extra={"fields": fields})
        self.partial = partial
