"""Requests of agents, by /v1/messages and /v1/responses, and when two answers to them are the same."""

import re
from typing import TYPE_CHECKING, Any

from tests.support.site import Exchanged, Site

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
PATHS = (MESSAGES, RESPONSES)
LIMIT = {MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
ID: "Headers" = [(b"x-request-id", b"mine")]
# What is drawn for each answer, and when it was made.
_OWN = re.compile(rb'"(id|item_id|call_id|signature|created_at)":("[^"]*"|\d+)')


def body(path: str, text: str = "t1 t2 t3", *, tokens: int = 12, **members: Any) -> dict[str, Any]:
    """Return a request for an answer of at most so many tokens."""
    asked: dict[str, Any] = {"model": "tiny", LIMIT[path]: tokens}
    asked |= {"input": text} if path == RESPONSES else {}
    asked |= {"messages": [{"role": "user", "content": text}]} if path == MESSAGES else {}
    return asked | members


def plain(answer: bytes) -> bytes:
    """Return an answer without what differs between two right ones."""
    return _OWN.sub(rb'"\1":"-"', answer)


async def alone(
    site: Site, path: str, values: dict[str, Any], engine: str = "decode/0"
) -> Exchanged:
    """Return what one engine answers by itself; it must be without faults."""
    answer = await site.send(path, values, headers=ID, port=site.fleet.engine(engine).port).end()
    assert answer.status == 200, answer.body
    site.seen.pop()
    return answer


def same(one: Exchanged, other: Exchanged) -> None:
    """Check that an answer is whole, and the same as another one."""
    assert one.error is None
    assert one.status == 200, one.body
    assert plain(one.body) == plain(other.body)


def failed_within(answer: Exchanged, path: str) -> str:
    """Check that a stream ends with an error event in the API's own form; return its message."""
    assert answer.status == 200
    last = answer.events[-1]
    assert last.startswith(b"event: error\ndata: ")
    error = answer.chunks[-1]["error"]
    assert ("code" in error) is (path == RESPONSES)
    message: str = error["message"]
    return message
