"""Errors of engines: what each form says, and that a client's own error costs one prefill and blames nobody."""

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.site import Site, served, transcript

from balanceroute.proxy.live.engines.instances import Status
from balanceroute.proxy.live.openai.errors import (
    EngineError,
    error_body,
    error_event,
    error_in,
    error_words,
    is_error,
    read_error,
)
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.proxy.wire.sse import EventScanner, event_data

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest


def told(**error: object) -> dict[str, Any]:
    return {"error": {"message": "no", **error}}


# vLLM's Python and Rust frontends, whole and in streams, of all versions that may be met; and others.
FORMS: list[tuple[dict[str, Any], int]] = [
    (told(type="BadRequestError", param=None, code=400), 400),
    (told(type="Bad Request", code=400), 400),
    (told(type="Unprocessable Entity", code=422), 422),
    (told(type="InternalServerError", code=500), 500),
    (told(type="BadRequestError", code="400"), 400),
    (told(type="BadRequestError", code=400.0), 400),
    (told(type="BadRequestError", code="BadRequestError"), 400),
    (told(type="BadRequestError", code=None), 400),
    (told(type="BadRequestError"), 400),
    (told(type="NotFoundError"), 404),
    (told(type="UnprocessableEntityError", code=None), 422),
    (told(type="NotImplementedError"), 501),
    (told(type="invalid_request_error", param=None, code="invalid_request_error"), 400),
    (told(type="invalid_request_error", param="model", code="model_not_found"), 404),
    (told(type="invalid_request_error", code="json_parse_error"), 400),
    (told(type="invalid_request_error", code="context_length_exceeded"), 400),
    (told(type="invalid_request_error", code="of_tomorrow"), 400),
    (told(type="server_error", code="server_error"), 500),
    (told(type="BAD_REQUEST", code=400), 400),
    (told(type="BAD_REQUEST"), 400),
    (told(type="value_error", code=None), 400),
    (told(code=True, type="BadRequestError"), 400),
    (told(code=7, type="BadRequestError"), 400),
    (told(code=-400), 500),
    (told(code="9" * 5_000), 500),
    (told(code={"a": 1}, type=["b"]), 500),
    (told(), 500),
    ({"object": "error", "message": "no", "type": "BadRequestError", "code": 400}, 400),
    ({"object": "error", "message": "no", "type": "BadRequestError", "code": None}, 400),
    ({"object": "error", "message": "no", "type": "InternalServerError", "code": 500}, 500),
    ({"object": "error", "message": "no"}, 500),
    ({"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}, 400),
    ({"type": "error", "error": {"type": "not_found_error", "message": "no"}}, 404),
    ({"type": "error", "error": {"type": "request_too_large", "message": "no"}}, 413),
    ({"type": "error", "error": {"type": "internal_error", "message": "no"}}, 500),
    ({"type": "error", "error": {"type": "api_error", "message": "no"}}, 500),
    ({"type": "error", "error": {"type": "overloaded_error", "message": "no"}}, 503),
    ({"type": "error", "code": "server_error", "message": "no", "sequence_number": 3}, 500),
    ({"type": "error", "code": "invalid_prompt", "message": "no", "param": None}, 400),
    ({"detail": [{"loc": ["body"], "msg": "no", "type": "missing"}]}, 422),
    ({"detail": "no"}, 500),
    ({"error": "no"}, 500),
    ({"error": "no", "error_type": "validation"}, 400),
    ({"error": "no", "code": 400}, 400),
    ({"code": 400, "message": "no"}, 400),
    ({"choices": [], "error": {"code": 400, "message": "no"}}, 400),
]
NO_ERRORS: list[dict[str, Any]] = [
    {},
    {"choices": [], "error": None},
    {"choices": [{"text": "error"}], "object": "text_completion"},
    {"choices": [], "error": {}},
    {"choices": [], "detail": "no"},
    {"id": "m", "type": "message", "content": []},
    {"object": "response", "error": None, "status": "completed"},
    {"message": "no"},
    {"type": "ping"},
    {"error": None, "choices": None},
]


@pytest.mark.parametrize(("message", "status"), FORMS, ids=str)
def test_every_form_tells_its_status_and_words(message: dict[str, Any], status: int) -> None:
    error = read_error(message)
    assert error is not None
    assert (error.status, error.words) == (status, "no")
    assert error_in(json.dumps(message).encode()) == error


@pytest.mark.parametrize("message", NO_ERRORS, ids=str)
def test_what_is_no_error_is_none(message: dict[str, Any]) -> None:
    assert read_error(message) is None
    assert error_in(json.dumps(message).encode()) is None


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"choices":[{"text":"\\"error\\":{}"}],"usage":{}}', None),
        (b'{"choices":[{"logprobs":{"tokens":["error"]}}]}', None),
        (b'{"error":{"message":"no","code":400},"x":NaN}', EngineError(400, "no", of_api=True)),
        (b'{"object":"response","status":"failed","error":{"message":"no"}}', None),
        (b'{"error":' + b"[" * 5_000, None),
        (b'["error"]', None),
        (b"error", None),
        (b"", None),
    ],
)
def test_a_whole_answer_is_an_error_by_its_own_members(
    body: bytes, error: EngineError | None
) -> None:
    assert error_in(body) == error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"max_tokens is 0","code":400}}', "max_tokens is 0"),
        (b'{"type":"error","error":{"type":"x","message":"no"}}', "no"),
        (b'{"object":"error","message":"no"}', "no"),
        (b'{"detail":[{"msg":"no"}]}', "no"),
        (b'{"error":{"message":"' + b"x" * 1000 + b'"}}', "x" * 200),
        (b'{"error":{"message":"' + b"x" * 70_000 + b'"}}', ""),
        (b'{"error":{"message":7}}', "7"),
        (b'{"error":"no"}', "no"),
        (b"[" * 10_000, ""),
        (b"<html>", ""),
        (b"", ""),
    ],
)
def test_an_engines_own_words_are_kept_for_the_log(body: bytes, words: str) -> None:
    assert error_words(body) == words


