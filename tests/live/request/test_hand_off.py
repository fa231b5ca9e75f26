"""The prefill that a decode rank calls for: asked once, tried elsewhere, given up, and never counted twice."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balanceroute.proxy.core.events import PrefillerId, RequestId
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import Prefiller, Role, Status, Target
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.shape import Api
from balanceroute.proxy.live.request.client_answer import Emitted
from balanceroute.proxy.live.request.failures import Failure, What
from balanceroute.proxy.live.request.hand_off import HandOff
from balanceroute.proxy.live.request.shared import (
    LegFailed,
    LegSucceeded,
    RemotePrefillEnded,
    Report,
)
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.wire.messages import WireError, WireFault

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.wire.http1.client import Endpoint, ResponseHandler

PARAMS = {"do_remote_decode": True, "remote_engine_id": "d0", "remote_block_ids": [[1, 2]]}
RESET = WireError(WireFault.RESET, "gone", sent=True, answered=False)


class Sent:
    """One request to a prefiller."""

    def __init__(self, engine: int, path: bytes, headers: bytes, body: bytes) -> None:
        self.engine = engine
        self.path = path
        self.headers = headers
        self.values = json.loads(body)
        self.aborted = False
        self.handler: ResponseHandler

    def abort(self) -> None:
        self.aborted = True

    def answer(self, status: int, body: bytes = b"{}") -> None:
        self.handler.on_head(status, [])
        self.handler.on_data(body)
        self.handler.on_end()


class Site:
    """A host with prefillers that answer by hand."""

    def __init__(self, count: int, *, attempts: int = 3, budget: int = 100) -> None:
        flags = {"prefill": ["http://p"], "decode": ["http://d"], "retry_attempts": attempts}
        self.now_s = 5.0
        self.context = SimpleNamespace(legs=make_config(None, flags).legs, clock=lambda: self.now_s)
        # Which of them died, when it was asked, and whether it says so itself.
        self.dead: list[tuple[int, float, bool]] = []
        self.most_deaths = 100  # Of them.
        self.budget = budget
        self.sent: list[Sent] = []  # What they were sent.
        self.told: list[object] = []  # What became of the hand-off.
        self.blamed: list[tuple[int, Fault]] = []  # Which of them failed, and how.
        self.praised: list[int] = []
        self.prefillers = [self._prefiller(i) for i in range(count)]

    def _prefiller(self, i: int) -> Prefiller:
        target = Target(Role.PREFILL, f"http://p{i}")
        endpoint = cast("Endpoint", _Endpoint(i, self.sent))
        return Prefiller(PrefillerId(i), target.url, target, endpoint)

    def choose_prefiller(
        self, number: RequestId, other_than: PrefillerId | None
    ) -> Prefiller | None:
        assert number == 3
        able = [one for one in self.prefillers if one.status is Status.UP]
        chosen = next((one for one in able if one.id != other_than), able[0] if able else None)
        if chosen is not None:
            chosen.hand_offs += 1
        return chosen

    def may_retry(self, leg: str, fault: Fault, *, lost_with: Target | None) -> bool:
        assert leg == "prefill"
        assert fault in Fault
        assert lost_with in (None, *(one.target for one in self.prefillers))
        self.budget -= 1
        return self.budget >= 0

    def report(self, report: Report) -> None:
        match report:
            case LegFailed(target, fault, reason):
                assert reason
                self.blamed.append((int(target.url[-1]), fault))
            case LegSucceeded(target):
                self.praised.append(int(target.url[-1]))
            case RemotePrefillEnded(prefiller):
                self.prefillers[prefiller].hand_offs -= 1
            case _:
                raise AssertionError(report)

    def engine_died(self, engine: Prefiller, sent_s: float, *, said: bool) -> bool:
        self.dead.append((int(engine.target.url[-1]), sent_s, said))
        return len(self.dead) < self.most_deaths

    def hand_off(self, other_than: Prefiller | None = None) -> HandOff:
        body = RequestBody(b'{"prompt":"a","max_tokens":9,"stream":true}')
        session = SimpleNamespace(
            host=self,
            number=RequestId(3),
            silent_prefiller=other_than,
            headers=b"x-request-id: r\r\n",
            emitted=Emitted(),
            engine_died=self.engine_died,
            crashed=self.told.append,
        )
        return HandOff(
            cast("Session", session),
            Api.COMPLETIONS,
            body,
            prefilled=self.told.append,
            failed=self.told.append,
        )

    @property
    def running(self) -> list[int]:
        return [one.hand_offs for one in self.prefillers]


def faults(site: Site) -> list[Fault]:
    """Return why the decode leg waits in vain."""
    failures = [one for one in site.told if isinstance(one, Failure)]
    assert all(one.what is What.NO_PREFILL for one in failures)
    return [one.fault for one in failures]


class _Endpoint:
    def __init__(self, engine: int, sent: list[Sent]) -> None:
        self._engine = engine
        self._sent = sent

    def request(
        self, method: bytes, path: bytes, headers: bytes, body: bytes, handler: Any, **_: object
    ) -> Sent:
        assert method == b"POST"
        sent = Sent(self._engine, path, headers, body)
        sent.handler = handler
        self._sent.append(sent)
        return sent


def busy(hand_off: HandOff) -> list[Target]:
    """Return who prefills at present."""
    return [] if hand_off.target is None else [hand_off.target]


def test_nothing_is_sent_before_the_rank_calls() -> None:
    site = Site(1)
    hand_off = site.hand_off()
    assert busy(hand_off) == []
    assert hand_off.prefiller is None
    assert site.sent == []
    hand_off.abort()
    assert site.running == [0]


def test_a_call_becomes_a_prefill_with_what_the_rank_posted() -> None:
    site = Site(1)
    hand_off = site.hand_off()
    hand_off.take(PARAMS)
    (sent,) = site.sent
    assert (sent.path, sent.headers) == (b"/v1/completions", b"x-request-id: r\r\n")
    assert sent.values == {
        "prompt": "a",
        "max_tokens": 1,
        "min_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": PARAMS,
    }
    assert busy(hand_off) == [site.prefillers[0].target]
    assert site.running == [1]
    sent.answer(200, b'{"a":1}')
    assert site.told == [b'{"a":1}']
    assert site.praised == [0]
    assert site.running == [0]
    assert busy(hand_off) == []
    assert hand_off.prefiller is site.prefillers[0]


def test_a_second_call_changes_nothing() -> None:
    site = Site(2)
    hand_off = site.hand_off()
    for _ in range(2):
        hand_off.take(PARAMS)
    site.sent[0].answer(200)
    hand_off.take(PARAMS)
    assert len(site.sent) == 1
    assert len(site.told) == 1


def status(code: int) -> Callable[[Sent], None]:
    return lambda sent: sent.answer(code)


def in_words(code: int) -> Callable[[Sent], None]:
    """Answer 200 with an error."""
    return lambda sent: sent.answer(200, b'{"error":{"message":"no","code":%d}}' % code)


def broken(sent: Sent) -> None:
    sent.handler.on_error(RESET)


@pytest.mark.parametrize(
    ("fail", "blamed"),
    [
        (broken, [(0, Fault.RESET)]),
        (status(500), [(0, Fault.SERVER_ERROR)]),
        (status(503), []),  # Busy, not broken.
        (status(404), []),  # It has no such route.
        (status(429), []),
        (in_words(500), [(0, Fault.SERVER_ERROR)]),
        (in_words(503), []),
    ],
)
def test_another_prefiller_is_asked(
    fail: Callable[[Sent], None], blamed: list[tuple[int, Fault]]
) -> None:
    site = Site(2)
    site.hand_off().take(PARAMS)
    fail(site.sent[0])
    assert site.blamed == blamed
    assert site.running == [0, 1]
    assert site.told == []
    assert site.sent[1].values == site.sent[0].values
    site.sent[1].answer(200)
    assert site.told == [b"{}"]


@pytest.mark.parametrize("fail", [status(400), status(422), in_words(400)])
def test_a_clients_own_error_costs_one_prefill(fail: Callable[[Sent], None]) -> None:
    site = Site(2)
    site.hand_off().take(PARAMS)
    fail(site.sent[0])
    assert (len(site.sent), site.blamed, site.running) == (1, [], [0, 0])
    (failure,) = site.told
    assert isinstance(failure, Failure)
    assert failure.what is What.REFUSED


def test_of_a_route_that_no_prefiller_has_one_of_them_is_named() -> None:
    site = Site(2, attempts=3)
    site.hand_off().take(PARAMS)
    for i in range(3):
        assert site.told == []
        status(404)(site.sent[i])
    (failure,) = site.told
    assert isinstance(failure, Failure)
    assert (failure.what, failure.blamed) == (What.REFUSED, site.prefillers[0].target)


def test_it_is_tried_no_more_often_than_any_leg() -> None:
    site = Site(2, attempts=3)
    site.hand_off().take(PARAMS)
    for i in range(3):
        assert site.told == []
        broken(site.sent[i])
    assert [sent.engine for sent in site.sent] == [0, 1, 0]
    assert faults(site) == [Fault.RESET]
    assert site.running == [0, 0]


DEAD = b'{"error": {"message": "EngineCore encountered an issue. See above."}}'


@pytest.mark.parametrize(
    ("fail", "said"), [(broken, False), (lambda sent: sent.answer(500, DEAD), True)]
)
def test_no_more_prefillers_get_a_prompt_than_may_die_of_it(
    fail: Callable[[Sent], None], said: bool
) -> None:
    site = Site(3)
    site.most_deaths = 2
    site.hand_off().take(PARAMS)
    fail(site.sent[0])
    site.now_s = 6.0
    assert site.told == []
    fail(site.sent[1])
    assert len(site.told) == 1
    assert len(site.sent) == 2
    assert site.dead == [(0, 5.0, said), (1, 5.0, said)]


def test_a_prefiller_that_was_not_reached_has_not_died() -> None:
    site = Site(2)
    site.hand_off().take(PARAMS)
    site.sent[0].handler.on_error(WireError(WireFault.CONNECT, "no", sent=False, answered=False))
    assert site.dead == []
    assert len(site.sent) == 2


def test_without_a_retry_left_it_is_given_up() -> None:
    site = Site(2, budget=0)
    site.hand_off().take(PARAMS)
    broken(site.sent[0])
    assert faults(site) == [Fault.RESET]


def test_without_a_prefiller_it_is_given_up() -> None:
    site = Site(0)
    site.hand_off().take(PARAMS)
    assert faults(site) == [Fault.CONNECT]


def test_an_aborted_prefill_is_stopped_and_counts_no_more() -> None:
    site = Site(1)
    hand_off = site.hand_off()
    hand_off.take(PARAMS)
    for _ in range(2):
        hand_off.abort()
    assert site.sent[0].aborted
    assert site.running == [0]
    assert site.told == []


def test_a_prefill_moves_when_its_prefiller_is_removed() -> None:
    site = Site(2)
    hand_off = site.hand_off()
    hand_off.take(PARAMS)
    site.prefillers[0].status = Status.REMOVED
    hand_off.move()
    assert site.sent[0].aborted
    assert [sent.engine for sent in site.sent] == [0, 1]
    assert site.running == [0, 1]
    assert site.blamed == []


def test_who_hung_before_is_asked_last() -> None:
    site = Site(2)
    site.hand_off(site.prefillers[0]).take(PARAMS)
    assert [sent.engine for sent in site.sent] == [1]
    alone = Site(1)
    alone.hand_off(alone.prefillers[0]).take(PARAMS)
    assert [sent.engine for sent in alone.sent] == [0]


def test_an_answer_without_end_is_left_at_the_limit() -> None:
    site = Site(2)
    hand_off = site.hand_off()
    hand_off.take(PARAMS)
    (first,) = site.sent
    first.handler.on_head(200, [])
    limit = site.context.legs.answer_limit_bytes
    for _ in range(limit // (1 << 24)):
        first.handler.on_data(bytes(1 << 24))
    assert [one.aborted for one in site.sent] == [False]
    first.handler.on_data(b"1")
    assert [one.aborted for one in site.sent] == [True, False]
    assert site.running == [0, 1]
    assert site.blamed == [(0, Fault.PROTOCOL)]
    site.sent[1].answer(200, b"{}")
    assert site.told == [b"{}"]
    assert site.running == [0, 0]
