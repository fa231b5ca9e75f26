"""Instances that open, close, fit other ones than before, or are shared with others."""

from collections.abc import Mapping

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.events import (
    InstanceEvent,
    OthersOnRank,
    PrefillerClosed,
    PrefillerOpened,
    PrefillerPaired,
    PrefillerScraped,
    RankClosed,
    RankOpened,
    RequestId,
)
from balanceroute.proxy.core.ledger import Ledger
from balanceroute.proxy.core.lifecycle import Request, State
from balanceroute.proxy.core.pool import Pool
from balanceroute.proxy.core.prefill import Prefillers
from balanceroute.proxy.core.ranks import Ranks
from balanceroute.proxy.core.time_limits import pool_entry


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
                if request.state is State.POOLED and request.prefiller == prefiller:
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
