"""The first token of a stream, as a prefiller says it, and which streams may begin with it.

A prefiller is asked for one token and says the same as the decode rank will, if both draw alike. So
the client can have it before there is a rank. May begin so what may also be continued from ids
(`continuation.py`): if the rank says something else, the answer goes on behind the prefiller's token.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from balanceroute.proxy.live.openai.answer_events import (
    dump_compact,
    events_head,
    token_events,
    write_events,
)
from balanceroute.proxy.live.openai.backed_up_ids import care_of
from balanceroute.proxy.live.openai.continuation import continuable, sampling_of
from balanceroute.proxy.live.openai.repeated_text import RepeatedText
from balanceroute.proxy.live.openai.shape import Api, Shape
from balanceroute.proxy.live.openai.stream_event import choices_of, parsed, text_of
from balanceroute.proxy.live.openai.token_events import first_token_event

_PROMPT = re.compile(rb'"prompt_token_ids":\s*+\[([\d,\s]++)\]')
_INCOMPLETE = "\ufffd"  # What a detokeniser writes for bytes that are no character.


class FirstToken(Struct, frozen=True):
    """A first token.

    Attributes:
        text: Empty in an answer that is token ids alone.
        id: Its id.
        ids: The prompt's and this one's, as JSON without the brackets.
        head: Of its events, all that stands before the choices.
        events: What a stream begins with up to it.
    """

    text: str
    id: int
    ids: bytes
    head: bytes
    events: bytes


def may_begin_early(shape: Shape, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the members that a continuation keeps; None if the first token is to wait for a rank.

    Args:
        shape: The request's.
        values: The members of its body.
    """
    if shape.max_tokens == 1:
        return None  # A rank ends such an answer, and has the KV cache freed.
    kept = continuable(shape, values, sampled=True)
    if kept is None:
        return None
    sampling = sampling_of(kept)
    if shape.max_tokens is None and sampling.get("min_tokens"):
        return None  # A rank refuses more than the context has room for; a prefiller is not asked.
    if care_of(sampling) is not None:
        return None  # A stop string may begin in it; and its log-probabilities stand elsewhere.
    options = kept.get("stream_options")
    # The count in each event is another engine's business in each version.
    return None if isinstance(options, dict) and options.get("continuous_usage_stats") else kept


def read_first_token(api: Api, message: Mapping[str, Any], body: bytes) -> FirstToken | None:
    """Return the first token that a prefiller's answer says; None if a client must not have it yet.

    Args:
        api: The endpoint.
        message: The answer.
        body: The same as it came.
    """
    choice = message["choices"][0]
    said = choice.get("message") if api is Api.CHAT else choice
    if not isinstance(said, dict) or choice.get("finish_reason") != "length":
        return None
    text = said.get("content" if api is Api.CHAT else "text")
    # Within a character, or a special token: the event of the next one has its text.
    if not isinstance(text, str) or not text or _INCOMPLETE in text:
        return None
    # A parser of reasoning or of tool calls may have kept something back.
    if api is Api.CHAT and any(said[name] for name in said.keys() - {"role", "content"}):
        return None
    if isinstance(message["usage"].get("completion_tokens_details"), dict):
        return None
    ids, prompt = choice.get("token_ids"), _PROMPT.search(body)
    if not isinstance(ids, list) or len(ids) != 1 or type(ids[0]) is not int or prompt is None:
        return None
    head = dump_compact(events_head(api, message))
    return FirstToken(
        text=text,
        id=ids[0],
        ids=b"%b,%d" % (prompt[1], ids[0]),
        head=b"data: %b," % head[:-1],
        events=write_events(token_events(api, message)),
    )


def read_first_id(message: Mapping[str, Any], prompt: bytes) -> FirstToken | None:
    """Return the first id that a prefiller's answer of token ids says; None as for `read_first_token`.

    Args:
        message: The answer.
        prompt: The JSON text of the list of the prompt's ids.
    """
    choice = message["choices"][0]
    ids = choice.get("token_ids")
    if choice.get("finish_reason") != "length" or choice.get("routed_experts") is not None:
        return None
    if not isinstance(ids, list) or len(ids) != 1 or type(ids[0]) is not int:
        return None
    return FirstToken(
        text="",
        id=ids[0],
        ids=b"%b,%d" % (prompt.strip(b"[] \t\r\n"), ids[0]),
        head=b"",
        events=write_events([first_token_event(message)]),
    )


def says_again(said: FirstToken, left: RepeatedText, event: bytes) -> bool | None:
    """Return whether a rank says the same as a prefiller; None if that is still open.

    Args:
        said: By the prefiller.
        left: What of its text has yet to come; events with a part of it are taken off.
        event: The next one of the rank's stream.
    """
    message = parsed(event)
    for choice in [] if message is None else choices_of(message):
        if not said.text:
            ids = choice.get("token_ids")
            if ids:
                return isinstance(ids, list) and ids[0] == said.id
        else:
            text = text_of(choice)
            if text is None or left.trim(text) is None:
                return False
            if left.over:
                return True
        if choice.get("finish_reason"):
            return False
    return None
