"""What became of one client's request, and whether that may be."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tests.support.chaos.clients import Client, ClientEnding, Received
from tests.support.chaos.expectation import (
    ABORTED,
    Expectation,
    TextOracle,
    error_of,
    events_of,
    usage_tokens,
)
from tests.support.chaos.faults import CLIENTS, Act
from tests.support.chaos.meddler import TOO_LARGE
from tests.support.chaos.orders import ABORTING
from tests.support.chaos.plan import ChaosPlan, Weather
from tests.support.chaos.requests import (
    AGENTS,
    MESSAGES,
    RESPONSES,
    ClientRequest,
    may_end_with_the_prefill,
)
from tests.support.chaos.tenants import OVERLOADED, TenantPlan

from balanceroute.proxy.lab.emulate.faults import MalformedStream
from balanceroute.proxy.lab.emulate.settings import Preemption
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.wire.sse import event_data
from balanceroute.topologies import CONNECTORS, KvFlow

# Kinds that leave every event whole.
_WHOLE = (MalformedStream.BYTES, MalformedStream.JOINED, MalformedStream.NO_LAST_BLANK)

# What fits on no rank is handed back until the proxy gives it up.
_GIVEN_UP = b"the engine dropped the request"
_EXPIRED = b"waited longer than it may"
# What one engine would have to do, where none may.
COMPLETE = "the prefill answer is complete"
# What one engine would have to do whole, where none is to.
_TOO_LATE = b"the first token is expected in"
_NOT_SERVED = b"which this deployment does not serve"


@dataclass(slots=True)
class Verdict:
    """What a client's end was, and what is wrong with it."""

    ending: str  # In words; the same words for the same kind of end.
    wrong: list[str]  # What must not be.
    expected: Expectation | None = None  # What the answer was compared with, if it was.


class Judging(Protocol):
    """Judges answers."""

    merges: bool  # Whether engines may put several tokens into one event.
    tenants: TenantPlan | None  # Those of the plan.

    def may_draw_seed(self, request: ClientRequest) -> bool:
        """Return whether the proxy may have drawn a seed for a request."""
        ...

    async def judge(
        self,
        client: Client,
        request: ClientRequest,
        received: Received,
        *,
        reworded: bool,
        seed: int | None,
    ) -> Verdict:
        """Return what became of one request; see `Judge.judge`."""
        ...


