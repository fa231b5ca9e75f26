"""The size and the limits of the deployment that a `Scheduler` serves."""

from dataclasses import dataclass
from math import inf

from balanceroute.proxy.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The size of the deployment and the limits of its queues.

    Attributes:
        ranks: G, decode ranks.
        batch_limit: B, slots of a rank's batch.
        rank_batch_limits: The slots of each rank; None if all have `batch_limit`.
        rank_speeds: How fast each rank reads its KV cache, relative to the others; None if all are
            equally fast, or if that is to be learned.
        learn_speeds: Whether it is learned from the times of steps, unless `rank_speeds` tells it.
        rank_kv_tokens: KV tokens that fit on one rank; None for no limit.
        prefillers: P, at least 1.
        probe_limit: Prefills that run on one prefiller at a time; None for no limit.
        direct_limit: Sequences of direct requests on one prefiller at a time; None for no limit. A
            request with more goes to a prefiller that has no other direct request.
        prefiller_kv_tokens: KV tokens that one prefiller may hold; None for no limit.
        prefiller_memory_tokens: The same for a deep pool while nobody knows how fast it empties: what
            fits there, as engines tell; None if none does.
        pool_limit: Requests that may be in prefill or in the pool; the others wait before prefill,
            where they hold no KV cache. None for what follows from `lease_ns`, or for no limit.
            Requests without prefill count, but do not wait.
        deep_pool: Whether that is as much as leases allow, rather than as little as balance needs:
            for clients who get their first token before the pool.
        deadline_ns: Time in the pool after which an entry goes first, at any cost. None for three
            quarters of its lease, unless it costs less to prefill it again; see `leases`.
        ttl_ns: Time in the pool after which an entry expires; None for never.
        lease_ns: How long a prefiller usually keeps a KV cache; None for ever.
        lease_margin_ns: How long before the end of its lease an entry's KV cache counts as lost; at
            most half of the lease, so that a short lease can be used at all.
        queue_ttl_ns: Time after which a request that waits before prefill expires, counted from its
            arrival or from the last time that it was served; None for never.
    """

    ranks: int
    batch_limit: int
    rank_kv_tokens: int | None = None
    prefillers: int = 1
    probe_limit: int | None = None
    direct_limit: int | None = None
    prefiller_kv_tokens: int | None = None
    pool_limit: int | None = None
    deadline_ns: int | None = None
    ttl_ns: int | None = None
    lease_ns: int | None = None
    lease_margin_ns: int = 5_000_000_000
    queue_ttl_ns: int | None = None
    rank_batch_limits: tuple[int, ...] | None = None
    rank_speeds: tuple[float, ...] | None = None
    learn_speeds: bool = False
    deep_pool: bool = False
    prefiller_memory_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in (
            # None is no limit; 0 would let nothing start.
            "ranks",
            "batch_limit",
            "rank_kv_tokens",
            "prefillers",
            "probe_limit",
            "direct_limit",
            "prefiller_kv_tokens",
            "prefiller_memory_tokens",
            "pool_limit",
            "deadline_ns",
            "ttl_ns",
            "lease_ns",
            "queue_ttl_ns",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        limits = self.rank_batch_limits
        if limits is not None and (len(limits) != self.ranks or min(limits) < 1):
            raise ConfigError(
                f"rank_batch_limits is {limits}, must be {self.ranks} numbers of at least 1"
            )
        speeds = self.rank_speeds
        if speeds is not None and (
            len(speeds) != self.ranks or not all(0.0 < speed < inf for speed in speeds)
        ):
            raise ConfigError(f"rank_speeds is {speeds}, must be {self.ranks} positive numbers")
        if self.lease_margin_ns < 0:
            raise ConfigError(f"lease_margin_ns is {self.lease_margin_ns}, must be at least 0")

    def check_grown(self, before: "SchedulerConfig") -> None:
        """Check that this can replace `before` while requests are in flight.

        Raises:
            ConfigError: There are fewer ranks or prefillers.
        """
        # Ids are indices, and requests that are bound keep the ids of their instances.
        for name in ("ranks", "prefillers"):
            then, now = getattr(before, name), getattr(self, name)
            if now < then:
                raise ConfigError(f"{name} is {now}, cannot be fewer than the {then} there are")
