"""The soak's judge: what it takes for right, and what it does not."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from balanceroute.proxy.testing.soak.audit import contradiction, held_by_engines, held_by_proxy
from balanceroute.proxy.testing.soak.client import Seen
from balanceroute.proxy.testing.soak.plans import Leaving, Plan
from balanceroute.proxy.testing.soak.verdict import Kind, Verdict, judge

STREAM = Plan(
    name="r",
    data=b"",
    chat=False,
    stream=True,
    wants_usage=True,
    prompt_tokens=3,
    texts=(" a b", " c"),
    reasons=("length", "stop"),
    tokens=4,
    leaving=None,
    fresh=False,
)
WHOLE = replace(STREAM, stream=False)
LEAVING = Leaving(0.0, None, in_body=False, reset=True)
HEADERS = [(b"x-request-id", b"r")]


def event(index: int, text: str, reason: str | None = None) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage(prompt: int = 3, completion: int = 4) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


ERROR = b'data: {"error": {"message": "broken"}}\n\n'
DONE = b"data: [DONE]\n\n"
BEGINNING = event(0, " a") + event(1, " c")
TEXT = BEGINNING + event(0, " b", "length") + event(1, "", "stop")
RIGHT = TEXT + usage() + DONE


def streamed(body: bytes, *, complete: bool = True, left: bool = False) -> Seen:
    return Seen(200, HEADERS, bytearray(body), complete=complete, left=left)


def answered(change: Callable[[dict[str, object]], object] = lambda _: None) -> Seen:
    answer: dict[str, object] = {
        "choices": [
            {"index": 1, "text": " c", "finish_reason": "stop"},
            {"index": 0, "text": " a b", "finish_reason": "length"},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
    }
    change(answer)
    return Seen(200, HEADERS, bytearray(json.dumps(answer).encode()), complete=True)


@pytest.mark.parametrize(
    ("plan", "seen", "kind"),
    [
        (STREAM, streamed(RIGHT), Kind.RIGHT),
        (WHOLE, answered(), Kind.RIGHT),
        (STREAM, streamed(BEGINNING + ERROR, complete=False), Kind.ERROR),
        (STREAM, streamed(BEGINNING + ERROR + DONE), Kind.ERROR),
        (STREAM, streamed(BEGINNING, complete=False, left=True), Kind.LEFT),
        (STREAM, Seen(left=True), Kind.LEFT),
        (
            STREAM,
            streamed(event(0, "", "stop") + event(1, "", "stop") + usage(3, 2) + DONE),
            Kind.ENDED_EARLY,
        ),
        (WHOLE, Seen(502, [], bytearray(ERROR[6:]), complete=True), Kind.ERROR),
    ],
)
def test_what_is_right_is_taken_for_right(plan: Plan, seen: Seen, kind: Kind) -> None:
    assert judge(plan, seen) == Verdict(kind, seen.status)


@pytest.mark.parametrize(
    ("plan", "seen", "words"),
    [
        (STREAM, streamed(TEXT + usage()), "[DONE] is not the end"),
        (STREAM, streamed(RIGHT + event(0, " x")), "[DONE] is not the end"),
        (STREAM, streamed(BEGINNING + usage() + DONE), "said"),
        (STREAM, streamed(event(0, " b") + RIGHT), "not of"),
        (STREAM, streamed(event(0, " a") + RIGHT), "not of"),
        (STREAM, streamed(event(1, " x"), complete=False, left=True), "not of"),
        (STREAM, streamed(TEXT + DONE), "usage is None"),
        (STREAM, streamed(TEXT + usage(3, 5) + DONE), "usage is"),
        (STREAM, streamed(TEXT + usage(2, 4) + DONE), "usage is"),
        (STREAM, streamed(BEGINNING, complete=False), "without a word"),
        (STREAM, streamed(b'data: {"cho\n\n' + RIGHT), "cannot be read"),
        (STREAM, streamed(event(0, "", "stop") + event(1, "", "stop") + usage() + DONE), "usage"),
        (replace(STREAM, wants_usage=False), streamed(RIGHT), "usage is"),
        (replace(STREAM, name="s"), streamed(RIGHT), "does not name its request"),
        (WHOLE, answered(lambda one: one.update(choices=[])), "usage is"),
        (WHOLE, answered(lambda one: one.pop("usage")), "cannot be read"),
        (WHOLE, replace(answered(), complete=False), "cut off"),
        (WHOLE, Seen(ending="closed"), "no answer"),
        (WHOLE, Seen(hung=True), "no end"),
        (WHOLE, Seen(malformed="bad chunk"), "not HTTP"),
        (WHOLE, Seen(400, [], bytearray(ERROR[6:]), complete=True), "status 400"),
        (WHOLE, Seen(502, [], bytearray(b"oops"), complete=True), "the error is"),
        (WHOLE, Seen(502, [], bytearray(ERROR[6:])), "the error is cut off"),
    ],
)
def test_what_is_wrong_is_told(plan: Plan, seen: Seen, words: str) -> None:
    assert words in judge(plan, seen).wrong


@pytest.mark.parametrize(
    ("verdict", "line", "leaving"),
    [
        (Verdict(Kind.RIGHT, 200), ("ok", 200, 3), None),
        (Verdict(Kind.RIGHT, 200), ("cancelled", 200, 4), None),
        (Verdict(Kind.RIGHT, 200), None, None),
        (Verdict(Kind.ENDED_EARLY, 200), ("ok", 200, 4), None),
        (Verdict(Kind.ERROR, 502), ("upstream_error", 504, 0), None),
        (Verdict(Kind.ERROR, 502), ("ok", 502, 0), None),
        (Verdict(Kind.LEFT, 200), ("ok", 200, 0), LEAVING),
        (Verdict(Kind.LEFT, 200), None, LEAVING),
        (Verdict(Kind.LEFT, 0), ("cancelled", 0, 0), replace(LEAVING, in_body=True)),
    ],
)
def test_a_log_line_that_contradicts_the_client_is_told(
    verdict: Verdict, line: tuple[str, int, int] | None, leaving: Leaving | None
) -> None:
    names = ("outcome", "status", "output_tokens")
    logged = None if line is None else dict(zip(names, line, strict=True))
    assert contradiction(replace(STREAM, leaving=leaving), verdict, logged)


@pytest.mark.parametrize(
    ("verdict", "line", "leaving"),
    [
        (Verdict(Kind.RIGHT, 200), ("ok", 200, 4), None),
        (Verdict(Kind.ENDED_EARLY, 200), ("ok", 200, 2), None),
        (Verdict(Kind.ERROR, 502), ("upstream_error", 502, 0), None),
        (Verdict(Kind.LEFT, 200), ("ok", 200, 4), LEAVING),
        (Verdict(Kind.LEFT, 200), ("cancelled", 200, 1), LEAVING),
        (Verdict(Kind.LEFT, 0), None, LEAVING),
    ],
)
def test_a_log_line_that_agrees_is_no_contradiction(
    verdict: Verdict, line: tuple[str, int, int] | None, leaving: Leaving | None
) -> None:
    names = ("outcome", "status", "output_tokens")
    logged = None if line is None else dict(zip(names, line, strict=True))
    assert not contradiction(replace(STREAM, leaving=leaving), verdict, logged)


def test_whatever_is_held_is_told() -> None:
    rank = {"name": "d", "kv_tokens": 0, "bound": 0, "started": 0}
    prefiller = {"name": "p", "probes": 0, "held_tokens": 0}
    counts = ("queued", "prefilling", "pooled", "decoding", "client_connections")
    state = dict.fromkeys(counts, 0) | {"ranks": [rank], "prefillers": [prefiller]}
    assert held_by_proxy(state) == {}
    for name in counts:
        assert list(held_by_proxy(state | {name: 2}).values()) == [2]
    for name in ("kv_tokens", "bound", "started"):
        assert held_by_proxy(state | {"ranks": [rank | {name: 3}]}) == {f"{name} of d": 3}
    for name in ("probes", "held_tokens"):
        held = held_by_proxy(state | {"prefillers": [prefiller | {name: 3}]})
        assert held == {f"{name} of p": 3}
    lists = ("loads", "running", "waiting", "arriving", "held_blocks")
    stats = {name: [0, 0] for name in lists} | {
        "idle": True,
        "leases": {"held": 0},
        "misreads": 0,
    }
    assert held_by_engines(stats) == {}
    for name in lists:
        assert held_by_engines(stats | {name: [0, 1]}) == {name: [0, 1]}
    assert held_by_engines(stats | {"idle": False})
    assert held_by_engines(stats | {"leases": {"held": 1}})
    assert held_by_engines(stats | {"misreads": 1}) == {"misreads": 1}
