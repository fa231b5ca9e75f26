"""The ids of a stream's tokens: what is kept of them, and what the client sees."""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.live.opcodes import counted
from tests.live.stream_client import Client
from tests.support.site import transcript

from balanceroute.proxy.live.openai.stream_reader import RepeatedText, parsed
from balanceroute.proxy.live.openai.token_ids import BackedUpIds, Care, TokenIds
from balanceroute.proxy.wire.sse import EventScanner, event_data

_NAMES = re.compile(rb'"id":"[^"]*"|"created":\d+')

ROLE = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},'
    b'"logprobs":null,"finish_reason":null}],"prompt_token_ids":[1,22,333],"prompt_text":null}\n\n'
)


def chat(text: str, ids: bytes, *, finish: bytes = b"null") -> bytes:
    delta = json.dumps({"content": text} if text else {}).encode().replace(b": ", b":")
    return (
        b'data: {"id":"c","choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b,'
        b'"token_ids":%b}]}\n\n' % (delta, finish, ids)
    )


def completion(text: str, ids: bytes, prompt: bytes = b"null") -> bytes:
    return (
        b'data: {"id":"c","choices":[{"index":0,"text":%b,"logprobs":null,"finish_reason":null,'
        b'"stop_reason":null,"prompt_token_ids":%b,"token_ids":%b}]}\n\n'
        % (json.dumps(text).encode(), prompt, ids)
    )


def read(ids: TokenIds, *events: bytes, quick: bool = True) -> bytes:
    """Read events as a stream of completions has them read; return what is the client's."""
    passed = b""
    for event in events:
        if quick and (taken := ids.take_text(event[:-2])):
            passed += taken + b"\n\n"
            continue
        if b'"finish_reason":null' in event and ids.is_plain(event):
            passed += ids.take(event)
            continue
        message: dict[str, Any] | None = parsed(event)
        assert message is not None
        ids.note(event, message)
        passed += ids.hide(event, message)
    return passed


def test_the_client_sees_what_an_engine_writes_that_was_asked_for_no_ids() -> None:
    ids = TokenIds()
    events = [chat(" a", b"[7]"), chat("", b"[8]"), chat(" b", b"[9,10]")]
    passed = read(ids, ROLE, *events, chat("", b"[2]", finish=b'"stop"'))
    assert passed == (
        ROLE.replace(b"[1,22,333]", b"null")
        + chat(" a", b"null")
        + chat(" b", b"null")
        + chat("", b"null", finish=b'"stop"')
    )


def bare(*choices: dict[str, Any], **more: object) -> bytes:
    """Return an event of an engine that writes no member that is null, such as vLLM's Rust frontend."""
    text = json.dumps({"id": "c", "choices": list(choices), **more}, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


def said(text: str | None, of_chat: bool, **more: object) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"index": 0, **({"delta": delta} if of_chat else {"text": text or ""}), **more}


@pytest.mark.parametrize("of_chat", [True, False])
def test_of_an_engine_that_writes_no_nulls_the_client_sees_none(*, of_chat: bool) -> None:
    ids = TokenIds()
    role = {"index": 0, "delta": {"role": "assistant"}}
    prompt: list[object] = [1, 22, 333]
    begin = (
        bare(role, prompt_token_ids=prompt)
        if of_chat
        else bare(said("", of_chat, prompt_token_ids=prompt))
    )
    tokens = [bare(said(" a", of_chat, token_ids=[7])), bare(said(" b", of_chat, token_ids=[8, 9]))]
    end = bare(said(None, of_chat, finish_reason="stop", stop_reason="x"))
    passed = read(ids, begin, *tokens, end)
    # A completion's prompt comes only if it is asked for.
    expected = bare(role) if of_chat else b""
    assert passed == expected + bare(said(" a", of_chat)) + bare(said(" b", of_chat)) + end
    assert (ids.prompt, ids.seen) == (b"1,22,333", 3)


def test_a_prompt_beside_a_token_is_of_an_engine_that_writes_nulls() -> None:
    ends = {"logprobs": {}, "finish_reason": "stop", "stop_reason": "x"}
    told = {"prompt_token_ids": [1], "token_ids": [7]}
    untold = dict.fromkeys(told)
    passed = read(TokenIds(), bare(said(" a", of_chat=False, **ends, **told)))
    assert passed == bare(said(" a", of_chat=False, **ends, **untold))


