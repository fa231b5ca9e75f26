"""What the client of a stream has, when an engine begins the answer again."""

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest

from balanceroute.proxy.live.openai import delivered as module
from balanceroute.proxy.live.openai.delivered import DeliveredChoices, DeliveredEvents, DiffersError
from balanceroute.proxy.wire.sse import whole_events


def event(**members: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(members, separators=(",", ":")).encode()


def chat(index: int = 0, finish_reason: str | None = None, **delta: Any) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return event(id="a", choices=[choice])


def call(index: int = 0, **members: Any) -> bytes:
    return chat(tool_calls=[{"index": index, **members}])


def begun(index: int = 0, drawn: str = "call-1", name: str = "f") -> bytes:
    return call(index, id=drawn, type="function", function={"name": name})


def argument(text: str, index: int = 0) -> bytes:
    return call(index, function={"arguments": text})


def named(kind: str, **members: Any) -> bytes:
    data = json.dumps({"type": kind, **members}, separators=(",", ":")).encode()
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def passed(
    sent: module.Delivered, events: Iterable[bytes], *, may_abort: bool = False
) -> list[bytes]:
    """Return what the client gets of some events, as the readers have it."""
    got: list[bytes] = []
    for one in events:
        new = sent.leave_out(one, may_abort=may_abort) if sent.repeating else one
        got += map(sent.deliver, whole_events(new))
    return got


def choices_of(events: list[bytes]) -> list[Any]:
    return [choice for one in events for choice in json.loads(one[6:])["choices"]]


OPENING = chat(role="assistant", content="")
TALK = [
    OPENING,
    chat(reasoning="so"),
    chat(reasoning=" it is"),
    chat(content="Let"),
    chat(content=" me see"),
    begun(),
    argument('{"a":'),
    argument(" 1}"),
    begun(1, "call-2", "g"),
    argument("{}", 1),
    chat(finish_reason="tool_calls"),
    event(id="a", choices=[], usage={"total_tokens": 9}),
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize("broken", range(len(TALK) - 1))
def test_an_answer_goes_on_wherever_it_broke(broken: int) -> None:
    sent = DeliveredChoices()
    assert passed(sent, TALK[:broken]) == TALK[:broken]
    for _ in range(2):
        sent.begin_again()
        assert passed(sent, TALK[:broken]) == []
        assert not sent.repeating
    assert passed(sent, TALK[broken:]) == TALK[broken:]
    assert not sent.lost


@pytest.mark.parametrize("name", ["content", "reasoning"])
@pytest.mark.parametrize("text", ["plain", "naïve 数据", 'an "escape"', "back\\slash", '"}]'])
def test_text_is_the_same_however_it_is_written(name: str, text: str) -> None:
    """What is read without parsing, and what is parsed."""
    said: dict[str, Any] = {name: text}
    plain = chat(**said)
    loose = plain.replace(b'":', b'" :')
    spelled = json.dumps(json.loads(plain[6:]), ensure_ascii=False, separators=(",", ":"))
    for first, second in itertools.product(
        (plain, loose, b"data: %b\n\n" % spelled.encode()), repeat=2
    ):
        sent = DeliveredChoices()
        passed(sent, [first])
        sent.begin_again()
        assert passed(sent, [second]) == []
        assert not sent.repeating


def test_events_may_be_cut_otherwise() -> None:
    sent = DeliveredChoices()
    passed(sent, TALK[:7])
    sent.begin_again()
    merged = chat(
        content="Let me see",
        tool_calls=[
            {
                "index": 0,
                "id": "x",
                "type": "function",
                "function": {"name": "f", "arguments": '{"a": 1'},
            },
            {"index": 1, "id": "y", "type": "function", "function": {"name": "g"}},
        ],
    )
    got = passed(sent, [OPENING, chat(reasoning="so it"), chat(reasoning=" is"), merged])
    (choice,) = choices_of(got)
    assert choice["delta"] == {
        "tool_calls": [
            {"index": 0, "function": {"arguments": " 1"}},
            {"index": 1, "id": "y", "type": "function", "function": {"name": "g"}},
        ]
    }


def test_a_call_keeps_the_id_that_the_client_has() -> None:
    sent = DeliveredChoices()
    passed(sent, [OPENING, begun(drawn="mine"), argument("{")])
    sent.begin_again()
    again = [
        OPENING,
        begun(drawn="other"),
        argument("{"),
        call(id="other", function={"arguments": "}"}),
    ]
    (choice,) = choices_of(passed(sent, again))
    assert choice["delta"]["tool_calls"] == [
        {"index": 0, "id": "mine", "function": {"arguments": "}"}}
    ]


@pytest.mark.parametrize(
    "otherwise",
    [
        chat(content="Let you"),
        chat(reasoning="no"),
        chat(finish_reason="stop"),
        begun(name="g"),
        b"data: [DONE]\n\n",
        b"data: {\n\n",
        event(id="a", choices=[], usage={}),
    ],
)
def test_an_answer_that_goes_on_otherwise_is_found_out(otherwise: bytes) -> None:
    sent = DeliveredChoices()
    passed(sent, TALK[:7])
    sent.begin_again()
    assert passed(sent, TALK[:3]) == []
    with pytest.raises(DiffersError):
        sent.leave_out(otherwise)


def test_a_choice_ends_once() -> None:
    sent = DeliveredChoices()
    ended = chat(0, "length", content="b")
    passed(sent, [chat(0, content="a"), chat(1, content="x"), ended])
    sent.begin_again()
    rest = [chat(1, content="y"), chat(1, "length")]
    assert passed(sent, [chat(0, content="a"), chat(1, content="x"), ended, *rest]) == rest


def test_each_choice_comes_again_by_itself() -> None:
    sent = DeliveredChoices()
    passed(sent, [chat(0, content="a"), chat(1, content="x"), chat(1, content="y")])
    sent.begin_again()
    assert passed(sent, [chat(0, content="a")]) == []
    assert passed(sent, [chat(0, content="b")]) == [chat(0, content="b")]
    assert sent.repeating
    with pytest.raises(DiffersError):
        sent.leave_out(chat(1, content="z"))


def test_lists_come_again_entry_by_entry() -> None:
    def token(*ids: int, text: str = "", logprob: float = -0.5) -> bytes:
        logprobs: dict[str, Any] = {
            "tokens": [str(one) for one in ids],
            "token_logprobs": [logprob] * len(ids),
        }
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": None}
        return event(choices=[choice | {"prompt_token_ids": None, "token_ids": list(ids)}])

    sent = DeliveredChoices()
    passed(sent, [token(1, text="a"), token(2), token(3, text="bc")])
    sent.begin_again()
    # Log-probabilities may differ in their last digits.
    got = passed(sent, [token(1, 2, text="a", logprob=-0.51), token(3, 4, text="bcd")])
    (choice,) = choices_of(got)
    assert (choice["text"], choice["token_ids"]) == ("d", [4])
    assert choice["logprobs"] == {"tokens": ["4"], "token_logprobs": [-0.5]}
    sent.begin_again()
    with pytest.raises(DiffersError):
        sent.leave_out(token(1, 7, text="a"))


@pytest.mark.parametrize("unreadable", [b"data: {\n\n", b"data: 7\n\n"])
def test_nobody_begins_again_what_nobody_could_read(unreadable: bytes) -> None:
    for sent in (DeliveredChoices(), DeliveredEvents()):
        assert sent.deliver(unreadable) == unreadable
        assert sent.lost


def test_what_is_kept_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_KEPT", 3_000)
    sent = DeliveredChoices()
    many = [chat(content="ab") for _ in range(1_000)]
    assert (passed(sent, many), sent.lost) == (many, False)
    assert (passed(sent, many), sent.lost) == (many, True)
    places = DeliveredChoices()
    passed(places, [argument("", index) for index in range(20)])
    passed(places, [argument("x", index) for index in range(60)])
    assert places.lost


def test_a_stream_that_grew_too_long_while_it_was_repeated_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_KEPT", 500)
    sent = DeliveredChoices()
    passed(sent, [chat(0, content="a"), chat(1, content="x")])
    sent.begin_again()
    passed(sent, [chat(0, content="a" + 400 * "b")])
    assert sent.lost
    with pytest.raises(DiffersError):
        sent.leave_out(chat(1, content="x"))


def call_with_logprobs(tokens: str, held: int, sizes: Iterable[int]) -> list[bytes]:
    """Return the events of a call whose parser holds so many tokens back, in events of so many tokens."""
    events, said, at = [OPENING, begun()], 0, 0
    for size in sizes:
        at, before = min(len(tokens), at + size), at
        ended = at == len(tokens)
        until = max(said, at if ended else at - held)
        more = {"tool_calls": [{"index": 0, "function": {"arguments": tokens[said:until]}}]}
        choice: dict[str, Any] = {"index": 0, "delta": more if until > said else {}}
        choice["logprobs"] = {"content": [{"token": one} for one in tokens[before:at]]}
        choice["finish_reason"] = "tool_calls" if ended else None
        events.append(event(id="a", choices=[choice]))
        said = until
        if ended:
            return events
    raise AssertionError


@pytest.mark.parametrize("held", [*itertools.product([0, 1, 3], repeat=2)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_arguments_and_log_probabilities_come_again_out_of_step(
    held: tuple[int, int], size: int
) -> None:
    tokens = '{"a": "some words"}'
    first = call_with_logprobs(tokens, held[0], itertools.repeat(1))
    again = call_with_logprobs(tokens, held[1], itertools.chain([3], itertools.repeat(size)))
    for broken in range(1, len(first)):
        sent = DeliveredChoices()
        got = passed(sent, first[:broken])
        sent.begin_again()
        choices = choices_of(got + passed(sent, again))
        parts = [part for one in choices for part in one["delta"].get("tool_calls", ())]
        assert "".join(one["function"].get("arguments", "") for one in parts) == tokens
        entries = [
            one for choice in choices for one in (choice["logprobs"] or {}).get("content", ())
        ]
        assert "".join(one["token"] for one in entries) == tokens
        assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["tool_calls"]


def test_what_waits_has_a_limit_and_an_end() -> None:
    sent = DeliveredChoices()
    passed(sent, call_with_logprobs("a" * 200, 1, itertools.repeat(1))[:150])
    sent.begin_again()
    # What was said of tokens never comes again.
    assert passed(sent, [OPENING, begun()]) == []
    ahead = [argument("a" * 147), *[argument("a")] * 64]
    assert passed(sent, ahead) == []
    with pytest.raises(DiffersError):
        sent.leave_out(argument("a"))
    sent.begin_again()
    assert passed(sent, [OPENING, begun(), argument("a" * 148)]) == []
    with pytest.raises(DiffersError):
        sent.leave_out(chat(finish_reason="tool_calls"))


def test_values_of_an_engine_may_be_of_any_kind() -> None:
    strange: Any
    for strange in (
        7,
        1.5,
        True,
        None,
        [],
        {},
        [[1]],
        [{"index": 0}, 3],
        {"a": {"b": ["c", None]}},
    ):
        sent = DeliveredChoices()
        once = event(choices=[{"index": strange, "delta": {"content": "a", "x": strange}}, 3])
        assert passed(sent, [once]) == [once]
        sent.begin_again()
        assert passed(sent, [once]) == []
    deep: Any = "x"
    for _ in range(100):
        deep = {"a": deep}
    sent = DeliveredChoices()
    sent.deliver(chat(content=deep))
    assert sent.lost
    passed(events := DeliveredEvents(), [named("x", item=deep)])
    assert not events.lost


# Named events.

RESPONSE = {"id": "resp-1", "created_at": 7, "output": []}
ITEM = {"id": "fc-1", "type": "function_call", "name": "f", "call_id": "call-1"}


def response(drawn: str, created_at: int, pieces: list[str]) -> list[bytes]:
    """Return the events of a response with one call, numbered."""
    head = RESPONSE | {"id": f"resp-{drawn}", "created_at": created_at}
    item = ITEM | {"id": f"fc-{drawn}", "call_id": f"call-{drawn}", "arguments": ""}
    at = {"output_index": 0, "item_id": f"fc-{drawn}"}
    done = item | {"arguments": "".join(pieces)}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": head}),
        ("response.in_progress", {"response": head}),
        ("response.output_item.added", {"output_index": 0, "item": item}),
        *(("response.function_call_arguments.delta", at | {"delta": piece}) for piece in pieces),
        ("response.function_call_arguments.done", at | {"arguments": "".join(pieces)}),
        ("response.output_item.done", {"output_index": 0, "item": done}),
        ("response.completed", {"response": head | {"usage": {}, "output": [done]}}),
    ]
    return [
        named(kind, **members, sequence_number=number)
        for number, (kind, members) in enumerate(events)
    ]


@pytest.mark.parametrize("broken", range(10))
@pytest.mark.parametrize("pieces", [['{"a"', ": ", "1", "}"], ['{"a": 1}'], ['{"a": ', "1}"]])
def test_a_response_goes_on_with_the_ids_that_the_client_has(
    broken: int, pieces: list[str]
) -> None:
    sent = DeliveredEvents()
    right = response("mine", 7, ['{"a"', ": ", "1", "}"])
    passed(sent, right[:broken])
    sent.begin_again()
    got = passed(sent, response("other", 8, pieces))
    assert not any(b"resp-other" in one or b'"created_at":8' in one for one in got) or not broken
    assert not any(b"-other" in one for one in got) or broken < 3
    messages = [json.loads(one.partition(b"data: ")[2]) for one in right[:broken] + got]
    assert [one["sequence_number"] for one in messages] == list(range(len(messages)))
    whole = [one for one in messages if "delta" not in one]
    assert [one["type"] for one in whole] == [
        json.loads(one.partition(b"data: ")[2])["type"] for one in right if b'"delta"' not in one
    ]
    assert "".join(one.get("delta", "") for one in messages) == '{"a": 1}'
    if len(pieces) == 4 and broken >= 3:
        assert right[:broken] + got == right


def message_of(signature: str, texts: list[str]) -> list[bytes]:
    def delta(index: int, kind: str, name: str, text: str) -> bytes:
        return named("content_block_delta", index=index, delta={"type": kind, name: text})

    thinking = {"type": "thinking", "thinking": ""}
    return [
        named("message_start", message={"id": "m", "content": [], "usage": {"input_tokens": 3}}),
        named("content_block_start", index=0, content_block=thinking),
        delta(0, "thinking_delta", "thinking", "hm"),
        delta(0, "signature_delta", "signature", signature),
        named("content_block_stop", index=0),
        named("ping"),
        named("content_block_start", index=1, content_block={"type": "text", "text": ""}),
        *(delta(1, "text_delta", "text", text) for text in texts),
        named("content_block_stop", index=1),
        named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 9}),
        named("message_stop"),
    ]


@pytest.mark.parametrize("broken", range(13))
def test_a_message_goes_on_wherever_it_broke(broken: int) -> None:
    sent, right = DeliveredEvents(), message_of("a", ["one", " two", " three"])
    assert passed(sent, right[:broken]) == right[:broken]
    sent.begin_again()
    got = right[:broken] + passed(sent, message_of("b", ["one", " two", " three"]))
    drawn = (b"signature", b"ping")
    told_of, all_of = (
        [one for one in events if not any(name in one for name in drawn)] for events in (got, right)
    )
    assert told_of == all_of
    assert sum(b"signature" in one for one in got) == 1


def test_a_block_that_is_another_one_is_found_out() -> None:
    sent, right = DeliveredEvents(), message_of("a", ["one"])
    passed(sent, right)
    for place, otherwise in [
        (1, named("content_block_start", index=0, content_block={"type": "text", "text": ""})),
        (2, named("message_stop", index=9)),
        (3, b"event: x\ndata: {\n\n"),
        (3, b"data: [DONE]\n\n"),
    ]:
        sent.begin_again()
        assert passed(sent, right[:place]) == []
        with pytest.raises(DiffersError):
            sent.leave_out(otherwise)


def test_a_choice_that_was_told_to_end_repeats_nothing_more() -> None:
    sent = DeliveredChoices()
    passed(sent, [*TALK[:8], chat(1, content="Yes"), chat(2, "stop", content="No")])
    sent.begin_again()
    ends = [chat(index, "abort") for index in range(3)]
    assert sent.leave_out(TALK[1], may_abort=True) == b""
    got = [sent.leave_out(one, may_abort=True) for one in ends]
    assert got == [ends[0], ends[1], b""]  # The last one had ended.
    assert not sent.repeating
    # Whatever an engine says behind its end.
    assert sent.leave_out(chat(content="Let"), may_abort=True) == chat(content="Let")


@pytest.mark.parametrize("may_abort", [False, True])
def test_only_what_may_end_may_end_sooner(may_abort: bool) -> None:
    sent = DeliveredChoices()
    passed(sent, TALK[:5])
    sent.begin_again()
    with pytest.raises(DiffersError):
        sent.leave_out(chat(0, "stop"), may_abort=may_abort)
    with pytest.raises(DiffersError):  # It is to be the same as far as it goes.
        sent.leave_out(chat(0, "abort", content="Other"), may_abort=may_abort)


def given_up(events: list[bytes], said: int) -> list[bytes]:
    """Return what an engine says that gives an answer up behind so many of its events, as vLLM 0.32 does."""
    begun = [json.loads(one.partition(b"data: ")[2]) for one in events[:said]]
    if not events[0].startswith(b"event: response"):
        ends = [named("message_delta", delta={"stop_reason": None}), named("message_stop")]
        last = begun[-1] if begun else {}
        if last.get("type") in ("content_block_start", "content_block_delta"):
            ends.insert(0, named("content_block_stop", index=last["index"]))
        return [*events[:said], *ends]
    text = "".join(one.get("delta", "") for one in begun)
    done = ITEM | {"id": "fc-other", "call_id": "call-other", "arguments": text}
    closing = [
        ("response.function_call_arguments.done", {"output_index": 0, "arguments": text}),
        ("response.output_item.done", {"output_index": 0, "item": done}),
    ]
    if not any("item" in one for one in begun):
        closing, done = [], {}
    head = RESPONSE | {"id": "resp-other", "status": "completed", "output": [done] if done else []}
    ends = [named(kind, **members, sequence_number=1) for kind, members in closing]
    end = named("response.completed", response=head, sequence_number=2)
    return [*events[:said], *ends[max(0, said - len(events) + 3) :], end]


@pytest.mark.parametrize("said", range(1, 6))
@pytest.mark.parametrize("broken", [7, 6])
def test_a_response_that_is_given_up_by_order_ends_with_what_the_client_has(
    broken: int, said: int
) -> None:
    sent = DeliveredEvents()
    right = response("mine", 7, ['{"a"', ": ", "1", "}"])
    passed(sent, right[:broken])
    sent.begin_again()
    ends = given_up(response("other", 8, ['{"a"', ": ", "1", "}"]), said)
    got = passed(sent, ends, may_abort=True)
    assert not sent.repeating
    assert not any(b"-other" in one for one in got)
    messages = [json.loads(one.partition(b"data: ")[2]) for one in right[:broken] + got]
    assert [one["sequence_number"] for one in messages] == list(range(len(messages)))
    text = "".join(one.get("delta", "") for one in messages)
    assert text == "".join(['{"a"', ": ", "1", "}"][: broken - 3])
    *_, arguments, item, final = messages
    assert (arguments["arguments"], item["item"]["arguments"]) == (text, text)
    assert final["response"]["output"] == [item["item"]]
    assert item["item"]["id"] == arguments["item_id"] == "fc-mine"
    sent.begin_again()
    with pytest.raises(DiffersError):  # Nobody told it to.
        passed(sent, ends)


@pytest.mark.parametrize("said", range(1, 9))
@pytest.mark.parametrize("broken", [4, 8, 9])
def test_a_message_that_is_given_up_by_order_ends_with_what_the_client_has(
    broken: int, said: int
) -> None:
    sent, right = DeliveredEvents(), message_of("a", ["one", " two", " three"])
    passed(sent, right[:broken])
    sent.begin_again()
    ends = given_up(message_of("b", ["one", " two", " three"]), min(said, broken - 1))
    got = passed(sent, ends, may_abort=True)
    assert [one for one in got if b"signature" not in one] == [
        named("content_block_stop", index=int(broken > 4)),
        named("message_delta", delta={"stop_reason": None}),
        named("message_stop"),
    ]
    assert not sent.repeating


def test_what_ends_sooner_of_itself_differs_also_if_it_may_be_given_up() -> None:
    sent, right = DeliveredEvents(), message_of("a", ["one", " two"])
    passed(sent, right[:8])
    for otherwise in (
        named("message_delta", delta={"stop_reason": "end_turn"}),
        named("response.incomplete", response={}),
        named("content_block_start", index=1, content_block={"type": "tool_use"}),
        named("content_block_delta", index=1, delta={"type": "text_delta", "text": "two"}),
        named("message_stop"),
    ):
        sent.begin_again()
        passed(sent, right[:7])
        with pytest.raises(DiffersError):
            sent.leave_out(otherwise, may_abort=True)
