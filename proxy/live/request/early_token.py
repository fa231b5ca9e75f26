"""The first token of a stream, given to the client when the prefill ends, before there is a rank.

The decode leg stays as it is: the rank says the token again, which is left out. For both to draw the
same token, both legs have one seed. Until the rank has said more than the client has, all of it can
be repeated, as before the first byte. If it says something else, the answer goes on behind the
client's token, from ids.

Of a prefiller on probation the client gets nothing: what it says is compared with what the rank says.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from balanceroute.proxy.live.engines.instances import FirstTokenTrust, Prefiller
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.continuation import (
    PrefillFirstToken,
    read_first_id,
    read_first_token,
    says_again,
)
from balanceroute.proxy.live.openai.shape import PROMPT, Api, sampling_of
from balanceroute.proxy.live.openai.stream_reader import RepeatedText


class EarlyToken:
    """The first token of one request."""

    __slots__ = ("_doubted", "_firsts", "_prefiller", "kept", "members", "min_tokens", "said")

    def __init__(self, kept: Mapping[str, Any]) -> None:
        sampling = sampling_of(kept)
        self.kept = kept  # Members of the client's body that a continuation has.
        # Where the sampling has a place of its own, the answer is ids.
        # What the prefill leg is asked for beyond those of both legs.
        self.members = {"return_token_ids": True} if sampling is kept else {}
        # An answer may be empty, and then the prefiller has to say so, too.
        # How many the prefill leg must not end before.
        self.min_tokens = 1 if sampling.get("min_tokens") else 0
        self.said: PrefillFirstToken | None = None  # What the client has; None if it has nothing.
        self._doubted: PrefillFirstToken | None = None
        self._prefiller = ""
        self._firsts: FirstTokenTrust | None = None

    @property
    def comparison(self) -> Callable[[bytes], bool] | None:
        """Compares each event of a rank's stream until it returns true; None for no comparison."""
        if self._doubted is None:
            return None
        return partial(self._compare, self._doubted, RepeatedText(self._doubted.text))

    def give(self, said: PrefillFirstToken, prefiller: Prefiller) -> None:
        self.said, self._doubted = said, None
        self._firsts, self._prefiller = prefiller.first_tokens, prefiller.name
        self._firsts.count()

    def doubt(self, said: PrefillFirstToken, prefiller: Prefiller) -> None:
        """Note what a prefiller said, for a rank to say it first."""
        self._doubted = said
        self._firsts, self._prefiller = prefiller.first_tokens, prefiller.name

    def read(
        self, api: Api, message: Mapping[str, Any], body: bytes, asked: RequestBody
    ) -> PrefillFirstToken | None:
        """Return the token that a prefiller's answer says; None as for `read_first_token`."""
        if api is Api.GENERATE:
            return read_first_id(message, bytes(asked.value_text(PROMPT)))
        return read_first_token(api, message, body)

    def take_back(self) -> None:
        """Note that the rank said another one."""
        if self._firsts is not None:
            self._firsts.differ(self._prefiller)

    def _compare(self, said: PrefillFirstToken, left: RepeatedText, event: bytes) -> bool:
        same = says_again(said, left, event)
        if same is None or self._firsts is None:
            return False
        self._doubted = None  # Another rank is no other comparison.
        self._firsts.count()
        if same:
            self._firsts.agree()
        else:
            self.take_back()
        return True
