"""What a `Scheduler` is made from: its size and limits, and parts from outside this package."""

import sys
from dataclasses import dataclass, fields
from importlib import import_module
from math import inf
from typing import Any

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import integer, switch


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The size of the deployment and the limits of its queues."""

    ranks: int  # G, decode ranks.
    batch_limit: int  # B, slots of a rank's batch.
    rank_kv_tokens: int | None = integer(
        None,
        "KV tokens that fit on a rank; a warning tells if its engine says less",
        1,
        10**9,
        shown_default="with --kv-peak-quantile what the engines say, else no limit",
        word="none",
    )
    learn_speeds: bool = switch(
        False, "learn the --rank-speeds from the times of decode steps, unless they are told"
    )
    probe_limit: int | None = integer(
        None, "prefills at a time on one prefiller", 1, 10**6, word="none"
    )
    prefiller_kv_tokens: int | None = integer(
        None, "KV tokens that one prefiller may hold for the pool", 1, 10**9, word="none"
    )
    # Shallow because its KV caches have leases. Requests without prefill count, but do not wait for it.
    pool_limit: int | None = integer(
        None,
        "requests in prefill or prefilled; the others wait before prefill, where they hold no KV "
        "cache",
        1,
        10**6,
        shown_default="what the ranks admit in a sixth of the lease, with --first-token prefill in half "
        "of what is usable of it, at least 24, G and 2 P, for G ranks and P prefillers",
        word="auto",
    )
    # A good part of what a prefiller's batch holds, where `max_num_seqs` is as small as in our topologies.
    direct_limit: int | None = integer(
        4,
        "sequences at a time of such requests on one prefiller; a request of more waits for one that "
        "has none",
        1,
        10**6,
    )
    prefillers: int = 1  # P, at least 1.
    # Time in the pool after which an entry goes first, at any cost. None for three quarters of its
    # lease, unless it costs less to prefill it again; see `leases`.
    deadline_ns: int | None = None
    ttl_ns: int | None = None  # Time in the pool after which an entry expires; None for never.
    lease_ns: int | None = None  # How long a prefiller usually keeps a KV cache; None for ever.
    # How long before the end of its lease an entry's KV cache counts as lost; at most half of the
    # lease, so that a short lease can be used at all.
    lease_margin_ns: int = 5_000_000_000
    # Time after which a request that waits before prefill expires, counted from its arrival or from
    # the last time that it was served; None for never.
    queue_ttl_ns: int | None = None
    # The slots of each rank; None if all have `batch_limit`.
    rank_batch_limits: tuple[int, ...] | None = None
    # How fast each rank reads its KV cache, relative to the other ranks; None if all are equally fast,
    # or if the scheduler learns it.
    rank_speeds: tuple[float, ...] | None = None
    # Whether the pool is as deep as leases allow, rather than as shallow as balance permits: for clients
    # that get their first token before the pool.
    deep_pool: bool = False
    # Whether no other scheduler sends to the ranks now: foreign requests are then left over from an
    # earlier one, and get no room to grow.
    leads: bool = False
    # As `prefiller_kv_tokens`, for a deep pool while its rate of departures is unknown: a share of the least
    # memory that a prefill engine reports; None if none does.
    prefiller_memory_tokens: int | None = None

    def __post_init__(self) -> None:
        # None is no limit; 0 would let nothing start. No number is too large, as those that flags give.
        for one in fields(self):
            value = getattr(self, one.name)
            if type(value) is int and value < 1 and one.name != "lease_margin_ns":
                raise ConfigError(f"{one.name} is {value}, must be at least 1")
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


# Stands for "no limit" in `Fleet.free_slots` and `Fleet.free_kv_tokens`.
UNLIMITED = 1 << 62


# Parts from outside this package: `module:function`, or what an installed package calls so.
#
# A package names its parts in its own metadata, as entry points of the groups
# `balanceroute.policies` and `balanceroute.predictors`.


def is_outside(name: str) -> bool:
    """Return whether a name is one of these, `module:function`."""
    module, colon, function = name.partition(":")
    return bool(colon) and all(map(str.isidentifier, [*module.split("."), function]))


def outside_name(kind: str, name: str) -> str | None:
    """Return the `module:function` of a part that is none of this package's; None if there is none.

    Args:
        kind: "policies" or "predictors".
        name: That itself, or the name of an entry point.
    """
    if is_outside(name):
        return name
    # Here: it would bring sockets and more into the core.
    from importlib.metadata import entry_points  # noqa: PLC0415

    found = (one.value for one in entry_points(group=f"balanceroute.{kind}", name=name))
    return next(found, None)


def imported(what: str, name: str) -> Any:
    """Import a function; modules of the working directory come last.

    Args:
        what: What it makes, for messages.
        name: `module:function`.

    Raises:
        ConfigError: There is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # A console script does not look there.
    try:
        return getattr(import_module(module_name), function_name)
    # Any exception: the module is third-party code.
    except Exception as error:
        raise ConfigError(f"{what} {name!r} cannot be imported: {error}") from error


def made(what: str, name: str, members: tuple[str, ...], *arguments: object) -> Any:
    """Return the part that such a function makes.

    Raises:
        ConfigError: It cannot be imported, fails, or makes something without these members.
    """
    function = imported(what, name)
    try:
        part = function(*arguments)
    except Exception as error:
        raise ConfigError(f"{what} {name!r} cannot be made: {error}") from error
    missing = [member for member in members if not hasattr(part, member)]
    if missing:
        raise ConfigError(f"{what} {name!r} is none: {part!r} has no {', '.join(missing)}")
    return part
