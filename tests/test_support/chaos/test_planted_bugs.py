"""The audit is not blind: bugs planted in the proxy are found within a few seeds."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.support.chaos.trial import run_seed

from balanceroute.proxy.core.admission import Ending, TenantLimits
from balanceroute.proxy.core.admission.tenants import Tenants
from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.prefill import Prefillers
from balanceroute.proxy.core.waiting import Pool
from balanceroute.proxy.live.engines.instances import Rank, Status
from balanceroute.proxy.live.frontend import refusals
from balanceroute.proxy.live.frontend.request_head import Clients
from balanceroute.proxy.live.openai.completion_stream import CompletionStream
from balanceroute.proxy.live.openai.errors import error_event
from balanceroute.proxy.live.request.client_answer import ClientAnswer
from balanceroute.proxy.live.request.decode_attempt import DecodeAttempt
from balanceroute.proxy.live.request.failures import Failure, Next, Rule, triage
from balanceroute.proxy.live.request.relay import Relay
from balanceroute.proxy.live.request.session import Attempt, Session
from balanceroute.proxy.live.request.shared import SessionEnded
from balanceroute.proxy.live.scheduling.driver import Feedback, RetryBudget, SessionTable
from balanceroute.proxy.live.security import Tenant
from balanceroute.proxy.live.telemetry.record import Leg, Outcome, RequestRecord
from balanceroute.proxy.wire.http1 import server_connection
from balanceroute.proxy.wire.http1.client import Call
from balanceroute.proxy.wire.messages import Headers

REQUESTS = 30
SEEDS = 30

Patch = pytest.MonkeyPatch
BUGS: dict[str, tuple[Callable[[Patch], None], str, int]] = {}


def bug(
    found: str, *, seed: int = 0
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a bug, with what is said of it, and from which seed on it is soon met."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[plant.__name__] = plant, found, seed
        return plant

    return register


@bug("books: ")
def a_prefillers_budget_is_never_given_back(patch: Patch) -> None:
    patch.setattr(Prefillers, "release", lambda *_: None)


@bug("holders: ", seed=25)
def half_a_head_holds_its_connection(patch: Patch) -> None:
    patch.setattr(server_connection, "loss_of_head", lambda *_: None)


@bug("held: driver")
def a_request_id_stays_in_use(patch: Patch) -> None:
    remove = SessionTable.remove

    def forget(self: SessionTable, number: RequestId, record: RequestRecord) -> bool:
        self._ids[record.request_id] += 1
        return remove(self, number, record)

    patch.setattr(SessionTable, "remove", forget)


@bug("held: tenants", seed=2)
def a_tenants_request_counts_for_ever(patch: Patch) -> None:
    ended = Tenants.ended

    def forget(self: Tenants, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        if ending.served:
            ended(self, ticket, ending, now_ns)

    patch.setattr(Tenants, "ended", forget)


@bug("with a key that is nobody's", seed=4)
def any_key_is_the_first_tenants(patch: Patch) -> None:
    find = Clients.find

    def guess(self: Clients, headers: Headers) -> Tenant | None:
        return find(self, headers) or next(iter(self._owners.values()), None)

    patch.setattr(Clients, "find", guess)


@bug("is logged as", seed=4)
def a_refused_request_is_not_logged_as_rejected(patch: Patch) -> None:
    patch.setattr(refusals, "outcome_of", lambda _: Outcome.CLIENT_ERROR)


@bug("that its tenant has not", seed=14)
def a_tenant_is_held_to_another_ones_limits(patch: Patch) -> None:
    change = Tenants.change

    def mix(self: Tenants, limits: Mapping[str, TenantLimits], now_ns: int) -> None:
        change(self, dict(zip(limits, [*limits.values()][::-1], strict=True)), now_ns)

    patch.setattr(Tenants, "change", mix)


def rewrite(patch: Patch, change: Callable[[int, bytes], list[bytes]]) -> None:
    """Let a stream's pieces go to the client as `change` says, by their number."""
    init: Any = Relay.__init__

    def changed(self: Relay, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        write = self._write
        numbers = iter(range(1_000_000))

        def write_changed(data: bytes) -> None:
            for piece in change(next(numbers), data):
                write(piece)

        self._write = write_changed

    patch.setattr(Relay, "__init__", changed)


@bug("belongs")
def an_event_is_sent_twice(patch: Patch) -> None:
    rewrite(patch, lambda number, data: [data, data] if number == 2 else [data])


@bug("belongs")
def an_event_is_lost(patch: Patch) -> None:
    rewrite(patch, lambda number, data: [] if number == 2 else [data])


@bug("belongs")
def a_client_gets_another_ones_events(patch: Patch) -> None:
    last = [b""]

    def swap(number: int, data: bytes) -> list[bytes]:
        other, last[0] = last[0], data
        return [other or data] if number == 1 else [data]

    rewrite(patch, swap)


@bug("belongs")
def a_client_gets_another_ones_answer(patch: Patch) -> None:
    send, last = ClientAnswer.send, [b""]

    def swapped(self: ClientAnswer, status: int, headers: Headers, body: bytes) -> None:
        if status == 200:
            body, last[0] = last[0] or body, body
        send(self, status, headers, body)

    patch.setattr(ClientAnswer, "send", swapped)


@bug("it ended too soon (complete)", seed=58)
def a_short_stream_ends_as_if_it_were_whole(patch: Patch) -> None:
    on_end = Relay.on_end

    def end(self: Relay) -> None:
        if isinstance(self.reader, CompletionStream):
            self.reader.finished = self.reader._sequences
        on_end(self)

    patch.setattr(Relay, "on_end", end)


@bug("it ended too soon (cut)", seed=6)
def a_stream_breaks_off_without_a_word(patch: Patch) -> None:
    fail = ClientAnswer.fail

    def break_off(
        self: ClientAnswer, status: int, reason: str, *, retry_after_s: int | None = None
    ) -> None:
        if self.opened:
            self.reply.abort()
        else:
            fail(self, status, reason, retry_after_s=retry_after_s)

    patch.setattr(ClientAnswer, "fail", break_off)


@bug("its stream ends as if there had been no error", seed=13)
def a_stream_that_failed_ends_in_good_order(patch: Patch) -> None:
    fail = ClientAnswer.fail

    def end(
        self: ClientAnswer, status: int, reason: str, *, retry_after_s: int | None = None
    ) -> None:
        if self.opened:
            self.reply.write(error_event(status, reason))
            self.reply.end()
        else:
            fail(self, status, reason, retry_after_s=retry_after_s)

    patch.setattr(ClientAnswer, "fail", end)


@bug("was sent to decode with a lease that had ended", seed=10)
def a_lease_never_lapses(patch: Patch) -> None:
    patch.setattr(Pool, "lapsed", lambda *_: list[RequestId]())


@bug("misread: ", seed=12)
def a_kv_cache_that_may_have_been_pulled_is_offered_again(patch: Patch) -> None:
    """A rank that broke off had pulled it, and its blocks are another prompt's by now."""

    def offer_again(leg: Leg, failure: Failure, **known: Any) -> Rule:
        rule = triage(leg, failure, **known)
        return replace(rule, then=Next.OTHER_RANK) if rule.then is Next.NEW_KV else rule

    patch.setattr("balanceroute.proxy.live.request.session.triage", offer_again)


@bug("poison: 3 engines died of ", seed=70)
def a_post_is_sent_again_by_the_http_client(patch: Patch) -> None:
    """The engine had done its work when the connection was lost."""
    made: Any = Call

    def repeatable(*args: Any) -> Any:
        return made(*args[:4], True, *args[5:])

    patch.setattr("balanceroute.proxy.wire.http1.client.Call", repeatable)


@bug("abort: ", seed=92)
def an_engine_is_not_told_that_the_client_left(patch: Patch) -> None:
    patch.setattr(Attempt, "close", lambda _: None)


@bug("the proxy did not log it")
def a_request_is_not_logged(patch: Patch) -> None:
    ended = Feedback._session_ended

    def end(self: Feedback, report: SessionEnded) -> None:
        log, self._log = self._log, Nowhere()
        ended(self, report)
        self._log = log

    patch.setattr(Feedback, "_session_ended", end)


class Nowhere:
    """Takes what is to be logged, and forgets it."""

    def request_ended(self, record: object) -> None:
        del record


@bug("requests req-")
def a_request_is_logged_twice(patch: Patch) -> None:
    ended = Feedback._session_ended

    def end(self: Feedback, report: SessionEnded) -> None:
        ended(self, report)
        self._log.request_ended(report.record)

    patch.setattr(Feedback, "_session_ended", end)


@bug("timers, there were")
def a_timer_is_left_behind(patch: Patch) -> None:
    ended = Feedback._session_ended

    def end(self: Feedback, report: SessionEnded) -> None:
        ended(self, report)
        asyncio.get_running_loop().call_later(3600.0, lambda: None)

    patch.setattr(Feedback, "_session_ended", end)


@bug("tasks, there were")
def a_task_is_left_behind(patch: Patch) -> None:
    ended = Feedback._session_ended

    def end(self: Feedback, report: SessionEnded) -> None:
        ended(self, report)
        self.__dict__.setdefault("left", []).append(
            asyncio.get_running_loop().create_task(asyncio.sleep(3600.0))
        )

    patch.setattr(Feedback, "_session_ended", end)


@bug("tokens were logged as")
def tokens_are_counted_twice(patch: Patch) -> None:
    close = DecodeAttempt.close

    def twice(self: DecodeAttempt) -> None:
        counts = self.stream is not None
        close(self)
        if counts:
            self._session.record.output_tokens *= 2

    patch.setattr(DecodeAttempt, "close", twice)


@bug("retries: ", seed=81)
def retries_have_no_limit(patch: Patch) -> None:
    patch.setattr(RetryBudget, "spend", lambda _: True)


@bug("liveness: ")
def an_answer_never_ends(patch: Patch) -> None:
    patch.setattr(Session, "finished", lambda _: None)
    patch.setattr(Session, "check_deadline", lambda *_: None)


@bug("metrics: ")
def metrics_miss_a_request(patch: Patch) -> None:
    patch.setattr(
        "balanceroute.proxy.live.telemetry.request_metrics.RequestMetrics.ended", lambda *_: None
    )


@bug("doomed: ", seed=45)
def a_rank_whose_group_has_ended_gets_requests(patch: Patch) -> None:
    usable = property(lambda rank: rank.status is Status.UP and rank.probed and not rank.asleep)
    patch.setattr(Rank, "usable", usable)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, found, first = BUGS[name]
    plant(monkeypatch)
    told: list[str] = []
    for seed in range(first, first + SEEDS):
        told += run_seed(seed, requests=REQUESTS).violations
        if any(found in violation for violation in told):
            return
    pytest.fail(f"not found in {SEEDS} seeds; told instead: {told[:5]}")
