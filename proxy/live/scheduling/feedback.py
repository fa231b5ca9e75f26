"""What sessions report and ask goes to those who keep count for all of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from balanceroute.predictors import RequestFeatures
from balanceroute.proxy.core.admission import Admission, Ending
from balanceroute.proxy.core.events import PrefillerId, RequestId
from balanceroute.proxy.live.engines.faults import Fault
from balanceroute.proxy.live.openai.token_estimate import TokenEstimate
from balanceroute.proxy.live.request.reports import (
    EngineSeen,
    KvAbandoned,
    LegFailed,
    LegSucceeded,
    PromptCounted,
    PullFailed,
    PullSucceeded,
    RemotePrefillEnded,
    Report,
    SessionEnded,
)
from balanceroute.proxy.live.request.retry_budget import RetryBudget
from balanceroute.proxy.live.telemetry.record import Log, Outcome, RequestRecord

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.health import Health
    from balanceroute.proxy.live.engines.instances import Instances, Prefiller
    from balanceroute.proxy.live.engines.kv_transfers import KvTransfers
    from balanceroute.proxy.live.prediction.predictor_set import PredictorSet
    from balanceroute.proxy.live.request.lost_engines import LostEngines
    from balanceroute.proxy.live.scheduling.progress import Progress
    from balanceroute.proxy.live.scheduling.session_table import SessionTable
    from balanceroute.proxy.live.telemetry.metrics import Metrics


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

    def take(self, report: Report) -> None:
        """Pass on a report."""
        prefillers = self._instances.prefillers
        # Ordered by frequency: `match` tries the cases in turn.
        match report:
            case LegSucceeded(target):
                self._health.succeeded(target)
            case PullSucceeded(prefiller, rank):
                self._transfers.succeeded(prefillers[prefiller], self._instances.ranks[rank])
            case PromptCounted(number, prompt_tokens):
                self._counted(number, prompt_tokens)
            case EngineSeen(prefiller, engine_id):
                self._lost.engine_seen(prefillers[prefiller], engine_id)
            case SessionEnded(number, record):
                self._ended(number, record)
            case RemotePrefillEnded(prefiller):
                prefillers[prefiller].hand_offs -= 1
            case KvAbandoned(how):
                self._metrics.legs.abandoned_lease(how)
            case LegFailed(target, fault, reason):
                self._health.failed(target, fault, reason)
            case PullFailed(number, prefiller, rank, fault, reason):
                pair = prefillers[prefiller], self._instances.ranks[rank]
                self._transfers.failed(number, *pair, fault, reason)

    def may_retry(self, leg: str, fault: Fault, pulled_from: PrefillerId | None) -> bool:
        """Take one retry from the budget, if there is one; see `Host.ask_retry`."""
        # A trial is the proxy's own doing, and what follows a verdict goes to those who are able.
        free = pulled_from is not None and self._instances.prefillers[pulled_from].kv_trial
        if not (free or self.retries.spend()):
            return False
        self._metrics.legs.retry(leg, fault.value)
        return True

    def choose_prefiller(
        self, number: RequestId, other_than: PrefillerId | None
    ) -> "Prefiller | None":
        """Return the open prefiller with the fewest hand-offs, another than the last if there is.

        If none is open, crowded ones are: the decode rank waits with its blocks taken.
        """
        eligible = self._table.live[number].ticket.eligible
        up = self._instances.up(None if eligible is None else eligible.prefillers)
        able = [prefiller for prefiller in up if prefiller.open] or up
        able = [prefiller for prefiller in able if prefiller.id != other_than] or able
        chosen = min(able, key=lambda prefiller: prefiller.hand_offs, default=None)
        if chosen is not None:
            chosen.hand_offs += 1
        return chosen

    def _counted(self, number: RequestId, prompt_tokens: int) -> None:
        session = self._table.live[number]
        ticket = session.ticket
        features = RequestFeatures(prompt_tokens, ticket.max_tokens, ticket.keys)
        self._predictors.begin(number, features)
        self.estimate.learn(session.shape, prompt_tokens)

    def _ended(self, number: RequestId, record: RequestRecord) -> None:
        """Forget a session that is over, and count it."""
        session = self._table.live[number]
        self._table.remove(number, record)
        self._progress.ended(session)
        rounds = record.output_tokens / record.choices
        if record.outcome is Outcome.OK and record.output_tokens:
            self._predictors.ended(number, max(1, round(rounds)), by_itself=True)
        else:
            self._predictors.ended(number, int(rounds), by_itself=False)
        self._admission.ended(session.ticket, _ending(record), self._now_ns())
        self._metrics.requests.ended(record)
        self._log.request_ended(record)


def _ending(record: RequestRecord) -> Ending:
    first_ns = record.first_token_ns
    return Ending(
        served=record.outcome is Outcome.OK,
        first_token_ns=None if first_ns is None else first_ns - record.arrived_ns,
        output_tokens=record.output_tokens,
    )
