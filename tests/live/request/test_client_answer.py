"""The probe's answer as the whole answer: as a decode engine would have given it."""

import json
from typing import Any

import pytest
from tests.support.site import transcript

from balanceroute.proxy.live.openai.answer import is_message, message_events
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.shape import Api, read_shape
from balanceroute.proxy.live.request.client_answer import (
    short_answer_body,
    short_answer_events,
)
from balanceroute.proxy.live.request.continued import Continued
from balanceroute.proxy.live.request.leg_settings import Resume
from balanceroute.proxy.wire.sse import EventScanner, event_data


def stopped(body: bytes) -> dict[str, Any]:
    """Return a real probe's answer as if its one token had ended it."""
    message: dict[str, Any] = json.loads(body)
    message["choices"][0] |= {"finish_reason": "stop", "stop_reason": "END"}
    return message


def sent(stream: bytes) -> list[dict[str, Any]]:
    """Return the objects of a stream, which must end as streams do."""
    events = [event_data(event) for event in EventScanner().feed(stream)]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.GENERATE])
def test_a_stream_leaves_out_what_is_null_in_usage_at_any_depth(api: Api) -> None:
    message = stopped(transcript("nixl_chat_stream_usage_prefill.resp"))
    details = {"cached_tokens": 3, "created_cache_tokens": None, "multimodal_tokens": None}
    message["usage"] |= {"prompt_tokens_details": details}
    *_, last = sent(short_answer_events(api, message, include_usage=True))
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_a_whole_answer_tells_nothing_of_the_kv_cache() -> None:
    message = stopped(transcript("nixl_chat_stream_usage_prefill.resp"))
    body = json.loads(short_answer_body(message))
    assert body == message | {"kv_transfer_params": None}
    assert list(body) == list(message)
    assert message["kv_transfer_params"]


@pytest.mark.parametrize(
    ("api", "probe", "stream"),
    [
        (Api.CHAT, "nixl_chat_stream_usage_prefill.resp", "solo_chat_stream_usage.resp"),
        (Api.COMPLETIONS, "nixl_cmpl_nonstream_prefill.resp", "solo_cmpl_stream_usage.resp"),
    ],
)
def test_a_stream_has_the_members_of_a_real_one_in_their_order(
    api: Api, probe: str, stream: str
) -> None:
    message = stopped(transcript(probe))
    ours = sent(short_answer_events(api, message, include_usage=True))
    real = sent(transcript(stream))
    # The first events, the last token's, and the usage. Null members that some versions add may lack.
    theirs = [real[0], real[-2], real[-1]] if api is Api.CHAT else [real[-2], real[-1]]
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert list(our) == [name for name in their if name in our]
        assert our["object"] == their["object"]
        assert len(our["choices"]) == len(their["choices"])
        for ours_of, theirs_of in zip(our["choices"], their["choices"], strict=True):
            assert list(ours_of) == [name for name in theirs_of if name in ours_of]
            assert not {name for name in theirs_of if theirs_of[name] is not None} - set(ours_of)
    assert list(ours[-1]["usage"]) == list(theirs[-1]["usage"])
    assert ours[-1]["system_fingerprint"] == message["system_fingerprint"]


def test_the_fingerprint_is_in_the_last_event_if_there_is_no_usage() -> None:
    message = stopped(transcript("nixl_chat_stream_usage_prefill.resp"))
    opening, token = sent(short_answer_events(Api.CHAT, message, include_usage=False))
    assert "system_fingerprint" not in opening
    assert list(token)[-1] == "system_fingerprint"


def test_a_chat_stream_says_what_the_answer_says() -> None:
    message = stopped(transcript("nixl_chat_stream_usage_prefill.resp"))
    message["choices"][0]["message"]["content"] = "Ja \U0001f999"
    message["choices"][0]["logprobs"] = {"content": [{"token": "Ja"}]}
    opening, token = sent(short_answer_events(Api.CHAT, message, include_usage=False))
    assert opening["id"] == token["id"] == message["id"]
    assert opening["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert token["choices"] == [
        {
            "index": 0,
            "delta": {"content": "Ja \U0001f999"},
            "logprobs": {"content": [{"token": "Ja"}]},
            "finish_reason": "stop",
            "stop_reason": "END",
            "token_ids": None,
        }
    ]


def test_a_completion_stream_says_what_the_answer_says() -> None:
    message = stopped(transcript("mooncake_cmpl_stream_logprobs_prefill.resp"))
    (event,) = sent(short_answer_events(Api.COMPLETIONS, message, include_usage=False))
    choice = message["choices"][0]
    assert event["choices"] == [
        {
            "index": 0,
            "text": choice["text"],
            "logprobs": choice["logprobs"],
            "finish_reason": "stop",
            "stop_reason": "END",
            "prompt_token_ids": None,
            "token_ids": None,
        }
    ]


def test_the_usage_is_the_answers() -> None:
    message = stopped(transcript("nixl_chat_stream_usage_prefill.resp"))
    usage = sent(short_answer_events(Api.CHAT, message, include_usage=True))[-1]
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 187, "total_tokens": 188, "completion_tokens": 1}