@pytest.mark.parametrize(
    ("body", "of_api"),
    [
        (b'{"error":{"message":"no"}}', True),
        (b'{"object":"error","message":"no","code":404}', True),
        (b'{"detail":"Not Found"}', False),
        (b'{"error":"no healthy upstream"}', False),
        (b'{"message":"no","code":503}', False),
        (b"upstream", False),
    ],
)
def test_an_apis_errors_are_told_from_a_gateways(body: bytes, of_api: bool) -> None:
    assert is_error(body) == of_api


# Through a whole proxy.

JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "t1 t2"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "t1"}]},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}},
    "/v1/messages": {"messages": [{"role": "user", "content": "t1"}]},
    "/v1/responses": {"input": "t1"},
}
REFUSALS = [form for form, status in FORMS if status in (400, 404, 413, 422)]


class Refusing:
    """Engines that answer everything with an error whose status is 200."""

    def __init__(self, error: dict[str, Any], *, line_end: str = "\n", tail: bool = True) -> None:
        self.asked = 0  # How often they were.
        self._error = json.dumps(error).encode()
        self._end = line_end.encode()
        self._tail = tail

    def __call__(self, _: str, request: "HttpRequest", reply: "Reply") -> None:
        self.asked += 1
        if not json.loads(request.body).get("stream"):
            reply.send(200, JSON, self._error)
            return
        reply.start(200, SSE)
        event = b"data: " + self._error + self._end * 2
        if self._tail:
            reply.write(event + b"data: [DONE]" + self._end * 2)
        else:
            reply.write(event[: -2 * len(self._end)])
        reply.end()


def values_for(path: str, **more: object) -> dict[str, object]:
    return {"model": "tiny", "max_tokens": 4, **BODIES[path], **more}


async def check_refused(site: Site, path: str, values: object, error: dict[str, Any]) -> None:
    known = read_error(error)
    assert known is not None
    answer = await site.post(path, values)
    assert (answer.status, answer.json) == (known.status, error)
    records = await site.ended()
    assert (records[-1].outcome, records[-1].retries) == (Outcome.CLIENT_ERROR, 0)
    for deployment in site.world.plane.deployments.values():
        instances = deployment.instances
        assert {one.status for one in instances.prefillers} == {Status.UP}
        assert {one.status for one in instances.ranks} == {Status.UP}
    assert b"kv_transfer_failures_total{" not in (await site.admin("/metrics")).body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ranks_only", [True, False])