@pytest.mark.parametrize(
    "members", ['"token_ids": [7]', '"token_ids" : [ 7, 8 ]', '"token_ids":[]']
)
@pytest.mark.parametrize("form", ["%s, %s", "%s, %s, %s"])
def test_what_is_cut_leaves_no_comma(members: str, form: str) -> None:
    text = '"index": 0, "text": "\\"token_ids\\":[7]"'
    for parts in ([members, text], [text, members], [text, members, '"x": [1]']):
        if form.count("%s") != len(parts):
            continue
        event = b'data: {"choices": [{%b}]}\n\n' % (form % tuple(parts)).encode()
        left = ", ".join(part for part in parts if part is not members)
        assert read(TokenIds(), event) == b'data: {"choices": [{%b}]}\n\n' % left.encode()


@pytest.mark.parametrize("event", [chat, completion])
def test_the_quick_way_comes_to_the_same(event: Callable[[str, bytes], bytes]) -> None:
    first = ROLE if event is chat else completion("", b"[1]", b"[1,22,333]")
    odd = [
        ('"', b"[7]"),
        ("", b"[8]"),
        (" b", b"[9]"),
        (" c", b"[10,11]"),
        ("d", b"[12]"),
        ("", b"[]"),
    ]
    quick, slow = TokenIds(), TokenIds()
    for text, token_ids in [
        (" a", b"[5]"),
        ('"finish', b"[6]"),
        *odd,
        ("e", b"[13]"),
        ("f", b"[]"),
    ]:
        assert not quick.prompt or quick.take_text(event(text, b"null")[:-2]) == b""
        one = event(text, token_ids)
        assert read(quick, first, one) == read(slow, first, one, quick=False)
        assert (quick.kept, quick.behind, quick.lost) == (slow.kept, slow.behind, slow.lost)
    assert quick.kept.endswith(b",13")


def test_the_quick_way_takes_text_with_one_id_alone() -> None:
    ids = TokenIds()
    assert ids.take_text(chat(" a", b"[7]")[:-2]) == b""  # The prompt's are not known yet.
    read(ids, ROLE)
    assert ids.take_text(chat(" a", b"[7]")[:-2]) == chat(" a", b"null")[:-2]
    for event in (
        chat("", b"[8]"),
        chat(" a", b"[8,9]"),
        chat(" a", b"[]"),
        chat(" a", b"[8]", finish=b'"stop"'),
        chat(" a", b"[8]").replace(b'"logprobs":null', b'"logprobs":{}'),
        chat(" a", b"[8]").rstrip() + b" \n\n",
        completion(" a", b"[8]"),
        chat(" a", b"[8]").replace(b"[8]}]}", b"[8}}"),  # A list without an end.
        *(chat(" a", b"[%b]" % one) for one in (b'"8"', b"null", b"-8", b"8.5", b" 8")),
    ):
        assert ids.take_text(event[:-2]) == b"", event
    assert ids.kept == b"7"


@pytest.mark.parametrize("event", [chat, completion])
def test_the_quick_way_takes_the_events_of_each_vllm(event: Callable[[str, bytes], bytes]) -> None:
    """`weight_versions` and `kv_transfer_params` came with vLLM 0.33."""
    ids = TokenIds()
    read(ids, ROLE if event is chat else completion("x", b"[1]", b"[1,22,333]"))
    for text in (" a", " b"):
        assert ids.take_text(event(text, b"[7]")[:-2]) == event(text, b"null")[:-2]
        newer = event(text, b"[8]").replace(
            b"}]}", b',"weight_versions":null}],"kv_transfer_params":null}'
        )
        assert ids.take_text(newer[:-2]) == newer.replace(b"[8]", b"null")[:-2]
    assert ids.kept.endswith(b"7,8,7,8")


def test_ids_count_up_to_the_last_event_with_text() -> None:
    ids = TokenIds()
    read(ids, ROLE, chat(" a", b"[7]"), chat("", b"[8]"))
    assert (ids.prompt, ids.kept, ids.count) == (b"1,22,333", b"7", 1)
    read(ids, chat(" b", b"[9]"))
    assert (ids.kept, ids.count) == (b"7,8,9", 3)
    assert ids.usable
    assert ids.head == b'data: {"id":"c",'


def test_the_first_event_of_a_completion_has_the_prompt_too() -> None:
    ids = TokenIds()
    passed = read(ids, completion("a", b"[7]", b"[1,2]"), completion("", b"[8]"))
    assert passed == completion("a", b"null") + completion("", b"null")
    assert (ids.prompt, ids.kept) == (b"1,2", b"7")


