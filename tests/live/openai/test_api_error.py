"""Errors as OpenAI clients and vLLM's know them."""

import json

import pytest
from tests.support.site import transcript

from balanceroute.proxy.live.openai.errors import error_body, error_event
from balanceroute.proxy.wire.sse import EventScanner, event_data


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
