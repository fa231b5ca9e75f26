"""Decode ranks that make no tokens while other ranks do get nothing new; their requests go on elsewhere.

A rank that stands still, see `core.steps`, is closed within two or three seconds, long before a
time limit of a leg. What has not begun there begins elsewhere, and so does a stream that can go on
elsewhere (`--resume`). A stream that cannot stays: the rank may come back, and its time limits hold.

The rank comes back on trial: with one request, and with no other until that has its first token. That
is when its streams move again, or else when a health check has succeeded since; what stands still behind
a server that answers health checks shows it by its trial, whose request goes on elsewhere, too. Each
trial that fails doubles the wait before the next one.

No more than half of the ranks are left out so, together with those that are down: more have a common
cause. A data-parallel group counts as one of them, since its ranks stand still together. If no rank is left
that could be used, those that stand still are used.

The ranks of a group of which one has died are left out in the same way, however many they are, for some
seconds: until they have died too, or have shown that they have not.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId
from balanceroute.proxy.core.lifecycle import DECODING, Request
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.core.steps import FLOOR_S, STEPS, UNKNOWN_S, RankProgress, Sighting
from balanceroute.proxy.live.engines.health import Health
from balanceroute.proxy.live.engines.instances import Instances, Rank, Status, Target
from balanceroute.proxy.live.request.decode_attempt import DecodeAttempt
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.scheduling.progress import Progress

_log = logging.getLogger(__name__)
_BACKOFF_S, _BACKOFF_MAX_S = 1.0, 30.0
# How long the ends of the other ranks of a group are awaited. What they send until then proves nothing.
_DOOMED_S = 3.0
# Until it is asked again whether a health check has succeeded.
_ASK_AGAIN_S = 0.25
# A rank computes some prompts itself, in steps that may be as long as the prompt. By its time in a
# prefiller, times this, and if that is not known by this time for a token.
_PREFILL_MARGIN = 3.0
_PREFILL_S_PER_TOKEN = 200e-6
# Sweeps between two looks at ranks that have begun nothing; requests that have to be overdue there; and
# what the transfer of a token may take.
_UNSTARTED_EVERY = 4
_LEAST_OVERDUE = 2
_TRANSFER_S_PER_TOKEN = 100e-6
# Of a whole answer without a limit.
_MOST_TOKENS = 4_096
_WATCHED = (Status.UP, Status.DRAINING)
_SERVING = (Status.UP, Status.QUARANTINED)


@dataclass(slots=True)
class _Veto:
    """One rank that was left out, until it has been well for a while."""

    since_s: float  # Since when it is out, or was last.
    backoff_s: float = _BACKOFF_S  # The wait before the next trial.
    # How long the first token of a trial may take, if that is more than usual.
    allowed_s: float = FLOOR_S
    ended_s: float | None = None  # When its last trial succeeded; None before.
    timer: asyncio.TimerHandle | None = None  # Of the next trial.

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class _Here:
    """The requests of all ranks at one moment, looked up together: a look at all requests for each takes long."""

    def __init__(
        self, requests: Mapping[RequestId, Request], sessions: Mapping[RequestId, Session]
    ) -> None:
        # What each rank has, by rank.
        self.on: defaultdict[RankId, list[tuple[Request, Session]]] = defaultdict(list)
        self.computing: Counter[RankId] = Counter()  # Prompt tokens that each rank computes itself.
        self.prefilling: Counter[PrefillerId] = Counter()  # Those that each prefiller does.
        for number, request in requests.items():
            if request.prefilling and request.prefiller is not None:
                self.prefilling[request.prefiller] += request.prompt_tokens
            session, rank = sessions.get(number), request.rank
            if rank is None or session is None:
                continue
            if request.state is DECODING:
                self.on[rank].append((request, session))
            if not request.started and _computes(session):
                self.computing[rank] += request.prompt_tokens

    def waiting(self, rank: RankId) -> Iterator[tuple[Session, int]]:
        """Yield the streams that a rank has yet to begin, and the lengths of their prompts.

        Not those whose prompts are still computed by a prefiller that the rank called.
        """
        for request, session in self.on[rank]:
            if request.started or not session.shape.stream:
                continue
            if session.ticket.prefill or _computes(session):
                yield session, request.prompt_tokens


def _computes(session: Session) -> bool:
    """Return whether the rank that has a request computes its prompt."""
    return session.record.local_prefill or bool(session.shape.direct)


class ProgressVeto:
    """Leaves ranks out, and tries them again.

    Args:
        reopen: Reports ranks that opened or closed to the scheduler.
        active: Whether ranks are left out. A standstill of all ranks is logged in any case.

    Attributes:
        standstills: How often all that had streams stood still.
        still_ranks: How many ranks with streams stand still if all do; else 0.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sessions: Mapping[RequestId, Session],
        instances: Instances,
        progress: Progress,
        *,
        health: Health,
        reopen: Callable[[Iterable[Rank]], None],
        active: bool,
    ) -> None:
        self.vetoes: Counter[RankId] = Counter()  # How often each rank was left out.
        self.standstills = self.still_ranks = 0
        self._scheduler = scheduler
        self._sessions = sessions
        self._instances = instances
        self._progress = progress
        self._health = health
        self._reopen = reopen
        loop = asyncio.get_running_loop()
        self._clock, self._call_later = loop.time, loop.call_later
        self._active = active
        self._ranks = RankProgress()
        self._vetoes: dict[RankId, _Veto] = {}
        self._still_since_s = 0.0
        self._reviews = 0
        self._here: _Here | None = None

    def look(self, elapsed_s: float, sightings: Iterable[Sighting]) -> None:
        """Take in what is seen of the ranks; see `RankProgress.look`."""
        self._ranks.look(self._clock(), elapsed_s, sightings)

    def limit_s(self, rank: RankId) -> float | None:
        """Return for how long a rank may be silent; None while its pace is not known."""
        return self._ranks.limit_s(rank, self._clock())

    def review(self) -> None:
        """Leave out ranks that stand still, and take back those that do not any more."""
        try:
            self._review_all()
        finally:
            self._here = None

    def _review_all(self) -> None:
        self._reviews += 1
        if self._reviews % _UNSTARTED_EVERY == 0 and self._active:
            self._review_unstarted()
        if self._ranks.quiet and not (self._vetoes or self.still_ranks):
            return
        if self._scheduler.intake.held:
            self._ranks.excuse()  # An administrator has the engines wait.
            return
        still = self._ranks.stalled(self._clock(), self._allowance_s) if self._active else []
        for number in still:
            rank = self._instances.ranks[number]
            if not rank.still and rank.status in _WATCHED and not rank.asleep:
                silent_s, limit_s = self._ranks.silent_s(number), self.limit_s(number)
                self._leave_out(rank, silent_s, limit_s or FLOOR_S)
        for number, veto in list(self._vetoes.items()):
            self._review(self._instances.ranks[number], veto)
        self._note_standstill()

    def group_ended(self, target: Target) -> None:
        """Leave out the ranks of a data-parallel group of which one has died."""
        doomed = [
            rank
            for rank in self._instances.groups.mates(target)
            if rank.status in _WATCHED and not rank.doomed
        ]
        for rank in doomed:
            rank.doomed = True
            self._close(rank, self._clock() + _DOOMED_S, wait_s=_DOOMED_S)
        if doomed:
            fields = {"url": target.url, "ranks": [rank.name for rank in doomed]}
            _log.warning(
                "a decode rank has died: the others of its data-parallel group are left out",
                extra={"fields": fields},
            )

    def spare(self) -> None:
        """Use ranks that stand still if no other rank is there, nor one that may be back in a moment."""
        if any(rank.usable or rank.may_return for rank in self._instances.ranks):
            return
        for rank in self._instances.ranks:
            if rank.still and rank.status is Status.UP:
                self._try(rank, "no other rank is left")

    def stop(self) -> None:
        for veto in self._vetoes.values():
            veto.stop()

    # Out.

    def _leave_out(self, rank: Rank, silent_s: float, limit_s: float) -> None:
        if rank.status is Status.UP and not self._can_spare(rank):
            return
        fields = {
            "rank": rank.name,
            "silent_s": round(silent_s, 2),
            "limit_s": round(limit_s, 2),
            "requests": int(self._scheduler.ledger.bound[rank.id]),
        }
        now_s = self._clock()
        self._leave(rank, now_s, allowed_s=limit_s)
        # They wait for it: also those that have no stream, to which the next requests would go.
        for mate in self._instances.groups.mates(rank.target):
            if mate.usable and not self._ranks.steps(mate.id, now_s):
                self._leave(mate, now_s, allowed_s=limit_s)
        _log.warning(
            "a decode rank makes no tokens while others do, and is left out",
            extra={"fields": fields},
        )

    def _review_unstarted(self) -> None:
        """Leave out ranks that begin nothing of what they were sent, and have no stream that shows more.

        A rank that hangs while it is idle is the emptiest, and so would get whatever comes.
        """
        ledger, now_s = self._scheduler.ledger, self._clock()
        (numbers,) = ((ledger.bound > 0) & (ledger.started == 0)).nonzero()
        stepping = self._ranks.stepping(now_s)
        for number in numbers.tolist():
            rank = self._instances.ranks[number]
            compared = rank.usable and stepping.gap_beside_s(rank.id) is not None
            if not compared or rank.on_trial or self._scheduler.intake.held:
                continue
            limit_s = self._ranks.first_limit_s(rank.id)
            limit_s += STEPS * self._progress.transfer_s + self._allowance_s(rank.id)
            waits_s = [
                now_s - session.record.admitted_ns / 1e9 - _TRANSFER_S_PER_TOKEN * tokens
                for session, tokens in self._now_here().waiting(rank.id)
                if session.record.admitted_ns is not None
            ]
            overdue = [wait_s for wait_s in waits_s if wait_s > limit_s]
            if len(overdue) >= _LEAST_OVERDUE:
                self._leave_out(rank, max(overdue), limit_s)
                stepping = self._ranks.stepping(now_s)

    def _can_spare(self, rank: Rank) -> bool:
        domains: dict[
            tuple[bool, int], bool
        ] = {}  # Whether one of its ranks is down, by group or rank.
        for one in self._instances.ranks:
            if one.status in _SERVING:
                domain = self._domain(one)
                domains[domain] = domains.get(domain, False) or one.on_trial or not one.usable
        of_group, _ = own = self._domain(rank)
        if of_group and domains[own]:
            return True
        return (sum(domains.values()) + 1) * 2 <= len(domains)

    def _domain(self, rank: Rank) -> tuple[bool, int]:
        """Return what names all that stands still together."""
        group = self._instances.groups.of(rank)
        return (False, rank.id) if group is None else (True, group)

    def _leave(self, rank: Rank, now_s: float, *, allowed_s: float) -> None:
        """Leave a rank out for as long as its next trial asks for, and count it."""
        self.vetoes[rank.id] += 1
        veto = self._close(rank, now_s, allowed_s=allowed_s)
        veto.backoff_s = min(2 * veto.backoff_s, _BACKOFF_MAX_S)

    def _close(
        self,
        rank: Rank,
        since_s: float,
        *,
        allowed_s: float = FLOOR_S,
        wait_s: float | None = None,
    ) -> _Veto:
        """Close a rank.

        Args:
            rank: The rank.
            since_s: What it does after this time shows that it is well.
            allowed_s: How long the first token of its trial may take.
            wait_s: Until it is tried; None for its back-off.
        """
        veto = self._vetoes.get(rank.id)
        if veto is None:
            veto = self._vetoes[rank.id] = _Veto(since_s)
        veto.since_s, veto.ended_s, veto.allowed_s = since_s, None, allowed_s
        rank.still, rank.on_trial = True, False
        self._ranks.begin_anew(rank.id)
        self._health.hasten(rank.target)
        self._wait(rank, veto, veto.backoff_s if wait_s is None else wait_s)
        self._here = None  # What it has may go elsewhere.
        self._reopen([rank])
        return veto

    # And in again.

    def _wait(self, rank: Rank, veto: _Veto, wait_s: float) -> None:
        veto.stop()
        veto.timer = self._call_later(wait_s, self._ask, rank, veto)

    def _ask(self, rank: Rank, veto: _Veto) -> None:
        """Begin a trial if the engine's health is known to be good since."""
        veto.timer = None
        if not rank.still:
            return
        answered_s = self._health.answered_s(rank.target)
        if rank.status in _WATCHED and answered_s is not None and answered_s > veto.since_s:
            self._try(rank, "its health check succeeded")
            return
        if rank.status is Status.REMOVED:
            return
        if rank.status is Status.UP:
            self._health.hasten(rank.target)
        self._wait(rank, veto, _ASK_AGAIN_S)

    def _try(self, rank: Rank, reason: str) -> None:
        veto = self._vetoes[rank.id]
        veto.stop()
        rank.still, rank.on_trial, rank.doomed = False, True, False
        fields = {"rank": rank.name, "reason": reason}
        _log.warning("a decode rank is tried again", extra={"fields": fields})
        self._reopen([rank])

    def _review(self, rank: Rank, veto: _Veto) -> None:
        now_s = self._clock()
        if rank.status is Status.REMOVED:
            self._forget(rank, veto)
        elif rank.still:
            # One that stood still again soon has to show that it steps for longer.
            waited_s = now_s - veto.since_s
            again = veto.backoff_s > 2 * _BACKOFF_S
            if self._ranks.moved_s(rank.id) > veto.since_s and (
                not again or waited_s >= veto.backoff_s / 2
            ):
                self._try(rank, "its streams move again")
        elif rank.on_trial:
            if self._scheduler.ranks.is_proved(rank.id):
                rank.on_trial, veto.ended_s = False, now_s
                _log.info("a decode rank makes tokens again", extra={"fields": {"rank": rank.name}})
            elif self._is_overdue(rank, veto.allowed_s, now_s):
                fields = {"rank": rank.name, "next_trial_s": veto.backoff_s}
                _log.warning("a decode rank failed its trial", extra={"fields": fields})
                longer_s = max(veto.allowed_s, min(2 * veto.allowed_s, UNKNOWN_S))
                self._leave(rank, now_s, allowed_s=longer_s)
        elif veto.ended_s is not None and now_s - veto.ended_s > _BACKOFF_MAX_S:
            self._forget(rank, veto)

    def _forget(self, rank: Rank, veto: _Veto) -> None:
        veto.stop()
        rank.still = rank.on_trial = rank.doomed = False
        del self._vetoes[rank.id]

    def _is_overdue(self, rank: Rank, allowed_s: float, now_s: float) -> bool:
        """Return whether a rank on trial has not given what it should have by now."""
        if rank.status is not Status.UP:
            return False  # Health checks have it.
        limit_s = max(allowed_s, STEPS * self._progress.transfer_s) + self._allowance_s(rank.id)
        step_s = self._progress.steps.step_s
        for request, session in self._now_here().on[rank.id]:
            admitted_ns = session.record.admitted_ns
            waited_s = 0.0 if admitted_ns is None else now_s - admitted_ns / 1e9
            if session.shape.stream:
                overdue = not request.started and waited_s > limit_s
            else:
                tokens = min(session.shape.max_tokens or _MOST_TOKENS, _MOST_TOKENS)
                overdue = waited_s > limit_s + STEPS * tokens * step_s
            if overdue:
                return True
        return False

    def _now_here(self) -> _Here:
        """Return what the ranks have, as it was since this review began, or since a rank left."""
        if self._here is None:
            self._here = _Here(self._scheduler.requests, self._sessions)
        return self._here

    def _allowance_s(self, rank: RankId) -> float:
        """Return how long a rank may take for the prompts that it computes itself.

        An engine that is a prefiller too computes those of its prefills.
        """
        here, url = self._now_here(), self._instances.ranks[rank].target.url
        tokens = here.computing[rank] + sum(
            count
            for prefiller, count in here.prefilling.items()
            if self._instances.prefillers[prefiller].target.url == url
        )
        pace = self._scheduler.leases.pace
        ns = None if pace is None else pace.prefill_ns_per_token
        each_s = _PREFILL_S_PER_TOKEN if ns is None else _PREFILL_MARGIN * ns / 1e9
        return tokens * each_s

    # All of them.

    def _note_standstill(self) -> None:
        now_s = self._clock()
        still = self._ranks.standstill(now_s, self._allowance_s)
        usable = sum(rank.usable for rank in self._instances.ranks)
        # One rank alone shows nothing of all other ranks; a drained one takes nothing anyway.
        if still < min(2, usable) or not usable:
            still = 0
        before, self.still_ranks = self.still_ranks, still
        if still and not before:
            self._still_since_s = now_s
            self.standstills += 1
            fields = {"ranks": still, "of": usable}
            _log.error(
                "decode stands still: no rank that has streams makes tokens",
                extra={"fields": fields},
            )
        elif before and not still:
            after_s = round(now_s - self._still_since_s, 2)
            _log.warning("decode goes on", extra={"fields": {"after_s": after_s}})


