"""Whole answers: which headers pass, what is read out of the body, and the one correction."""

import json

import pytest
from tests.support.site import transcript

from balanceroute.proxy.live.openai.answer import (
    counts_of,
    is_aborted,
    is_recomputed,
    passable_headers,
    stops_at_recomputed,
    stream_headers,
)
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.shape import Api

DETAILED = (
    b'{"choices":[{"message":{"content":"\\"usage\\":{\\"cached_tokens\\":1}"}}],'
    b'"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens": 8}}}'
)


PASSED = [
    (b"content-type", b"application/octet-stream"),
    (b"metadata", b'{"data":[{"index":0}]}'),
    (b"content-encoding", b"gzip"),
    (b"retry-after", b"7"),
    (b"www-authenticate", b"Bearer"),
    (b"cache-control", b"no-store"),
    (b"content-disposition", b"attachment"),
    (b"location", b"/v1/other"),
    (b"server", b"uvicorn"),
    (b"vary", b"Accept-Encoding"),
    (b"x-accel-buffering", b"no"),
    (b"x-vllm-anything", b"\xff"),
]


def test_headers_pass_but_for_those_of_a_connection_or_a_whole_site() -> None:
    others = [
        (name, b"x")
        for name in (
            *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
            *(b"transfer-encoding", b"content-length", b"proxy-authenticate"),
            *(b"set-cookie", b"alt-svc", b"strict-transport-security", b"clear-site-data"),
            *(b"access-control-allow-origin", b"access-control-anything", b"timing-allow-origin"),
            *(b"x-request-id", b"x-balanceroute-model", b"x-ratelimit-limit-tokens"),
            *(b"x-accel-redirect", b"x-sendfile"),
        )
    ]
    assert passable_headers([*others, *PASSED, *others]) == PASSED


def test_headers_that_the_connection_names_are_for_the_next_hop() -> None:
    named = [(b"connection", b"close, X-Hop ,"), (b"connection", b"x-other")]
    headers = [(b"x-hop", b"1"), (b"x-other", b"2"), *PASSED, *named]
    assert passable_headers(headers) == PASSED


def test_headers_are_few_enough_for_every_client() -> None:
    many = [(b"x-%d" % i, b"") for i in range(1_000)]
    assert passable_headers(many) == many[:64]


def test_a_stream_is_not_gathered_on_its_way() -> None:
    engines = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"yes")]
    assert stream_headers(engines) == [engines[0], (b"x-accel-buffering", b"no")]


@pytest.mark.parametrize(
    ("body", "recomputed"),
    [
        (b'{"choices":[{"finish_reason":"stop","stop_reason":"recomputed"}]}', True),
        (b'{"choices":[{"stop_reason" : 1}, {"stop_reason": \n"recomputed"}]}', True),
        (b'{"choices":[{"stop_reason":null,"text":"recomputed"}]}', False),
        (b'{"choices":[{"text":"\\"stop_reason\\":\\"recomputed\\""}]}', False),
        (b'{"content":[{"input":{"stop_reason":"recomputed"}}]}', False),
        (b'{"choices":[{"stop_reason":"recomputed","x":NaN}]}', True),
        (b'{"choices":[1,{"stop_reason":["recomputed"]}]}', False),
        (b'{"choices":"recomputed"}', False),
        (b"recomputed", False),
        (b'"recomputed"', False),
        (b"", False),
    ],
)
def test_a_request_that_a_rank_gave_back_is_told(body: bytes, recomputed: bool) -> None:
    assert is_recomputed(Api.CHAT, body) is recomputed


@pytest.mark.parametrize(
    ("body", "recomputed"),
    [
        (b'{"stop_reason":"stop_sequence","stop_sequence":"recomputed"}', True),
        (b'{"stop_reason":"end_turn","stop_sequence":"recomputed"}', False),
        (b'{"stop_reason":"recomputed"}', False),
        (b'{"content":[{"stop_reason":"stop_sequence","stop_sequence":"recomputed"}]}', False),
        (b'{"choices":[{"stop_reason":"recomputed"}]}', False),
    ],
)
def test_a_message_that_a_rank_gave_back_names_a_stop_sequence(
    body: bytes, recomputed: bool
) -> None:
    assert is_recomputed(Api.MESSAGES, body) is recomputed


