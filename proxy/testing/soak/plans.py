"""Requests drawn from a generator, each with the answer that the emulated model gives to it."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from balanceroute.proxy.emulate import EmulationSettings
from balanceroute.proxy.emulate.choice import Choice
from balanceroute.proxy.emulate.request import read_generation

MAX_TOKENS = 120
MAX_WORDS = 120
BIG_BYTES = 100_000
BIG = 0.02
"""Share of prompts of `BIG_BYTES`."""
# In seconds: before a rank has the request; until most answers are complete.
_SOON_S = 0.05
_LATER_S = 0.4


@dataclass(frozen=True, slots=True)
class Leaving:
    """When and how a client leaves.

    Attributes:
        after_s: So long after it sent the request; None if not by time.
        after_events: After so many tokens of the stream; None if not by these.
        in_body: Before the whole request was sent.
        reset: With a reset, not a FIN.
    """

    after_s: float | None
    after_events: int | None
    in_body: bool
    reset: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One request.

    Attributes:
        name: Its `X-Request-Id`.
        data: The request as it is sent.
        chat: Whether it goes to the chat API.
        stream: Whether it asks for a stream.
        wants_usage: Whether the stream tells usage.
        prompt_tokens: What usage says of the prompt.
        texts: The right answer of each choice.
        reasons: Their finish reasons.
        tokens: Tokens of all choices.
        leaving: None if the client stays.
        fresh: Whether it is sent on a connection of its own.
    """

    name: str
    data: bytes
    chat: bool
    stream: bool
    wants_usage: bool
    prompt_tokens: int
    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    tokens: int
    leaving: Leaving | None
    fresh: bool


class Plans:
    """Draws requests.

    Args:
        rng: What draws.
        model: The engines' settings, which decide the right answers.
        host: The `Host` header.
    """

    def __init__(self, rng: random.Random, model: EmulationSettings, host: str) -> None:
        self._rng = rng
        self._model = model
        self._host = host

    def draw(self, name: str, *, leaving: float, big: float = BIG) -> Plan:
        """Return a request; `leaving` and `big` are probabilities."""
        rng = self._rng
        chat, stream = rng.random() < 0.6, rng.random() < 0.7
        values = self._values(name, big, chat=chat, stream=stream)
        request = read_generation(values, self._model, chat=chat)
        prompt = request.prompts[0]
        choices = [
            Choice(request, index, prompt, values["max_tokens"], self._model.mean_output_tokens)
            for index in range(request.n)
        ]
        for choice in choices:
            while choice.finish_reason is None:
                choice.advance()
        tokens = sum(choice.emitted for choice in choices)
        return Plan(
            name,
            self._spell(name, values, chat=chat),
            chat,
            stream,
            "stream_options" in values,
            len(prompt.tokens),
            tuple(choice.said for choice in choices),
            tuple(str(choice.finish_reason) for choice in choices),
            tokens,
            self._leaving(tokens if stream else 0) if rng.random() < leaving else None,
            rng.random() < 0.3,
        )

    def _values(self, name: str, big: float, *, chat: bool, stream: bool) -> dict[str, Any]:
        rng = self._rng
        values: dict[str, Any] = {
            "model": self._model.model,
            "max_tokens": rng.randint(1, MAX_TOKENS),
        }
        # No two prompts are alike: an answer that reached another client would be wrong.
        words = [f"w{rng.getrandbits(20)}" for _ in range(rng.randint(1, MAX_WORDS))]
        text = " ".join([name, *words])
        if rng.random() < big:
            text += " b" * (BIG_BYTES // 2)
        if chat:
            values["messages"] = [{"role": "user", "content": text}]
        else:
            values["prompt"] = text
        if rng.random() < 0.3:
            values["ignore_eos"] = True
        if rng.random() < 0.08:
            values["n"] = 2
        if stream:
            values["stream"] = True
            if rng.random() < 0.5:
                values["stream_options"] = {"include_usage": True}
        return values

    def _leaving(self, tokens: int) -> Leaving:
        """Return how a client leaves; `tokens` is 0 if its answer is not streamed."""
        rng = self._rng
        after_s: float | None = None
        after_events: int | None = None
        kind = rng.choices(
            ("body", "at once", "soon", "later", "first", "middle", "last"),
            (1, 2, 3, 3, 2, 5, 2) if tokens else (1, 2, 3, 3, 0, 0, 0),
        )[0]
        match kind:
            case "at once":
                after_s = 0.0
            case "soon":
                after_s = rng.uniform(0.0, _SOON_S)
            case "later":
                after_s = rng.uniform(_SOON_S, _LATER_S)
            case "first":
                after_events = 1
            case "middle":
                after_events = rng.randint(1, tokens)
            case "last":
                after_events = tokens
            case _:
                pass  # In the body.
        return Leaving(after_s, after_events, kind == "body", rng.random() < 0.5)

    def _spell(self, name: str, values: Mapping[str, object], *, chat: bool) -> bytes:
        body = json.dumps(values).encode()
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"x-request-id: {name}\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