class Judge:
    """Compares answers with what they should be.

    Args:
        plan: What was to happen: it decides what may have gone wrong.
        oracle: Knows the right answers.
        excused: Requests whose answer is another prompt's for a reason that no proxy can see.
    """

    def __init__(self, plan: ChaosPlan, oracle: TextOracle, excused: Collection[str] = ()) -> None:
        self._plan = plan
        self.tenants = plan.tenants  # Those of the plan.
        self.merges = oracle.merges  # Whether engines may put several tokens into one event.
        self._excused = excused
        self._oracle = oracle
        changes: list[Mapping[str, Any]] = [one.changes for one in plan.injections]
        self._spoilt = {one["malformed"] for one in changes if "malformed" in one} - set(_WHOLE)
        if any(one.get("keep_alive_s") for one in changes):
            self._spoilt.add(MalformedStream.COMMENTS)
        self._statuses = {
            status
            for status in (400, 413, 429, 500, 503)
            if any(f"status_{status}" in one for one in changes)
        }
        if any(one.act is Act.MEDDLE for one in plan.injections):
            self._statuses.add(413)
        # Errors in other forms may say less than their status did, and are in other words.
        self._worded = any("error_form" in one for one in changes)
        if self._worded and self._statuses & {400, 413}:
            self._statuses |= {400, 413}
        # The proxy cannot distinguish clients of one address that hold connections from slow ones.
        self._crowded = any(
            one.act is Act.HOLD and one.held_from == CLIENTS for one in plan.injections
        )
        self._aborts = any(one.kind in ABORTING for one in plan.orders)
        # An answer of the Responses API that an engine gives up, or hands back, says that it is complete.
        recomputes = plan.world.engines.preemption is Preemption.STOP
        self._gives_up = recomputes or any(
            one.get("stopping") or "recomputed_after_tokens" in one for one in changes
        )
        self._refuses = plan.world.flags.get("direct") == "refuse"
        self._eos = any(
            "eos_first" in one.changes and one.role is Role.PREFILL for one in plan.injections
        )
        # A decode rank that called for its prefill may answer although the prefiller's answer is
        # lost. And what an engine has in its prefix cache depends on what it was sent before.
        engines = plan.world.engines
        self._cached_known = engines.prefix_cache_tokens is None and (
            CONNECTORS[engines.connector].flow is not KvFlow.DECODE_FIRST or not plan.injections
        )

    async def judge(
        self,
        client: Client,
        request: ClientRequest,
        received: Received,
        *,
        reworded: bool,
        seed: int | None,
    ) -> Verdict:
        """Return what became of one request.

        Args:
            client: Whose it is.
            request: The request.
            received: What came.
            reworded: Whether an engine handed it back in the middle of its answer, whose text then
                comes in other pieces.
            seed: What the proxy drew for it; None if it drew none.
        """
        if received.ending is ClientEnding.UNANSWERED:
            return self._judge_silence(client, received)
        if not received.status:
            return Verdict("open", ["its answer has not begun"] if not client.left else [])
        name = received.header(b"x-request-id").decode()
        misnamed = [] if name == request.request_id else [f"its answer is named {name!r}"]
        if received.status == 200 and request.request_id in self._excused:
            verdict = Verdict("misread by a slow engine", [])
        elif received.status == 200:
            verdict = await self._judge_answer(
                client, request, received, reworded=reworded, seed=seed
            )
        else:
            verdict = await self._judge_refusal(client, request, received)
        verdict.wrong += misnamed
        return verdict

    def may_draw_seed(self, request: ClientRequest) -> bool:
        """Return whether the proxy may have drawn a seed for a request."""
        flags = self._plan.world.flags
        draws = flags.get("first_token") == "prefill" or flags.get("resume") == "valid"
        sampling = request.values.get("sampling_params", request.values)
        return draws and sampling.get("seed") is None

    async def _judge_answer(
        self,
        client: Client,
        request: ClientRequest,
        received: Received,
        *,
        reworded: bool,
        seed: int | None,
    ) -> Verdict:
        answer = await self._oracle.answer(request, seed=seed)
        expected = Expectation(
            request,
            answer,
            spoilt=self._spoilt,
            reworded=reworded,
            cached_known=self._cached_known,
            completed=self._plan.weather is not Weather.CALM,
            aborts=self._aborts,
        )
        wrong = [] if not request.forbidden else ["it was served, and must not be"]
        if self.tenants is not None:
            wrong += self.tenants.wrongs(request, received) or []
        if answer.status != 200 and self._eos:
            # The prefill leg asks for one token, which may be well where more are not.
            return Verdict("ended by the prefiller", wrong)
        if answer.status != 200:
            wrong.append(f"it was served, and an engine answers {answer.status}")
            return Verdict("wrong", wrong)
        verdict = self._compare(client, request, received, expected)
        # Agents' APIs need not say it.
        aborted = ABORTED in received.body or (verdict.wrong and request.path in AGENTS)
        if self._aborts and aborted and received.ending is ClientEnding.COMPLETE:
            wrong.append(expected.strays_until_aborted(bytes(received.body)))
            return Verdict("aborted", [one for one in wrong if one])
        if verdict.wrong and may_end_with_the_prefill(request):
            ended = await self._oracle.answer(request, as_prefiller=True)
            early = Expectation(request, ended, cached_known=self._cached_known)
            sooner = self._compare(client, request, received, early)
            if not sooner.wrong:
                verdict = Verdict("ended by the prefiller", [])
        if verdict.wrong and self._gives_up and request.path == RESPONSES:
            whole = received.ending is ClientEnding.COMPLETE
            if whole and not expected.strays_until_aborted(bytes(received.body)):
                return Verdict("given up without a word", wrong)
        if verdict.wrong and self._eos:
            again = await self._compare_with_one_token(client, request, received, seed)
            verdict = again or verdict
            # Where it went on elsewhere, the prefiller may have ended it behind what had come.
            whole = reworded and received.ending is ClientEnding.COMPLETE
            if verdict.wrong and whole and expected.stops_sooner(bytes(received.body)):
                verdict = Verdict("ended by the prefiller", [])
        verdict.wrong += wrong
        return verdict

    def _judge_silence(self, client: Client, received: Received) -> Verdict:
        if client.left:
            return Verdict("left", [])
        if self._plan.shutdown_s is not None:
            return Verdict("shut down", [])
        if client.visit.pauses:
            return Verdict("cut for not reading", [])
        if self._crowded and client.comes_late:
            return Verdict("gave way to those who hold connections", [])
        before = client.answers[: client.answers.index(received)]
        if before and (
            before[-1].ending is not ClientEnding.COMPLETE
            or before[-1].header(b"connection") == b"close"
        ):
            return Verdict("behind the last answer", [])
        return Verdict("unanswered", ["its connection ended without an answer"])

    async def _judge_refusal(
        self, client: Client, request: ClientRequest, received: Received
    ) -> Verdict:
        status = received.status
        verdict = Verdict(f"status {status}", [])
        if received.ending is ClientEnding.CUT and client.visit.pauses:
            return Verdict("cut for not reading", [])
        if received.ending is not ClientEnding.COMPLETE and not client.left:
            verdict.wrong.append(f"its answer of {status} is cut")
        elif not client.left and not (self._worded and error_of(bytes(received.body)) is not None):
            verdict.wrong += await self._misshapen(request, received)
        shut_down = status == 503 and self._plan.shutdown_s is not None
        if status in (429, 503) and not received.header(b"retry-after") and not shut_down:
            verdict.wrong.append(f"its answer of {status} does not say when to retry")
        explained = None if self.tenants is None else self.tenants.wrongs(request, received)
        if explained is not None:
            verdict.wrong += explained
            return verdict
        if request.forbidden:
            if status != 400:
                verdict.wrong.append(f"it got {status} instead of 400")
            return verdict
        # Of one that left there may be no more than the head.
        if status == 400 and self._refuses and (client.left or _NOT_SERVED in received.body):
            return verdict
        if status in (400, 404, 413, 422) and status not in self._statuses:
            answer = await self._oracle.answer(request)
            if answer.status != status:
                verdict.wrong.append(f"it got {status}, an engine answers {answer.status}")
            elif not client.left and not is_refusal(
                request, bytes(received.body), answer.body, worded=self._worded
            ):
                verdict.wrong.append(f"it got {bytes(received.body)!r}, not {answer.body!r}")
        true = _EXPIRED in received.body or _GIVEN_UP in received.body
        true |= self._refuses and COMPLETE.encode() in received.body
        true |= self.tenants is not None and OVERLOADED in received.body
        true |= self._plan.world.flags.get("admission") == "early" and _TOO_LATE in received.body
        if status >= 500 and self._plan.weather is Weather.CALM and not true:
            verdict.wrong.append(f"it got {status} though all was well: {bytes(received.body)!r}")
        return verdict

    async def _misshapen(self, request: ClientRequest, received: Received) -> list[str]:
        """Return what is wrong with the form of an error answer."""
        wrong = refusal_is_wrong(request, received)
        # What is wrong with a body's members vLLM says of messages in OpenAI's shape, and so do servers that
        # stand before engines: Anthropic's clients read both shapes, and it passes as it is.
        if not wrong or request.path != MESSAGES:
            return wrong
        if bytes(received.body) == TOO_LARGE:
            return []
        answer = await self._oracle.answer(request)
        same = (answer.status, answer.body) == (received.status, bytes(received.body))
        return [] if same else wrong

    def _compare(
        self, client: Client, request: ClientRequest, received: Received, expected: Expectation
    ) -> Verdict:
        if request.stream:
            # An agent's stream that an engine fails on ends in good order with the error.
            ends_well = client.visit.http_1_0 or request.path in AGENTS
            return self._judge_stream(client, received, expected, ends_well=ends_well)
        return _judge_whole(client, received, expected)

    def _judge_stream(
        self, client: Client, received: Received, expected: Expectation, *, ends_well: bool
    ) -> Verdict:
        body = bytes(received.body)
        if received.ending is ClientEnding.COMPLETE and not expected.differs(body):
            return Verdict("exact", [], expected)
        events = events_of(body)
        errors = [i for i, event in enumerate(events) if error_of(event_data(event)) is not None]
        if errors:
            before, after = events[: errors[0]], events[errors[0] + 1 :]
            # An engine whose events are unreadable may end a stream that it has not done.
            if self._spoilt and before and event_data(before[-1]) == b"[DONE]":
                before = before[:-1]
            wrong = [expected.strays(before)]
            if [event for event in after if event_data(event) != b"[DONE]"]:
                wrong.append("it goes on after an error")
            # An engine that fails ends its stream in good order; the proxy does not. HTTP/1.0
            # shows no difference.
            if received.ending is ClientEnding.COMPLETE and not after and not ends_well:
                wrong.append("its stream ends as if there had been no error")
            # A prefiller's first token may have begun a stream that then waited too long for a rank.
            true = _GIVEN_UP in events[errors[0]] or _EXPIRED in events[errors[0]]
            if self._plan.weather is Weather.CALM and not true:
                wrong.append(f"an error though all was well: {events[errors[0]]!r}")
            return Verdict("error event", [one for one in wrong if one], expected)
        wrong = [expected.strays(events)]
        if client.left:
            return Verdict("left", [one for one in wrong if one], expected)
        if client.visit.pauses and received.ending is ClientEnding.CUT:
            return Verdict("cut for not reading", [one for one in wrong if one], expected)
        wrong.append(f"it ended too soon ({received.ending.value}): {expected.differs(body)}")
        return Verdict("short", [one for one in wrong if one], expected)

    async def _compare_with_one_token(
        self, client: Client, request: ClientRequest, received: Received, seed: int | None
    ) -> Verdict | None:
        """Return what an answer is if an engine's first token ended it; None if it did not."""
        answer = await self._oracle.answer(request, eos_first=True, seed=seed)
        expected = Expectation(request, answer, reworded=True, cached_known=self._cached_known)
        verdict = self._compare(client, request, received, expected)
        if verdict.ending == "exact":
            verdict = Verdict("ended by the prefiller", verdict.wrong)
        return None if verdict.wrong else verdict