@pytest.mark.parametrize(
    ("api", "body", "aborted"),
    [
        (Api.CHAT, b'{"choices":[{"finish_reason":"abort"}]}', True),
        (
            Api.COMPLETIONS,
            b'{"choices":[{"finish_reason":"stop"},{"finish_reason":"abort"}]}',
            True,
        ),
        (Api.GENERATE, b'{"choices":[{"finish_reason":"length","x":"abort"}]}', False),
        (Api.CHAT, b'{"choices":[{"message":{"finish_reason":"abort"}}]}', False),
        (Api.MESSAGES, b'{"type":"message","content":[],"stop_reason":null}', True),
        (Api.MESSAGES, b'{"type":"message","content":[]}', True),
        (Api.MESSAGES, b'{"type":"message","stop_reason":"end_turn"}', False),
        (Api.MESSAGES, b'{"type":"error"}', False),
        (Api.MESSAGES, b"<html>", False),
        (Api.RESPONSES, b'{"status":"cancelled"}', True),
        (Api.RESPONSES, b'{"status":"completed","metadata":{"status":"cancelled"}}', False),
        (Api.RESPONSES, b'{"metadata":{"finish_reason":"abort"}}', False),
        # What is no UTF-8, or deeper than any decoder goes, tells nothing.
        (Api.CHAT, b'{"choices":[{"\xff":1,"finish_reason":"abort"}]}', False),
        (Api.MESSAGES, b'{"type":"\xff"}', False),
        (Api.MESSAGES, b'{"a":' + b"[" * 5_000, False),
    ],
)
def test_what_an_engine_gave_up_is_told(api: Api, body: bytes, aborted: bool) -> None:
    assert is_aborted(api, body) is aborted


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("nixl_chat_stream_usage_prefill.resp", (187, 1)),
        ("nixl_cmpl_nonstream_decode.resp", (176, 24)),
        ("solo_err_unknown_model.resp", (0, 0)),
    ],
)
def test_tokens_of_a_real_answer_are_counted(name: str, counts: tuple[int, int]) -> None:
    assert counts_of(transcript(name)) == counts
    assert not is_recomputed(Api.CHAT, transcript(name))


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        (DETAILED, (9, 3)),
        # A token of that name among the log-probabilities.
        (b'{"top_logprobs":[{"prompt_tokens":7}],"usage":{"prompt_tokens":4}}', (4, 0)),
        # The Responses and Messages APIs.
        (b'{"usage": {"input_tokens": 4, "output_tokens": 5}}', (4, 5)),
        (
            b'{"usage":{"input_tokens":4,"output_tokens":5,"cache_creation_input_tokens":6,'
            b'"cache_read_input_tokens":16}}',
            (26, 5),
        ),
        (b'{"usage":{"prompt_tokens":4}}', (4, 0)),
        (b'{"usage":null}', (0, 0)),
        (b'{"text":"prompt_tokens"}', (0, 0)),
        (b'{"usage":{"prompt_tokens":-4,"completion_tokens":"5"}}', (0, 0)),
        (b'{"usage":{"prompt_tokens":1e9,"completion_tokens":' + b"9" * 5_000 + b"}}", (0, 0)),
        (b"\xff\x00", (0, 0)),
    ],
)
def test_counts_are_taken_from_the_usage_object_alone(body: bytes, counts: tuple[int, int]) -> None:
    assert counts_of(body) == counts


@pytest.mark.parametrize(
    ("stop", "may"),
    [
        ("recomputed", True),
        (["a", "recomputed"], True),
        ("a", False),
        (None, False),
        (["a" * 10] * 20_000, True),  # Too large to be read, so it may.
    ],
)
def test_a_stop_word_may_look_like_a_hand_back(stop: object, may: bool) -> None:
    body = RequestBody(json.dumps({"prompt": "a", "stop": stop}).encode())
    assert stops_at_recomputed(body) is may
