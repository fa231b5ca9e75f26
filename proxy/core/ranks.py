"""The decode ranks: which are open, and the view of them that a policy gets."""

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    Action,
    Event,
    InstanceEvent,
    OthersOnRank,
    PrefillerClosed,
    PrefillerOpened,
    PrefillerPaired,
    PrefillerScraped,
    RankClosed,
    RankId,
    RankOpened,
    RequestId,
)
from balanceroute.proxy.core.leases import pool_entry
from balanceroute.proxy.core.ledger import Ledger
from balanceroute.proxy.core.lifecycle import LifecycleState, Request
from balanceroute.proxy.core.policies.base import UNLIMITED, Fleet
from balanceroute.proxy.core.pool import Pool
from balanceroute.proxy.core.prefill import Prefillers
from balanceroute.proxy.core.rank_memory import RankMemory
from balanceroute.proxy.core.warm_up import WarmUp

if TYPE_CHECKING:
    from collections.abc import Sequence


# Slots of the decode ranks when others send to them too, as a second proxy does during an update.
#
# The engines' own counts tell how many requests of a rank are not this scheduler's. Each of
# several schedulers that share a rank then stays within a limit of its own, so that together they
# fill the rank and not more:
#
# - While the others have their fair share, half of the batch, or more, it takes what is free, and keeps
#   what it has up to the same share.
# - While they have less, it gives way: it leaves as many slots free as they have, up to an eighth of the
#   batch, so that their share can double with every reading until it is half. Nobody is preempted; slots
#   pass over as requests end.
# - Two that fill the same free slots see each other only at the next reading, so each takes half of
#   them at a time.
# - One slot is always its own. If not, a newcomer would have none for as long as the rank is full, and
#   nobody would see that it wants one.
#
# A scheduler that is alone has no limit but the batch.

# Of the batch: the most that is left free for others to grow into.
_GIVEN_SHARE = 1 / 8
_NO_LIMIT = 1 << 62


class Others:
    """What others have on each of G ranks.

    Attributes:
        slots: int64[G], the slots of their requests.
        kv_tokens: int64[G], what those hold.
        limits: int64[G], the slots that this scheduler's requests may have.
    """

    def __init__(self, ranks: int) -> None:
        self.slots: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self.kv_tokens: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self.limits: NDArray[np.int64] = np.full(ranks, _NO_LIMIT)

    def told(self, event: OthersOnRank, *, batch: int, own: int) -> None:
        """Take in what is known of a rank.

        Args:
            event: The rank and what is on it.
            batch: Slots of the rank.
            own: Those of this scheduler's requests.
        """
        rank = event.rank
        self.slots[rank], self.kv_tokens[rank] = event.slots, event.kv_tokens
        self.limits[rank] = own_limit(batch, event.slots, own) if event.slots else _NO_LIMIT

    def grow(self, ranks: int) -> None:
        """Follow a larger number of ranks; nobody else is on the new ones."""
        new = Others(ranks - len(self.slots))
        self.slots = np.concatenate([self.slots, new.slots])
        self.kv_tokens = np.concatenate([self.kv_tokens, new.kv_tokens])
        self.limits = np.concatenate([self.limits, new.limits])


def own_limit(batch: int, others: int, own: int) -> int:
    """Return the slots of a rank that its own requests may have, at least 1.

    Args:
        batch: Slots of the rank.
        others: Slots of the requests of others, at least 1.
        own: Slots of its own, now.
    """
    limit = batch - others
    fair = batch // 2
    if others < fair:
        most = max(1, int(batch * _GIVEN_SHARE))
        limit -= min(others, most, fair - others)
    else:
        limit = max(limit, min(own, fair))
    if limit > own:
        limit = own + (limit - own + 1) // 2
    return max(1, limit)


# How fast each rank reads its KV cache, as far as the times of the fleet's steps tell.
#
# A step takes T = a + b x max_g c_g L_g, with c_g the **slowness** of rank g. A balanced fleet
# tells little of it: the slow ranks set every time, and how much faster the others are does not
# show. So the latest steps are kept, and for one rank after the other the times are explained
# anew with another c_g. If that explains them better for certain, the rank gets the value nearest
# to the old one that does as well as the best. If any smaller one did as well, the rank set no
# step, and it gets a little less than that: the policy then gives it more, until it sets some.
#
# The steps that were kept stay valid whatever is believed. Their errors may be correlated, as
# where another process takes the machine for a while: both sides are differenced by that
# correlation. While no other c_g explains more, all ranks count as equally fast, and every
# decision is as without.

