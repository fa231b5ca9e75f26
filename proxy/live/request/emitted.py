"""What a request emitted on earlier bindings, for it to go on from there."""

from typing import TYPE_CHECKING

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.continuation import continued_body, is_greedy
from balanceroute.proxy.live.openai.resume import CannotResumeError, resumed_members
from balanceroute.proxy.live.openai.shape import Api

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from balanceroute.proxy.live.openai.shape import Shape
    from balanceroute.proxy.live.openai.token_ids import TokenIds
    from balanceroute.proxy.live.openai.transcript import Transcript


class Emitted:
    """All that the client has of an answer which its rank did not end.

    Attributes:
        tokens: How many.
        members: Of the client's body, those that change therefore.
        kept: Of the client's body, what a continuation from ids needs; None if there can be none.
        continued: The request that continues from ids, in place of the client's; None if none does.
        overlap: Text that the client has behind the tokens, and that comes again.
        head: Of the client's first event, all that stands before the choices.
    """

    __slots__ = ("_text", "continued", "head", "kept", "members", "overlap", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.members: Mapping[str, object] = {}
        self.kept: Mapping[str, Any] | None = None
        self.continued: RequestBody | None = None
        self.overlap = ""
        self.head = b""
        self._text = ""

    def add(
        self, transcript: "Transcript", tokens: int, shape: "Shape", body: "RequestBody"
    ) -> bool:
        """Take in the text and tokens of a leg; return whether there is any text to go on from.

        Raises:
            CannotResumeError: The answer cannot be continued from text.
        """
        if transcript.text is None or self.continued is not None:
            raise CannotResumeError("its answer cannot be continued from text")
        text, tokens = self._text + "".join(transcript.text), self.tokens + tokens
        if not text:
            return False
        self.members = resumed_members(shape.api, body.large_values(), text, tokens)
        self._text, self.tokens = text, tokens
        return True

    def takes(self, ids: "TokenIds", shape: "Shape") -> bool:
        """Return whether the answer can be continued from the ids of a leg's tokens."""
        if self.continued is not None and not ids.begun:
            return True  # It did nothing, and what it was asked for stands.
        tokens = self.tokens + ids.count
        # A parser of reasoning may have kept a chat's first tokens back.
        begun = tokens > 0 or shape.api is Api.COMPLETIONS
        # Another sample would not say again what the client has.
        repeats = self.kept is not None and is_greedy(self.kept)
        if not repeats and ids.behind:
            return False
        ends = shape.max_tokens is not None and tokens >= shape.max_tokens
        return ids.usable and begun and not ends

    def add_ids(self, ids: "TokenIds", shape: "Shape") -> None:
        """Take in the ids of a leg's tokens, if `takes`."""
        assert self.kept is not None
        if not ids.begun:
            return
        self.tokens += ids.count
        self.overlap = ids.behind
        self.head = self.head or ids.head
        behind = b",".join(filter(None, (ids.prompt, ids.kept)))
        self.continued = RequestBody(continued_body(self.kept, shape.api, behind, self.tokens))