# Looks at the streams: which ranks make tokens, and which do not.


class StreamLooks:
    """Looks at the streams of the ranks; see `core.steps`.

    Args:
        late_s: Between two looks; after more than that this process may have stood still.
    """

    def __init__(
        self,
        sessions: Mapping[RequestId, Session],
        clock: Callable[[], float],
        *,
        late_s: float,
    ) -> None:
        self._sessions = sessions
        self._clock = clock
        self._late_s = late_s
        self._looked_s = clock()
        self._late = False

    def look(self) -> tuple[float, list[Sighting]]:
        """Return the time since the last look, as far as it counts, and the sightings.

        This process may read data that came while it stood still after this look, so neither this nor
        the next one counts.
        """
        now_s = self._clock()
        elapsed_s = now_s - self._looked_s
        self._looked_s = now_s
        if self._late or elapsed_s > self._late_s:
            self._late = elapsed_s > self._late_s
            elapsed_s = 0.0
        seen: dict[RankId, Sighting] = {}
        for session in self._sessions.values():
            work = session.work
            if type(work) is DecodeAttempt and (look := work.look()) is not None:
                before = seen.get(look.rank)
                if before is not None:
                    look = Sighting(
                        look.rank,
                        look.moved or before.moved,
                        look.still + before.still,
                        max(look.gap_s, before.gap_s),
                    )
                seen[look.rank] = look
        return elapsed_s, list(seen.values())