@pytest.mark.parametrize(
    ("said", "delta"),
    [
        ({"content": "", "refusal": None}, {}),
        ({"content": None, "reasoning": "hm"}, {"reasoning": "hm"}),
        (
            {"content": None, "tool_calls": [{"id": "a"}, {"id": "b"}, "odd"]},
            {"tool_calls": [{"index": 0, "id": "a"}, {"index": 1, "id": "b"}]},
        ),
        (None, {}),
        ("odd", {}),
    ],
)
def test_a_message_becomes_a_delta(said: object, delta: dict[str, Any]) -> None:
    message = {"choices": [{"message": said, "finish_reason": "stop"}], "usage": {}}
    token = sent(short_answer_events(Api.CHAT, message, include_usage=False))[-1]
    assert token["choices"][0]["delta"] == delta


def test_a_text_that_is_no_unicode_does_not_break_the_answer() -> None:
    message = {"choices": [{"text": "\ud800", "finish_reason": "stop"}], "usage": {}}
    (event,) = sent(short_answer_events(Api.COMPLETIONS, message, include_usage=False))
    assert event["choices"][0]["text"] == "?"
    assert b"\\ud800" not in short_answer_body(message)


def test_a_message_of_every_block_is_told_as_a_stream_of_it() -> None:
    text = {"type": "text", "text": "a"}
    thought = {"type": "thinking", "thinking": "b", "signature": "s"}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}
    message = {"id": "m", "type": "message", "role": "assistant", "content": [thought, text, call]}
    message |= {"model": "tiny", "stop_reason": "stop_sequence", "stop_sequence": "END"}
    usage = {"input_tokens": 2, "output_tokens": 1, "cache_read_input_tokens": 3}
    assert is_message(message | {"usage": usage})
    events = EventScanner().feed(message_events(message | {"usage": usage}))
    values = [json.loads(event_data(event)) for event in events]
    assert [b"event: %b\n" % value["type"].encode() for value in values] == [
        event.partition(b"data")[0] for event in events
    ]
    # Only the last usage tells what was cached.
    assert values[0]["message"]["usage"] == {"input_tokens": 5, "output_tokens": 0}
    assert (values[0]["message"]["content"], values[0]["message"]["stop_reason"]) == ([], None)
    blocks = [value["content_block"] for value in values if "content_block" in value]
    assert blocks == [
        {"type": "thinking", "thinking": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "1", "name": "f", "input": {}},
    ]
    deltas = [value["delta"] for value in values if value["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == [
        *("thinking_delta", "signature_delta", "text_delta", "input_json_delta"),
    ]
    assert json.loads(deltas[-1]["partial_json"]) == {"x": 1}
    stop = {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert values[-2] == {"type": "message_delta", "delta": stop, "usage": usage}
    assert values[-1] == {"type": "message_stop"}


def test_a_message_without_text_has_no_block_in_a_stream() -> None:
    message: dict[str, Any] = {"id": "m", "model": "tiny", "stop_reason": "end_turn"}
    message |= {"content": [{"type": "text", "text": ""}], "usage": {"input_tokens": 1}}
    assert b"content_block" not in message_events(message)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": None},
        {"model": 1},
        {"usage": None},
        {"content": "a"},
        {"content": [{"type": "image"}]},
        {"content": [{"text": "a"}]},
        {"content": ["a"]},
        {"stop_reason": None},
    ],
    ids=str,
)
def test_what_is_no_message_is_not_told_as_one(changes: dict[str, Any]) -> None:
    message: dict[str, Any] = {"id": "m", "model": "tiny", "stop_reason": "end_turn"}
    message |= {"content": [{"type": "text", "text": ""}], "usage": {"input_tokens": 1}}
    assert is_message(message)
    assert not is_message(message | changes)


# What a request emitted on earlier bindings: whether another rank can go on from it.


OPENING = (
    b'data: {"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":null,'
    b'"prompt_token_ids":[1,2],"token_ids":[]}]}\n\n'
)
TOKEN = (
    b'data: {"choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":null,'
    b'"stop_reason":null,"token_ids":[7]}]}\n\n'
)


@pytest.mark.parametrize(("limit", "goes_on"), [(2, False), (3, True), (None, True)])
def test_an_answer_that_has_reached_its_limit_is_not_continued(
    limit: int | None, goes_on: bool
) -> None:
    values = {"prompt": "a", "stream": True, "temperature": 0, "max_tokens": limit}
    body = RequestBody(json.dumps(values).encode())
    shape = read_shape(Api.COMPLETIONS, body, max_sequences=8)
    emitted = Continued()
    ids = emitted.ids_to_keep(shape, body, Resume.EXACT, parses=False, prompt_tokens=2)
    assert ids is not None
    ids.note(OPENING, json.loads(OPENING[6:]))
    for _ in range(2):
        ids.take(TOKEN)
    assert ids.count == 2
    assert emitted.takes(ids, shape) is goes_on