def _judge_whole(client: Client, received: Received, expected: Expectation) -> Verdict:
    if client.left and received.ending is not ClientEnding.COMPLETE:
        return Verdict("left", [], expected)
    if received.ending is ClientEnding.CUT:
        wrong = [] if client.visit.pauses else ["its answer is cut"]
        return Verdict("cut for not reading" if client.visit.pauses else "cut", wrong, expected)
    wrong = [expected.differs(bytes(received.body))]
    return Verdict("exact", [one for one in wrong if one], expected)


def is_refusal(
    request: ClientRequest, body: bytes, expected: bytes, *, worded: bool = False
) -> bool:
    """Return whether a body has the same refusal as an engine's; `worded`: maybe in another form."""
    # The proxy has Anthropic's words for types of errors, which vLLM has from 0.33 on.
    worded = worded or request.path == MESSAGES
    return body == expected or (worded and error_of(body) == error_of(expected))


def refusal_is_wrong(request: ClientRequest, received: Received) -> list[str]:
    """Return what is wrong with an error answer: the API's shape, and a code that is its status."""
    if not received.header(b"content-type").startswith(b"application/json"):
        return [f"its answer of {received.status} is not JSON"]
    try:
        answer = json.loads(bytes(received.body))
        error = answer["error"]
        is_typed = request.path == MESSAGES and answer["type"] == "error"
        code, message = received.status if is_typed else error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        return [f"its answer of {received.status} is no error object: {bytes(received.body)!r}"]
    if code != received.status or not isinstance(message, str):
        return [f"its answer of {received.status} says {error}"]
    return []


