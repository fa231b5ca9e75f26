"""Levels and deadlines: what clients may say, what is ignored, and what a proxy does with them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.live.frontend.gateway_requests import BODY, TALK, is_error
from tests.support.site import Exchanged, Site, play, served

from balanceroute.proxy.live.openai.urgency import urgency

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ((), 3),
        ((b"u=0",), 0),
        ((b" u=7 ",), 7),
        ((b"u=1, i",), 1),
        ((b"i,u=2",), 2),
        ((b"i=?0\t,\tu=2;x=y;z",), 2),
        # The last one counts, on one line and on several.
        ((b"u=1, u=5",), 5),
        ((b"u=1", b"u=6"), 6),
        # Members of any type are passed over.
        ((b'a="x, \\"u=0", b=:aGk=:, c=1.5, d=tok/en, e=(1 2;p "s");q, f=(), u=4',), 4),
        # Out of range or of another type: as if it were not there.
        ((b"u=8",), 3),
        ((b"u=-1",), 3),
        ((b"u=2.0",), 3),
        ((b"u",), 3),
        ((b"u=(1)",), 3),
        ((b'u="1"',), 3),
        ((b"u=1, u=9",), 3),
        # No dictionary: all of it is ignored.
        ((b"u=1,",), 3),
        ((b"u=1 i",), 3),
        ((b"u=1, ,i",), 3),
        ((b"u =1",), 3),
        ((b"U=1",), 3),
        ((b'u=1, a="',), 3),
        ((b"u=1", b""), 3),
        ((b"\xff",), 3),
        # Longer than anybody writes it.
        ((b"u=1" + b", a=1" * 300,), 3),
    ],
)
def test_the_priority_header_is_read_as_the_rfc_says(
    fields: tuple[bytes, ...], expected: int
) -> None:
    headers = [(b"accept", b"u=0"), *((b"priority", field) for field in fields)]
    assert urgency(headers) == expected


@given(st.text('u=0123456789,; \t()"\\?:.-ai*', max_size=40))
def test_no_priority_header_fails(field: str) -> None:
    assert 0 <= urgency([(b"priority", field.encode())]) <= 7


async def started(site: Site, requests: list[Exchanged]) -> list[str | None]:
    """Wait for all requests; return the order in which their prefills started."""
    for request in requests:
        assert (await request.end()).status == 200, request.body
    names = [seen.header(b"x-request-id") for seen in site.received("prefill")]
    return [None if name is None else name.decode().partition("-")[0][-1] for name in names]


ONE_AT_A_TIME = {"probe_limit": 1}


@pytest.mark.parametrize("allowed", [False, True])
def test_levels_decide_who_starts_if_they_are_allowed(allowed: bool) -> None:
    async def scenario(site: Site) -> None:
        def send(name: bytes, level: int | None = None, field: bytes | None = None) -> Exchanged:
            headers = [(b"x-request-id", name)]
            if field is not None:
                headers.append((b"priority", field))
            values = BODY if level is None else BODY | {"priority": level}
            return site.send(COMPLETIONS, values, headers=headers)

        # The first one is in prefill while the others arrive.
        requests = [send(b"a"), send(b"b"), send(b"c", field=b"u=2"), send(b"d", level=-2)]
        requests.append(send(b"e", level=1, field=b"u=0"))
        expected = ["a", "d", "c", "b", "e"] if allowed else ["a", "b", "c", "d", "e"]
        assert await started(site, requests) == expected

    flags = ONE_AT_A_TIME | {"queue_order": "abs", "client_priority": allowed}
    play(scenario, prefillers=1, flags=flags)


@served(flags={"client_priority": True})
async def test_a_message_has_only_the_header(site: Site) -> None:
    values = TALK | {"priority": "high"}
    answer = await site.post(MESSAGES, values, [(b"priority", b"u=1")])
    assert answer.status == 200, answer.body


WRONG = [b"", b"0", b"-5", b"1.5", b"1e309", b"NaN", b"soon", b"5, 5", b"86400001", b"1" * 30]


@pytest.mark.parametrize("value", [*WRONG, None])
@pytest.mark.parametrize("name", ["X-Request-Deadline-Ms", "X-Answer-Deadline-Ms"])
def test_a_wrong_deadline_is_refused_whatever_it_would_do(name: str, value: bytes | None) -> None:
    line = (name.lower().encode(), b"5" if value is None else value)
    lines = [line, line] if value is None else [line]

    async def scenario(site: Site) -> None:
        message = f"{name} must be given once, as an integer from 1 to 86400000"
        for path, values in ((CHAT, TALK), (COMPLETIONS, BODY), ("/v1/embeddings", BODY)):
            answer = await site.post(path, values, lines)
            assert is_error(answer, 400) == message
            assert answer.json["error"]["param"] == name
        for path in (MESSAGES, "/v1/responses"):
            answer = await site.post(path, TALK, lines)
            assert (answer.status, message in answer.json["error"]["message"]) == (400, True)
        assert site.seen == []

    for allowed in (False, True):
        play(scenario, flags={"client_deadline": allowed})


def test_only_who_may_come_is_told_of_a_wrong_deadline(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)

    async def scenario(site: Site) -> None:
        wrong = [(b"x-answer-deadline-ms", b"soon")]
        assert (await site.post(CHAT, TALK, wrong)).status == 401
        key = (b"authorization", b"Bearer secret")
        assert (await site.post(CHAT, TALK, [*wrong, key])).status == 400

    play(scenario, flags={"api_key_file": str(keys)})


@served(flags={"client_deadline": True})
async def test_the_deadline_of_an_answer_is_none_of_its_first_token(site: Site) -> None:
    answer = await site.post(CHAT, TALK, [(b"x-answer-deadline-ms", b"1")])
    assert answer.status == 200
    assert all(one.header(b"x-answer-deadline-ms") is None for one in site.seen)


@pytest.mark.parametrize("allowed", [False, True])
@served(prefillers=1, flags=lambda allowed: ONE_AT_A_TIME | {"client_deadline": allowed})
async def test_a_request_past_its_deadline_starts_no_leg(site: Site, allowed: bool) -> None:
    first = site.send(COMPLETIONS, BODY)
    due = [(b"x-request-deadline-ms", b"1")]
    second = await site.post(COMPLETIONS, BODY, due)
    assert (await first.end()).status == 200
    if allowed:
        assert is_error(second, 503) == "the request waited longer than it may"
        assert second.header(b"retry-after") == b"1"
    else:
        assert second.status == 200
    assert len(site.received("prefill")) == 2 - allowed


def test_the_earliest_deadline_goes_first() -> None:
    async def scenario(site: Site) -> None:
        def send(name: bytes, deadline_ms: bytes) -> Exchanged:
            headers = [(b"x-request-id", name), (b"x-request-deadline-ms", deadline_ms)]
            return site.send(COMPLETIONS, BODY, headers=headers)

        requests = [send(b"a", b"90000"), send(b"b", b"80000"), send(b"c", b"60000")]
        assert await started(site, requests) == ["a", "c", "b"]

    flags = ONE_AT_A_TIME | {"queue_order": "edf", "client_deadline": True}
    play(scenario, prefillers=1, flags=flags)


@served(prefillers=1, flags=ONE_AT_A_TIME | {"queue_order": "srpt"})
async def test_the_least_work_goes_first(site: Site) -> None:
    def send(name: bytes, max_tokens: int) -> Exchanged:
        values = BODY | {"max_tokens": max_tokens}
        return site.send(COMPLETIONS, values, headers=[(b"x-request-id", name)])

    # Without history the survival predictor expects every output to reach its limit.
    requests = [send(b"a", 9), send(b"b", 30), send(b"c", 20)]
    assert await started(site, requests) == ["a", "c", "b"]
