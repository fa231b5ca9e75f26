"""One choice of an answer: its tokens, and how it ends."""

from dataclasses import dataclass, field, replace

from balanceroute.proxy.lab.emulate.request import GenerationRequest, Prompt
from balanceroute.proxy.lab.emulate.sampler import EOS, Sampler, TokenLogprob
from balanceroute.proxy.lab.emulate.tokens import (
    ASSISTANT,
    FRAGMENTS,
    TOKEN_TEXTS,
    ends_within_character,
    tokenise,
)
from balanceroute.proxy.lab.emulate.tool_script import (
    Channel,
    ToolScript,
    schema_script,
    tool_script,
)

(EOS_ID,) = tokenise("<|eos|>")
# With a reasoning parser a chat begins with fewer tokens of reasoning than this.
_REASONING_BELOW = 16


@dataclass(slots=True)
class Delta:
    """What one token, or several in one event, adds to a choice.

    Attributes:
        text: The visible text; in a tool call, its name or a part of its arguments.
        channel: The field that it belongs to.
        token_ids: The tokens, or none if the choice ended without one.
        logprobs: Log-probabilities of each, if requested.
        offset: Characters of the choice before the first of the tokens.
        late: Whether the server lags, so that this is sent with the next token.
    """

    text: str = ""
    channel: Channel = Channel.CONTENT
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    offset: int = 0
    late: bool = False

    def merged(self, later: "Delta") -> "Delta":
        """Return this and the next one joined."""
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            offset=self.offset,
        )


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of tokens and its state.

    Attributes:
        index: Its place among the choices of the answer.
        mean_tokens: Mean length of a text that ends by itself.
        eos_first: Whether the first token ends it, whatever the request says.
        length: Tokens of the text, including the one that ends it, whatever the request says except
            its limit; None for the model to decide.
        partial_utf8: Probability that a token ends within a character, so that its text is sent with
            the next one's.
        merged_outputs: Probability that a token is sent in one event with the next.
        cached_tokens: Tokens of the prompt that its engine had in its prefix cache.
        emitted: Tokens so far, including the one that ends it.
        text: Its text, unless it is plain.
        reasoning: The reasoning before the text.
        most_reasoning: The tokens of reasoning, if it does not end before.
        finish_reason: "stop" or "length" once it has ended.
        stop_reason: The stop string or token id, or "recomputed"; None for the end of the text.
        script: The tool call that it makes.
        plain: Whether each token is only its text, so that a fast path may write it.
    """

    request: GenerationRequest
    index: int
    prompt: Prompt
    max_tokens: int
    mean_tokens: float
    eos_first: bool = False
    length: int | None = None
    partial_utf8: float = 0.0
    merged_outputs: float = 0.0
    cached_tokens: int = 0
    emitted: int = 0
    text: str = ""
    reasoning: str = ""
    most_reasoning: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    script: ToolScript | None = None
    plain: bool = True
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sampler: Sampler = field(init=False)
    _shown: int = 0  # Characters of `text` that were sent.
    _held_back: int = 0  # Characters that may be the start of a stop string.
    _decoded: int = 0  # Characters of `text` that tokens have completed.
    _again: str = ""  # The prompt, which is said before the first token.
    _offset: int = 0  # Characters of all tokens so far.

    def __post_init__(self) -> None:
        self.begin(self.prompt)
        # vLLM's `DecodeStream`, primed with an incomplete suffix, finds the whole prompt to be new.
        if self.prompt.text is None and ends_within_character(self.prompt.tokens[-1]):
            self._again, self.plain = self.prompt.said, False

    def begin(self, read: Prompt) -> None:
        """Start the text that follows a prompt.

        Args:
            read: The prompt whose KV cache was read; another one after a misread.
        """
        request = self.request
        key = request.sampling + (self.index % request.n).to_bytes(4, "little")
        if request.penalised:  # By where the answer begins.
            key += len(read.tokens).to_bytes(4, "little")
        self.sampler = Sampler(read.packed, key, self.mean_tokens)
        self.most_reasoning = 0
        if not self.eos_first:
            self.script = tool_script(request, read, key)
            if self.script is None and request.schema is not None:
                self.script = schema_script(request.schema, read, key)
        self.plain = self.script is None and not (
            request.stop or request.stop_token_ids or request.logprobs
        )
        # Only at the beginning of a turn, and without stop conditions or log-probabilities.
        if self.plain and request.reasoning_parser and self.prompt.said.endswith(ASSISTANT):
            self.most_reasoning = self.prompt.digest[0] % _REASONING_BELOW
        if self.most_reasoning or self.partial_utf8 or self.merged_outputs:
            self.plain = False
        self._held_back = max(map(len, request.stop), default=1) - 1
        if request.include_stop:
            self._held_back = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache."""
        return len(self.prompt.tokens) + self.emitted

    @property
    def reasoning_tokens(self) -> int:
        """Tokens that a reasoning parser read."""
        return min(self.emitted, self.most_reasoning)

    @property
    def said(self) -> str:
        """The text, without what a stop condition cut off."""
        if self.plain:
            return "".join([TOKEN_TEXTS[token] for token in self.token_ids if token != EOS_ID])
        return self.text

    @property
    def calls_tool(self) -> bool:
        """Whether the choice is a complete tool call."""
        script = self.script
        return script is not None and bool(script.name) and self.emitted >= len(script.pieces)

    def next_token(self) -> int:
        """Emit the next token of a plain choice; return its id, or EOS."""
        self.emitted += 1
        request = self.request
        may_end = (
            self.length is None and not request.ignore_eos and self.emitted > request.min_tokens
        )
        ends = self.eos_first or self.emitted == self.length
        token = EOS if ends else self.sampler.next(may_end=may_end)
        partial = token != EOS and self.sampler.happens(self.partial_utf8, word=2)
        self.token_ids.append(EOS_ID if token == EOS else token + FRAGMENTS * partial)
        if token == EOS:
            self.finish_reason = "stop"
        elif self.emitted >= self.max_tokens:
            self.finish_reason = "length"
        return token

    def advance(self) -> Delta:
        """Emit the next token of any kind of choice."""
        if self.script is not None:
            return self._follow(self.script)
        return self._say(self.next_token())

    def end(self, stop_reason: str | None, finish_reason: str = "stop") -> Delta:
        """End the choice from outside, without a token."""
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        # Of a tool call the parser has sent everything already.
        return Delta("" if self.script is not None else self._release(0))

    def _follow(self, script: ToolScript) -> Delta:
        self.emitted += 1
        if self.emitted > len(script.pieces):
            self.sampler.force(EOS_ID)
            self.finish_reason = "stop"
            self.token_ids.append(EOS_ID)
            return Delta("", Channel.SILENT, (EOS_ID,), self._logprobs(""))
        piece = script.pieces[self.emitted - 1]
        self.sampler.force(piece.token)
        self.text += piece.said
        self.token_ids.append(piece.token)
        if self.emitted >= self.max_tokens:
            self.finish_reason = "length"
        return Delta(piece.shown, piece.channel, (piece.token,), self._logprobs(piece.said))

    def _say(self, token: int) -> Delta:
        said = "" if token == EOS else TOKEN_TEXTS[token]
        offset, self._offset = self._offset, self._offset + len(said)
        if self.emitted <= self.most_reasoning:
            self.reasoning += said
            return Delta(said, Channel.REASONING, (self.token_ids[-1],))
        logprobs = self._logprobs(said)
        ids = (self.token_ids[-1],)
        if ids[0] in self.request.stop_token_ids and self.emitted > self.request.min_tokens:
            self.finish_reason, self.stop_reason = "stop", ids[0]
            said = said if self.request.include_stop else ""
        said, self._again = self._again + said, ""
        self.text += said
        if said and self.request.stop and self.emitted > self.request.min_tokens:
            self._look_for_stop(len(said))
        partial = ends_within_character(ids[0])
        if partial and self.finish_reason == "length":
            self.text = self.text[: self._decoded]  # Nothing completes it.
        elif not partial:
            self._decoded = len(self.text)
        if self.finish_reason is not None:
            return Delta(self._release(0), Channel.CONTENT, ids, logprobs, offset)
        late = self.sampler.happens(self.merged_outputs, word=3)
        shown = "" if partial else self._release(self._held_back)
        return Delta(shown, Channel.CONTENT, ids, logprobs, offset, late)

    def _look_for_stop(self, added: int) -> None:
        """Cut the text at the first stop string that the last `added` characters complete."""
        for stop in self.request.stop:
            begin = self.text.find(stop, max(0, len(self.text) - added - len(stop) + 1))
            if begin >= 0:
                self.text = self.text[: begin + len(stop) * self.request.include_stop]
                self.finish_reason, self.stop_reason = "stop", stop
                return

    def _release(self, held_back: int) -> str:
        end = max(self._shown, len(self.text) - held_back)
        shown, self._shown = self.text[self._shown : end], end
        return shown

    def _logprobs(self, said: str) -> tuple[TokenLogprob, ...]:
        if not self.request.logprobs:
            return ()
        logprob = self.sampler.logprob(said, self.request.logprobs)
        self.logprobs.append(logprob)
        return (logprob,)