def contradictions(
    logged: Sequence[RequestRecord], received: Received, verdict: Verdict
) -> list[str]:
    """Return how the proxy's word on a request differs from what its client saw."""
    if not logged:
        if received.status and received.status not in (404, 405, 408):
            return ["the proxy did not log it"]
        return []
    record = logged[0]
    fits = {
        "exact": (Outcome.OK,),
        "ended by the prefiller": (Outcome.OK,),
        "aborted": (Outcome.OK,),
        "given up without a word": (Outcome.OK,),
        # One that was handed back in the middle of its answer may wait for too long.
        "error event": (Outcome.UPSTREAM_ERROR, Outcome.EXPIRED),
        "left": (*Outcome,),
        "cut for not reading": (*Outcome,),
    }.get(verdict.ending)
    if fits is None and received.status >= 400:
        fits = (Outcome.CLIENT_ERROR,)
        if received.status == 429:
            fits = (Outcome.REJECTED, Outcome.CLIENT_ERROR)
        elif received.status >= 500:
            fits = (Outcome.UPSTREAM_ERROR, Outcome.EXPIRED, Outcome.REJECTED)
    wrong = []
    if received.status and record.status != received.status:
        wrong.append(f"its client saw status {received.status}, the log says {record.status}")
    if fits is not None and record.outcome not in fits:
        wrong.append(f"its client saw: {verdict.ending}; the log says {record.outcome}")
    if verdict.ending == "exact" and verdict.expected is not None:
        tokens = verdict.expected.completion_tokens
        if record.endpoint == RESPONSES:
            # A response that its engine gives up before a last token without text reads as a whole one.
            tokens = usage_tokens(bytes(received.body))
        if tokens and record.output_tokens != tokens:
            wrong.append(f"{tokens} tokens were logged as {record.output_tokens}")
    return wrong