def test_of_several_ids_in_an_event_the_text_is_kept_until_one_comes_alone() -> None:
    ids = TokenIds()
    read(ids, ROLE, chat(" a", b"[7]"), chat(" b c", b"[8,9]"), chat("", b"[10]"))
    assert (ids.kept, ids.behind) == (b"7", " b c")
    read(ids, chat(" d", b"[11]"))
    assert (ids.kept, ids.behind) == (b"7,8,9,10,11", "")


def test_what_the_client_has_is_left_out_and_anything_else_is_noticed() -> None:
    repeated = RepeatedText(" b c")
    assert [repeated.trim(" b"), repeated.left] == ["", " c"]
    assert [repeated.trim(" c d"), repeated.left] == [" d", ""]
    assert repeated.trim(" e") == " e"
    assert RepeatedText(" b c").trim(" x") is None


def test_ids_of_a_long_answer_are_joined() -> None:
    ids = TokenIds()
    read(ids, ROLE, *(chat(" a", b"[%d]" % number) for number in range(2_000)))
    assert ids.count == 2_000
    assert ids.kept == b",".join(b"%d" % number for number in range(2_000))


@pytest.mark.parametrize(
    "event",
    [
        chat(" a", b"null"),
        chat(" a", b'["x"]'),
        chat(" a", b"[-1]"),
        chat(" a", b"[7", finish=b"null"),
        chat(" a", b"[7]").rstrip() + b" \n\n",
        chat("", b"[7]", finish=b'"length"'),
        ROLE.replace(b'"role":"assistant","content":""', b'"reasoning":"so"'),
    ],
    ids=repr,
)
def test_what_says_no_ids_or_more_than_text_cannot_be_continued(event: bytes) -> None:
    ids = TokenIds()
    read(ids, ROLE, chat(" b", b"[5]"))
    assert ids.usable
    try:
        read(ids, event)
    except AssertionError:
        return  # No JSON: the reader takes that as lost by itself.
    assert not ids.usable


def test_without_the_prompts_ids_nothing_can_be_continued() -> None:
    ids = TokenIds()
    read(ids, ROLE.replace(b'"prompt_token_ids":[1,22,333],', b""), chat(" a", b"[7]"))
    assert not ids.usable


def test_a_real_stream_becomes_the_one_without_ids() -> None:
    """The same request to vLLM 0.32 with and without `return_token_ids`."""
    ids = TokenIds()
    scanner = EventScanner()
    *events, done = scanner.feed(transcript("solo_chat_stream_tokenids.resp"))
    assert event_data(done) == b"[DONE]"
    passed = read(ids, *events) + done
    plain = transcript("solo_chat_stream.resp")
    assert _NAMES.sub(b"", passed) == _NAMES.sub(b"", plain)
    assert ids.prompt.startswith(b"1,1534,201,456,")
    # But for the one with which the answer ends.
    assert ids.count == 7
    assert ids.kept.endswith(b",285,1666,485")


@pytest.mark.parametrize(
    ("care", "ids"),
    [
        (Care(3, 3), [1, 2]),  # No event says where the text of one id ends.
        (Care(20_000, 20_000), [1]),  # A stop string that is longer than the answer.
    ],
    ids=["several ids", "long stop"],
)
def test_an_event_costs_no_more_behind_many_others(care: Care, ids: list[int]) -> None:
    event = b'data: {"choices":[{"index":0,"text":"ab","token_ids":%b}]}\n\n' % str(ids).encode()
    message = json.loads(event_data(event))
    kept = BackedUpIds(care)
    kept.prompt = b"1"
    costs = []
    for events in (1_000, 4_000, 1_000):
        opcodes: Counter[str] = Counter()
        for _ in range(events - 10):
            kept.note(event, message)
        with counted(opcodes):
            for _ in range(10):
                kept.note(event, message)
        costs.append(opcodes.total())
    assert costs[0] == costs[1] == costs[2]
    assert kept.behind == "ab" * 6_000


def test_tokens_that_the_client_does_not_see_leave_its_opening_waiting() -> None:
    client = Client(ids=TokenIds())
    client.answer(ROLE, chat("", b"[7]"), chat("", b"[8]"))
    # Who takes token events in the reader's place would send the first without what opens the answer.
    assert not client.reader.plain
    assert client.turns == []
    client.answer(chat(" b", b"[9]"))
    assert client.received == ROLE.replace(b"[1,22,333]", b"null") + chat(" b", b"null")
    assert client.reader.plain
