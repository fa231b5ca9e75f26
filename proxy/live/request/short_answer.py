"""The answer of a prefiller that met a stop condition on its one token, as the client wants it.

Nothing is left to decode then, and there is no KV cache to pull: the prefiller's answer is the answer.
A client that asked for a stream gets the same events that a decode engine would have sent.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.live.openai.answer_events import (
    STREAM_HEADERS,
    dump_compact,
    ended_events,
    message_events,
    write_events,
)
from balanceroute.proxy.live.openai.api_error import JSON_HEADERS
from balanceroute.proxy.live.openai.numeric_members import flag
from balanceroute.proxy.live.openai.shape import Api, Shape
from balanceroute.proxy.live.openai.token_events import ended_token_events

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.request.client_answer import ClientAnswer

_PARAMS = "kv_transfer_params"


def answer_shortly(
    client: "ClientAnswer", shape: "Shape", body: "RequestBody", message: Mapping[str, Any]
) -> None:
    """Send the prefiller's answer to the client, as a stream if it asked for one."""
    if shape.api is Api.MESSAGES:  # vLLM leaves out there what is null.
        message = {name: value for name, value in message.items() if name != _PARAMS}
        if not shape.stream:
            client.send(200, JSON_HEADERS, dump_compact(message))
            return
        client.open(200, STREAM_HEADERS)
        client.reply.write(message_events(message))
        client.reply.end()
        return
    if not shape.stream:
        client.send(200, JSON_HEADERS, short_answer_body(message))
        return
    options = body.values.get("stream_options")
    usage = isinstance(options, dict) and options.get("include_usage") is True
    client.open(200, STREAM_HEADERS)
    ids = flag(body.values.get("return_token_ids")) is True
    events = short_answer_events(shape.api, message, include_usage=usage, shows_ids=ids)
    client.reply.write(events)
    client.reply.end()


def short_answer_body(message: Mapping[str, Any]) -> bytes:
    """Return the prefiller's answer as that to a request that is not streamed."""
    return dump_compact({**message, _PARAMS: None})


def short_answer_events(
    api: Api, message: Mapping[str, Any], *, include_usage: bool, shows_ids: bool = False
) -> bytes:
    """Return the prefiller's answer as server-sent events; `shows_ids`: with the ids that it tells."""
    if api is Api.GENERATE:
        events = ended_token_events(message, include_usage=include_usage)
    else:
        events = ended_events(api, message, include_usage=include_usage, shows_ids=shows_ids)
    return write_events(events) + b"data: [DONE]\n\n"
