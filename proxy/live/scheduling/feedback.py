"""What sessions report and ask goes to those who keep count for all of them."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core.admission import Admission, Ending
from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.openai.shape import TokenEstimate
from balanceroute.proxy.live.prediction import ticket_features
from balanceroute.proxy.live.request.leg_settings import RetryBudget
from balanceroute.proxy.live.request.session_host import (
    EngineSeen,
    KvAbandoned,
    KvMissing,
    LegFailed,
    LegSucceeded,
    PromptCounted,
    PullFailed,
    RemotePrefillEnded,
    Report,
    SessionEnded,
    StreamLent,
    StreamReturned,
)
from balanceroute.proxy.live.telemetry.record import OK, Log, RequestRecord

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.health import Health
    from balanceroute.proxy.live.engines.instances import Instances, KvTransfers, Prefiller
    from balanceroute.proxy.live.prediction import PredictorSet
    from balanceroute.proxy.live.request.lost_engines import LostEngines
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.scheduling.progress import Progress
    from balanceroute.proxy.live.telemetry.metrics import Metrics


_log = logging.getLogger(__name__)
_WARN_AGAIN_NS = 60 * 10**9
_WITHOUT_KV = (
    "a prefiller computed a prompt and left no KV cache to pull, so it is computed again: has it the "
    "--kv-transfer-config of --connector?"
)


class Feedback:
    """Takes reports; keeps the retry budget and the estimate of prompts itself."""

    def __init__(
        self,
        table: "SessionTable",
        instances: "Instances",
        progress: "Progress",
        *,
        health: "Health",
        transfers: "KvTransfers",
        lost: "LostEngines",
        predictors: "PredictorSet",
        admission: Admission,
        metrics: "Metrics",
        log: Log,
        now_ns: Callable[[], int],
    ) -> None:
        self.retries = RetryBudget()
        self.estimate = TokenEstimate()
        self._table = table
        self._instances = instances
        self._progress = progress
        self._health = health
        self._transfers = transfers
        self._lost = lost
        self._predictors = predictors
        self._admission = admission
        self._metrics = metrics
        self._log = log
        self._now_ns = now_ns
        self._warned_ns: dict[PrefillerId, int] = {}  # From when on, again.
        # A table, because `match` costs more, and every request has half a dozen reports.
        self._takers: dict[type[Report], Callable[[Any], None]] = {
            LegSucceeded: self._leg_succeeded,
            LegFailed: self._leg_failed,
            PullFailed: self._pull_failed,
            EngineSeen: self._engine_seen,
            KvMissing: self._kv_missing,
            PromptCounted: self._prompt_counted,
            KvAbandoned: self._kv_abandoned,
            RemotePrefillEnded: self._remote_prefill_ended,
            SessionEnded: self._session_ended,
            StreamLent: progress.lent,
            StreamReturned: progress.returned,
        }

    def take(self, report: Report) -> None:
        """Pass on a report."""
        self._takers[type(report)](report)

    def may_retry(self, leg: str, fault: Fault, pulled_from: PrefillerId | None) -> bool:
        """Take one retry from the budget, if there is one; see `Host.may_retry`."""
        # A trial is the proxy's own doing, and what follows a verdict goes to those who are able.
        free = pulled_from is not None and self._instances.prefillers[pulled_from].kv_trial
        if not (free or self.retries.spend()):
            return False
        self._metrics.legs.retry(leg, fault.value)
        return True

    def choose_prefiller(
        self, number: RequestId, rank: RankId | None, other_than: PrefillerId | None
    ) -> "Prefiller | None":
        """Return the open prefiller with the fewest hand-offs, another than the last if there is.

        It fits the rank that asks. If none is open, crowded ones are: the decode rank waits with its
        blocks taken.
        """
        eligible = self._table.live[number].ticket.eligible
        up = self._instances.up(None if eligible is None else eligible.prefillers)
        up = [one for one in up if one.ranks is None or rank in one.ranks]
        able = [prefiller for prefiller in up if prefiller.open] or up
        able = [prefiller for prefiller in able if prefiller.id != other_than] or able
        chosen = min(able, key=lambda prefiller: prefiller.hand_offs, default=None)
        if chosen is not None:
            chosen.hand_offs += 1
        return chosen

    def _leg_succeeded(self, report: LegSucceeded) -> None:
        self._health.succeeded(report.target)
        if report.pull is not None:
            prefiller, rank = report.pull
            instances = self._instances
            self._transfers.succeeded(instances.prefillers[prefiller], instances.ranks[rank])

    def _leg_failed(self, report: LegFailed) -> None:
        self._metrics.engines.leg_failed(report.target, report.fault)
        self._health.failed(report.target, report.fault, report.reason)

    def _pull_failed(self, report: PullFailed) -> None:
        prefiller = self._instances.prefillers[report.prefiller]
        rank = self._instances.ranks[report.rank]
        self._transfers.failed(report.request, prefiller, rank, report.fault, report.reason)

    def _engine_seen(self, report: EngineSeen) -> None:
        prefiller = self._instances.prefillers[report.prefiller]
        if prefiller.without_kv:
            prefiller.without_kv = ""
        self._lost.engine_seen(prefiller, report.engine_id)

    def _kv_missing(self, report: KvMissing) -> None:
        prefiller = self._instances.prefillers[report.prefiller]
        self._metrics.engines.left_no_kv(prefiller.target, report.kind)
        before, prefiller.without_kv = prefiller.without_kv, report.reason
        now_ns = self._now_ns()
        # An engine that keeps some and not others shall not fill the log.
        if not before and now_ns - self._warned_ns.get(report.prefiller, now_ns) >= 0:
            self._warned_ns[report.prefiller] = now_ns + _WARN_AGAIN_NS
            fields = {"url": prefiller.name, "reason": report.reason}
            _log.warning(_WITHOUT_KV, extra={"fields": fields})

    def _prompt_counted(self, report: PromptCounted) -> None:
        session = self._table.live[report.request]
        if report.prompt_tokens != session.ticket.prompt_tokens:  # Of token ids it is known before.
            features = ticket_features(session.ticket, report.prompt_tokens)
            self._predictors.begin(report.request, features)
            session.record.hinted(self._predictors.hint_of(report.request))
        self.estimate.learn(session.shape, report.prompt_tokens)

    def _kv_abandoned(self, report: KvAbandoned) -> None:
        self._metrics.legs.abandoned_lease(report.how)

    def _remote_prefill_ended(self, report: RemotePrefillEnded) -> None:
        self._instances.prefillers[report.prefiller].hand_offs -= 1

    def _session_ended(self, report: SessionEnded) -> None:
        """Forget a session that is over, and count it."""
        number, record = report.request, report.record
        session = self._table.live[number]
        began = self._table.remove(number, record)
        self._progress.ended(session)
        rounds = record.output_tokens / record.choices
        if record.outcome is OK and record.output_tokens:
            self._predictors.ended(number, max(1, round(rounds)), by_itself=True)
        else:
            self._predictors.ended(number, int(rounds), by_itself=False)
        if self._admission.follows:
            self._admission.ended(session.ticket, _ending(record, began=began), self._now_ns())
        if not record.superseded:
            self._metrics.requests.ended(record)
            self._log.request_ended(record)


def _ending(record: RequestRecord, *, began: bool) -> Ending:
    first_ns = record.first_token_ns
    return Ending(
        served=record.outcome is OK,
        first_token_ns=None if first_ns is None else first_ns - record.arrived_ns,
        output_tokens=record.output_tokens,
        prompt_tokens=record.prompt_tokens,
        began=began,
    )


# All live requests, and the names under which engines know them.


class SessionTable:
    """Adds requests and forgets them; `live` has them in order of arrival."""

    def __init__(self, rng: random.Random) -> None:
        self.live: dict[RequestId, Session] = {}
        self._rng = rng
        self._arrived = 0
        self._ids: dict[str, int] = {}  # Client request ids in use, and by how many.
        self._waiting: set[RequestId] = set()  # Those that no engine was given yet.
        self._empty = asyncio.Event()
        self._empty.set()

    def next_number(self) -> RequestId:
        """Return the number of a request that arrives."""
        number = RequestId(self._arrived)
        self._arrived += 1
        return number

    def add(self, session: "Session") -> None:
        """Take in a request."""
        self.live[session.number] = session
        self._waiting.add(session.number)
        request_id = session.record.request_id
        self._ids[request_id] = self._ids.get(request_id, 0) + 1
        self._empty.clear()

    def begin(self, number: RequestId) -> bool:
        """Note that an engine is given a request; return whether that is the first time."""
        waited = number in self._waiting
        self._waiting.discard(number)
        return waited

    def remove(self, number: RequestId, record: "RequestRecord") -> bool:
        """Forget a request that is over; return whether an engine was given it."""
        del self.live[number]
        others = self._ids.pop(record.request_id) - 1
        if others:
            self._ids[record.request_id] = others
        if not self.live:
            self._empty.set()
        return not self.begin(number)

    def engine_id(self, request_id: str) -> str:
        """Return what a request is called at the engines: its id, unless that is in use.

        Two requests of one name would be one to some engines.
        """
        if request_id in self._ids:
            return f"{request_id}-{self._rng.getrandbits(32):08x}"
        return request_id

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for any request, past or present."""
        return not (self.live or self._ids or self._waiting)

    async def drained(self) -> None:
        """Wait until no request is left."""
        await self._empty.wait()
