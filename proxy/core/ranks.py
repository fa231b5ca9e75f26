"""The decode ranks: which are open, and the view of them that a policy gets."""

from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import Action, Event, OthersOnRank, RankId
from balanceroute.proxy.core.ledger import Ledger
from balanceroute.proxy.core.others import Others
from balanceroute.proxy.core.policies.base import UNLIMITED, Fleet
from balanceroute.proxy.core.rank_memory import RankMemory
from balanceroute.proxy.core.rank_speeds import LearnedSpeeds
from balanceroute.proxy.core.warm_up import WarmUp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


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
