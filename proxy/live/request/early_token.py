"""The first token of a stream, given to the client when the prefill ends, before there is a rank.

The decode leg stays as it is: the rank says the token again, which is left out. For both to draw the
same token, both legs have one seed. Until the rank has said more than the client has, all of it can be
repeated, as before the first byte. If it says something else, the answer goes on behind the client's
token, from ids.
"""

from enum import Enum
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.live.openai.continuation import sampling_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balanceroute.proxy.live.engines.instances import Prefiller
    from balanceroute.proxy.live.openai.first_token import FirstToken


class FirstTokenFrom(Enum):
    """Whose first token the client gets."""

    PREFILL = "prefill"
    DECODE = "decode"


class EarlyToken:
    """The first token of one request.

    Attributes:
        kept: Members of the client's body that a continuation has.
        members: What the prefill leg is asked for beyond those of both legs.
        min_tokens: How many the prefill leg must not end before.
        said: What the client has; None if it has nothing.
    """

    __slots__ = ("_giver", "kept", "members", "min_tokens", "said")

    def __init__(self, kept: "Mapping[str, Any]") -> None:
        sampling = sampling_of(kept)
        self.kept = kept
        # Where the sampling has a place of its own, the answer is ids.
        self.members = {"return_token_ids": True} if sampling is kept else {}
        # An answer may be empty, and then the prefiller has to say so, too.
        self.min_tokens = 1 if sampling.get("min_tokens") else 0
        self.said: FirstToken | None = None
        self._giver: Prefiller | None = None

    def give(self, prefiller: "Prefiller") -> None:
        """Note that the client has the token of a prefiller."""
        self._giver = prefiller
        prefiller.first_tokens.give()

    def take_back(self) -> None:
        """Note that the rank said another one."""
        if self._giver is not None:
            self._giver.first_tokens.take_back(self._giver.name)
