"""What a request emitted on earlier bindings, for it to go on from there."""

from typing import TYPE_CHECKING

from balanceroute.proxy.live.openai.resume import CannotResumeError, resumed_members

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.openai.shape import Shape
    from balanceroute.proxy.live.openai.transcript import Transcript


class Emitted:
    """All that the client has of an answer whose rank handed the request back.

    Attributes:
        members: Of the client's body, those that change therefore.
    """

    __slots__ = ("_text", "members", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.members: Mapping[str, object] = {}
        self._text = ""

    def add(
        self, transcript: "Transcript", tokens: int, shape: "Shape", body: "RequestBody"
    ) -> bool:
        """Take in the text and tokens of a leg; return whether there is any text to go on from.

        Raises:
            CannotResumeError: The answer cannot be continued from text.
        """
        if transcript.text is None:
            raise CannotResumeError("its answer cannot be continued from text")
        text, tokens = self._text + "".join(transcript.text), self.tokens + tokens
        if not text:
            return False
        self.members = resumed_members(shape.api, body.large_values(), text, tokens)
        self._text, self.tokens = text, tokens
        return True