@served(flags={"quarantine_failures": 1})
async def test_a_clients_error_of_any_form_costs_one_prefill(
    site: Site, *, stream: bool, ranks_only: bool
) -> None:
    path = "/v1/completions"
    for count, error in enumerate(REFUSALS, start=1):
        handler = Refusing(error)
        (site.rank_handlers if ranks_only else site.handlers)[path.encode()] = handler
        await check_refused(site, path, values_for(path, stream=stream), error)
        assert handler.asked == 1
        assert len(site.received("prefill")) == count


@served(flags={"direct": "decode", "quarantine_failures": 1})
async def test_a_clients_error_is_one_on_every_route(site: Site) -> None:
    for path in BODIES:
        for stream in (True, False):
            for error in (FORMS[12][0], FORMS[27][0], FORMS[31][0]):
                site.rank_handlers[path.encode()] = handler = Refusing(error)
                values = values_for(path, stream=stream)
                await check_refused(site, path, values, error)
                assert handler.asked == 1


@pytest.mark.parametrize("flags", [{}, {"resume": "exact"}, {"first_token": "prefill"}], ids=str)
@served(flags=lambda flags: {"quarantine_failures": 1, **flags})
async def test_however_its_event_ends_and_whatever_the_proxy_asks(
    site: Site, flags: dict[str, object]
) -> None:
    path, error = "/v1/chat/completions", FORMS[12][0]
    for line_end in ("\n", "\r\n", "\r"):
        for tail in (True, False):
            handler = Refusing(error, line_end=line_end, tail=tail)
            site.rank_handlers[path.encode()] = handler
            answer = await site.post(path, values_for(path, stream=True, temperature=0))
            assert handler.asked == 1
            assert b"no" in answer.body
            assert b"[DONE]" not in answer.body
            assert site.world.ended[-1].retries == 0


@pytest.mark.parametrize("stream", [True, False])
@served()
async def test_an_engines_error_of_any_form_is_mended(site: Site, *, stream: bool) -> None:
    path = "/v1/completions"
    for error in (form for form, status in FORMS if status == 500):
        failing = Refusing(error)

        def once(
            engine: str, request: "HttpRequest", reply: "Reply", failing: Refusing = failing
        ) -> None:
            del site.rank_handlers[path.encode()]
            failing(engine, request, reply)

        site.rank_handlers[path.encode()] = once
        answer = await site.post(path, values_for(path, stream=stream))
        assert answer.status == 200
        assert answer.done if stream else answer.json["choices"]
        record = site.world.ended[-1]
        assert (record.outcome, record.retries) == (Outcome.OK, 1)


# Errors as OpenAI clients and vLLM's know them.


@pytest.mark.parametrize(
    "name", ["solo_err_unknown_model.resp", "mooncake_chat_stream_n2_decode.resp"]
)
def test_an_error_has_the_form_of_the_engines(name: str) -> None:
    theirs = transcript(name)
    error = json.loads(theirs)["error"]
    ours = error_body(error["code"], error["message"], param=error["param"])
    assert ours == theirs


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "BadRequestError"),
        (418, "BadRequestError"),
        (429, "RateLimitError"),
        (503, "ServiceUnavailableError"),
        (599, "InternalServerError"),
    ],
)
def test_the_type_follows_the_status(status: int, kind: str) -> None:
    assert json.loads(error_body(status, "no"))["error"] == {
        "message": "no",
        "type": kind,
        "param": None,
        "code": status,
    }


def test_an_error_event_is_one_event_whatever_the_message() -> None:
    message = 'two\n\nlines, "quotes", \r\0 and \ud800'
    event = error_event(502, message)
    assert EventScanner().feed(event) == [event]
    assert json.loads(event_data(event))["error"]["message"] == message


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_anthropics_errors_have_their_own_shape(status: int, kind: str) -> None:
    expected = {"type": "error", "error": {"type": kind, "message": "no"}}
    body = error_body(status, "no", param="x", endpoint="/v1/messages")
    assert json.loads(body) == expected
    event = error_event(status, "no", endpoint="/v1/messages")
    assert event == b"event: error\ndata: " + body + b"\n\n"


def test_an_error_event_of_the_responses_api_has_a_name() -> None:
    event = error_event(502, "no", endpoint="/v1/responses")
    assert event == b"event: error\ndata: " + error_body(502, "no") + b"\n\n"