# Steps that are kept, one of each so many.
_SAMPLES = 256
_EVERY = 2
# Samples between two reviews, and those before the first.
_REVIEW = 8
_LEAST_SAMPLES = 64
# Samples that are kept back until nothing of that time turned out to be behind, and steps that are
# passed over after that: the live proxy corrects a request once it is five tokens off.
_KEPT_BACK = 4
_PASSED_OVER = 8
# Ranks of one review, which takes some 60 us for each.
_RANKS = 8
# What is tried in place of a c_g, relative to it. The middle one keeps it.
_FACTORS = np.linspace(0.75, 1.25, 21)
_KEPT = len(_FACTORS) // 2
# By how much less the squared errors have to be, in mean squared errors; the square of 5.5 standard
# errors, as many values are tried for many ranks. And by how much they may be more than the least.
_CERTAIN = 30.0
_AS_GOOD = 6.0
# How far below the smallest value that is known to matter.
_BEYOND = 0.05
# Errors below that share of a step are none.
_LEAST_ERROR = 1e-3


class LearnedSpeeds:
    """Learns from the steps of one fleet.

    Args:
        ranks: G, at least 2.

    Attributes:
        speeds: float64[G], 1 on average; None while all count as equally fast.
    """

    def __init__(self, ranks: int) -> None:
        self.speeds: NDArray[np.float64] | None = None
        self._slowness = np.ones(ranks)
        # Rings of the same steps: KV tokens of the ranks, and times.
        self._loads = np.zeros((_SAMPLES, ranks))
        self._times_ns = np.zeros(_SAMPLES)
        self._steps = self._samples = self._passed_over = 0
        self._latest: deque[tuple[NDArray[np.int64], float]] = deque()
        self._next = 0  # The rank that is reviewed next.

    def observe(self, loads: NDArray[np.int64], step_ns: float) -> None:
        """Learn from a step: int64[G], KV tokens of the ranks, and its time."""
        self._steps += 1
        if self._passed_over:
            self._passed_over -= 1
            return
        if self._steps % _EVERY:
            return
        self._latest.append((loads, step_ns))
        if len(self._latest) > _KEPT_BACK:
            self._take(*self._latest.popleft())

    def fell_behind(self) -> None:
        """Note that a request was behind the steps: they did not read all that they seemed to."""
        self._latest.clear()
        self._passed_over = _PASSED_OVER

    def _take(self, loads: NDArray[np.int64], step_ns: float) -> None:
        place = self._samples % _SAMPLES
        self._loads[place] = loads
        self._times_ns[place] = step_ns
        self._samples += 1
        if self._samples >= _LEAST_SAMPLES and self._samples % _REVIEW == 0:
            self._review()

    def _review(self) -> None:
        # In order of time.
        count, place = min(self._samples, _SAMPLES), self._samples % _SAMPLES
        loads = np.roll(self._loads, -place, axis=0)[-count:]
        times = np.roll(self._times_ns, -place)[-count:]
        ranks = len(self._slowness)
        changed = False
        for rank in (np.arange(min(_RANKS, ranks)) + self._next) % ranks:
            factor = self._better(int(rank), loads, times)
            if factor is not None:
                self._slowness[rank] *= factor
                changed = True
        self._next = (self._next + _RANKS) % ranks
        if changed:
            speeds = 1.0 / self._slowness
            self.speeds = speeds / speeds.mean()

    def _better(
        self, rank: int, loads: NDArray[np.float64], times: NDArray[np.float64]
    ) -> float | None:
        """Return what to multiply a rank's slowness by; None to keep it."""
        levels = loads * self._slowness
        correlation = _correlation(levels.max(axis=1), times)
        own = levels[:, rank].copy()
        levels[:, rank] = 0.0
        envelopes = np.maximum(levels.max(axis=1), np.multiply.outer(_FACTORS, own))
        squares = _squares(envelopes, times, correlation)
        squares += len(times) * (_LEAST_ERROR * (1.0 - correlation) * times.mean()) ** 2
        least = squares.min()
        if squares[_KEPT] - least < _CERTAIN * least / len(times):
            return None
        good = squares <= least * (1.0 + _AS_GOOD / len(times))
        factor = float(_FACTORS[good][np.abs(_FACTORS[good] - 1.0).argmin()])
        return factor - _BEYOND if good[0] and factor < 1.0 else factor


def _fit(
    envelopes: NDArray[np.float64], times: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return both sides without their means, and the slope, at least 0, of each row of envelopes."""
    envelopes = envelopes - envelopes.mean(axis=-1, keepdims=True)
    times = times - times.mean()
    spread = np.maximum((envelopes**2).sum(axis=-1), 1.0)
    return envelopes, times, np.maximum(envelopes @ times, 0.0) / spread


def _correlation(envelopes: NDArray[np.float64], times: NDArray[np.float64]) -> float:
    """Return how errors follow those before them, 0 to 0.99."""
    envelopes, times, slope = _fit(envelopes, times)
    errors = times - slope * envelopes
    total = float(errors @ errors)
    if total <= 1e-6 * float(times @ times):
        return 0.0
    return min(max(float(errors[1:] @ errors[:-1]) / total, 0.0), 0.99)


def _squares(
    envelopes: NDArray[np.float64], times: NDArray[np.float64], correlation: float
) -> NDArray[np.float64]:
    """Return the squared errors of a line through the times over each row of envelopes, summed."""
    envelopes = envelopes[:, 1:] - correlation * envelopes[:, :-1]
    envelopes, times, slope = _fit(envelopes, times[1:] - correlation * times[:-1])
    return np.asarray(((times - slope[:, None] * envelopes) ** 2).sum(axis=1))


_NONE = np.zeros(1, np.int64)  # NumPy makes an array of a number at each call.


class Ranks:
    """G ranks; all are open at first.

    Args:
        config: Their number, and whether their speeds are to be learned.
        memory: What they have of earlier prompts; None if nobody asks.

    Attributes:
        is_open: bool[G], whether each takes new requests.
        others: What others have there; None if nobody else sends to any.
        proved: By rank, whether it has given a first token since it began.
        warm_up: The windows of those that began lately.
    """

    def __init__(self, config: SchedulerConfig, memory: RankMemory | None = None) -> None:
        self._memory = memory
        self.is_open: NDArray[np.bool_] = np.ones(config.ranks, np.bool_)
        self._all_open = True
        self.others: Others | None = None
        self._unlimited: NDArray[np.int64] = np.full(config.ranks, UNLIMITED)
        self._batch = _batch_limits(config)
        self._learned = _learned(config)
        self.proved = [False] * config.ranks
        self.warm_up = WarmUp()

    def set_open(self, rank: RankId, is_open: bool) -> None:
        """Let a rank take new requests, or none; those that are bound to it continue.

        Raises:
            LifecycleError: The rank is unknown.
        """
        self._check_known(rank)
        self.is_open[rank] = is_open
        self._all_open = bool(self.is_open.all())
        if not is_open:
            self.proved[rank] = False
            self.warm_up.end(rank)

    def begin(self, rank: RankId, *, grows: bool, on_trial: bool) -> None:
        """Let an open rank have a share that grows, unless all are as new as it is.

        Args:
            rank: Which.
            grows: Whether it grows; else the whole share follows the first token.
            on_trial: Whether that is so even if no other one has proved itself.
        """
        others = zip(self.proved, self.is_open.tolist(), strict=True)
        if on_trial or any(proved and is_open for proved, is_open in others):
            self.warm_up.begin(rank, grows=grows)
        self.proved[rank] = False

    def is_proved(self, rank: RankId) -> bool:
        """Return whether a rank that was opened with a window has answered anything since."""
        return self.proved[rank] or self.warm_up.width(rank) != 1

    def saw(self, event: Event, actions: "Sequence[Action]") -> None:
        """Follow what is on its way to ranks that began lately."""
        self.warm_up.saw(event, actions, self._batch.tolist())

    def shared(self, event: OthersOnRank, ledger: Ledger, config: SchedulerConfig) -> None:
        """Note what others have on a rank.

        Raises:
            LifecycleError: The rank is unknown.
        """
        rank = event.rank
        self._check_known(rank)
        if self.others is None:
            self.others = Others(len(self.is_open))
        limits = config.rank_batch_limits
        batch = config.batch_limit if limits is None else limits[rank]
        self.others.told(event, batch=batch, own=int(ledger.bound[rank]))
        if not self.others.slots.any():
            self.others = None

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Follow another configuration, with as many ranks or more; the new ones are open."""
        new = np.ones(config.ranks - len(self.is_open), np.bool_)
        self.is_open = np.concatenate([self.is_open, new])
        self._all_open = bool(self.is_open.all())
        self.proved += [False] * len(new)
        if self.others is not None:
            self.others.grow(config.ranks)
        self._unlimited = np.full(config.ranks, UNLIMITED)
        self._batch = _batch_limits(config)
        learned = _learned(config)
        # What was learned of the same ranks stays.
        if len(new) or learned is None or self._learned is None:
            self._learned = learned

    def step(self, duration_ns: int | None, ledger: Ledger) -> None:
        """Note a step of all ranks."""
        if self._learned is not None and duration_ns is not None:
            # What is on its way to a rank is not read yet.
            self._learned.observe(ledger.loads - ledger.arriving, duration_ns)

    def corrected(self, tokens: int) -> None:
        """Note that a request was off the steps by so many tokens."""
        # It was paused, or emits another number of tokens a step.
        if tokens < 0 and self._learned is not None:
            self._learned.fell_behind()

    def speeds(self, config: SchedulerConfig) -> "NDArray[np.float64] | None":
        """Return float64[G], the ranks' speeds, 1 on average; None if all are equally fast."""
        if config.rank_speeds is None:
            return None if self._learned is None else self._learned.speeds
        speeds = np.array(config.rank_speeds)
        return np.asarray(speeds / speeds.mean())

    def loads_at_mean_speed(self, ledger: Ledger, config: SchedulerConfig) -> "NDArray[np.int64]":
        """Return int64[G], the KV tokens that a rank of mean speed would read in each rank's time."""
        speeds = self.speeds(config)
        return ledger.loads if speeds is None else np.rint(ledger.loads / speeds).astype(np.int64)

    @property
    def open(self) -> int:
        """The number of open ranks."""
        return int(self.is_open.sum())

    def fleet(self, ledger: Ledger, config: SchedulerConfig, beyond_batch: int | None) -> Fleet:
        """Return the ranks as a policy sees them.

        Args:
            ledger: Loads and slots of the ranks.
            config: Limits of the ranks.
            beyond_batch: Slots beyond the batch limit that a rank may get; None for any number.
        """
        if beyond_batch is None:
            free_slots = self._unlimited.copy()
        else:
            free_slots = self.free_slots(ledger, beyond_batch)
        speeds = self.speeds(config)
        if self.warm_up.active:
            speeds = self._warm(free_slots, ledger, speeds)
        if not self._all_open:
            free_slots *= self.is_open
        # Early binding ignores memory as well: what does not fit queues in the engine.
        if config.rank_kv_tokens is None or beyond_batch is None:
            free_kv_tokens = self._unlimited.copy()
        else:
            free_kv_tokens = config.rank_kv_tokens - ledger.loads
        # Copies: the policy may write to them while it decides.
        closes = beyond_batch is None and self.warm_up.active
        fleet = Fleet(
            self.is_open & (free_slots > 0) if closes else self.is_open,
            ledger.loads.copy(),
            ledger.bound.copy(),
            free_slots,
            free_kv_tokens,
            ledger.requests,
            ledger.turnover,
            speeds,
            closes=closes,
        )
        if self.others is not None:
            fleet.share(self.others.slots, self.others.kv_tokens)
        if self._memory is not None:
            fleet.keeping = self._memory.keeping(config.ranks, self.open)
        return fleet

    def _warm(
        self,
        free_slots: "NDArray[np.int64]",
        ledger: Ledger,
        speeds: "NDArray[np.float64] | None",
    ) -> "NDArray[np.float64] | None":
        """Leave those that began lately their windows; return the speeds that go with their shares.

        A rank that may have a quarter of what the others have counts as one of a quarter of their speed: so
        it gets a quarter of the tokens, and not the largest prompts for being the emptiest.
        """
        if not self.warm_up.binds(self.is_open.tolist()):
            return speeds
        shares = np.ones(len(self.is_open)) if speeds is None else speeds.copy()
        warm = self.is_open.copy()
        warm[list(self.warm_up.instances)] = False
        usual = max(1.0, float(ledger.bound[warm].mean()))
        for rank in self.warm_up.instances:
            room = self.warm_up.room(rank) or 0
            free_slots[rank] = min(int(free_slots[rank]), room)
            shares[rank] *= min(1.0, (int(ledger.bound[rank]) + max(1, room)) / usual)
        return np.asarray(shares / shares.mean())

    def free_slots(self, ledger: Ledger, beyond_batch: int) -> "NDArray[np.int64]":
        """Return the free slots, int64[G], of open and closed ranks."""
        # One free slot admits a request of several, which may leave a rank overbooked.
        slots = self._batch
        if self.others is not None:
            slots = np.minimum(slots, self.others.limits)
        if beyond_batch:
            slots = slots + beyond_batch
        slots = slots - ledger.bound
        return np.maximum(slots, _NONE, out=slots)

    def _check_known(self, rank: RankId) -> None:
        if not 0 <= rank < len(self.is_open):
            raise LifecycleError(f"rank {rank} is unknown: there are {len(self.is_open)}")


def repeated(speeds: tuple[float, ...], ranks: int) -> tuple[float, ...]:
    """Return the speed of each rank: the given ones in turn; () if there are none."""
    return tuple(speeds[rank % len(speeds)] for rank in range(ranks)) if speeds else ()


def _batch_limits(config: SchedulerConfig) -> "NDArray[np.int64]":
    """Return the batch limit of each rank, int64[G]."""
    limits = config.rank_batch_limits
    return np.full(config.ranks, config.batch_limit) if limits is None else np.array(limits)


def _learned(config: SchedulerConfig) -> LearnedSpeeds | None:
    """Return what learns the speeds; None if nobody asks, or if there is nothing to compare."""
    asked = config.learn_speeds and config.rank_speeds is None
    return LearnedSpeeds(config.ranks) if asked and config.ranks > 1 else None


# Instances that open, close, fit other ones than before, or are shared with others.


def switch(
    event: InstanceEvent,
    *,
    ranks: Ranks,
    prefillers: Prefillers,
    pool: Pool,
    requests: Mapping[RequestId, Request],
    ledger: Ledger,
    config: SchedulerConfig,
) -> bool:
    """Note what became of an instance; return whether prefills may start that could not before.

    Raises:
        LifecycleError: The instance is unknown.
    """
    match event:
        case PrefillerScraped():
            return False  # It is for the choice of prefillers, which observes.
        case OthersOnRank():
            ranks.shared(event, ledger, config)
            return False
        case RankClosed(rank) | RankOpened(rank):
            is_open = isinstance(event, RankOpened)
            ranks.set_open(rank, is_open)
            if isinstance(event, RankOpened) and (event.on_trial or event.cold):
                ranks.begin(rank, grows=event.cold, on_trial=event.on_trial)
            pool.set_open(rank, is_open)
            prefillers.pairs.set_open(rank, is_open)
            return prefillers.pairs.limited
        case PrefillerPaired(prefiller, able):
            prefillers.check_known(prefiller)
            prefillers.pairs.set(prefiller, able)
            for request in requests.values():
                if request.state is LifecycleState.POOLED and request.prefiller == prefiller:
                    pool.replace(pool_entry(request, config, prefillers.pairs))
        case PrefillerClosed(prefiller):
            prefillers.set_open(prefiller, False)
        case PrefillerOpened(prefiller, on_trial, cold):
            prefillers.set_open(prefiller, True, on_trial=on_trial)
            if cold:
                prefillers.begin(prefiller)
    # Also after a close: a request that avoids another prefiller may go there once no other one is
    # open (see `avoidance`).
    return True
