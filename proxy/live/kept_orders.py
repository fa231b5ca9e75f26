"""What was ordered and found of one deployment, kept for the process that is started next."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from balanceroute.proxy.live.control.standing import Keeper, Standing, basis_of, load, save
from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Status
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer
from balanceroute.proxy.live.telemetry.process_log import log_level

if TYPE_CHECKING:
    from balanceroute.proxy.core.admission import Budget
    from balanceroute.proxy.live.control.roster import Roster
    from balanceroute.proxy.live.discovery.reconciler import Reconciler
    from balanceroute.proxy.live.settings.config import ProxyConfig

# Between two looks at the limit on requests in flight, which moves every 5 s at most.
_LIMIT_S = 1.0


class KeptOrders:
    """Loads and keeps it.

    Args:
        keeper: Outlives the process; None to keep nothing.
        config: The settings.
    """

    def __init__(self, keeper: Keeper | None, config: "ProxyConfig") -> None:
        self._keeper = keeper
        self._config = config

    def load(self) -> Standing:
        """Return what was kept, or else what the settings say."""
        config = self._config
        named = (config.scheduling.policy, config.prefillers, config.decoders)
        return load(self._keeper, Standing(*named, basis=self._basis))

    def keep(
        self,
        policy: str,
        roster: "Roster",
        found: "Reconciler | None",
        budget: "Budget | None",
        *,
        paused: bool,
    ) -> None:
        """Keep how it stands now.

        Args:
            policy: The policy's name.
            roster: The engines.
            found: What registers engines; None if nothing does.
            budget: The limit on requests in flight; None for none.
            paused: Whether no prefill may start.
        """
        if self._keeper is None:
            return
        servers = roster.servers.values()
        instances: list[Prefiller | Rank] = [*roster.instances.prefillers, *roster.instances.ranks]
        standing = Standing(
            policy,
            tuple(one for one in servers if isinstance(one, PrefillServer)),
            tuple(one for one in servers if isinstance(one, DecodeServer)),
            tuple({one.target for one in instances if one.status is Status.DRAINING}),
            () if found is None else tuple(found.owned),
            () if found is None else tuple(found.leaving),
            self._basis,
            log_level(other_than=self._config.log.log_level),
            None if budget is None else budget.cap,
            paused,
            roster.deadlines.standing(),
        )
        save(self._keeper, standing)

    def hand_over(self) -> None:
        """Keep nothing any more: it is another process's."""
        self._keeper = None

    async def follow(self, budget: "Budget", ordered: Callable[[], None]) -> None:
        """Call `ordered` whenever the limit on requests in flight has moved."""
        kept = budget.cap
        while True:
            await asyncio.sleep(_LIMIT_S)
            if budget.cap != kept:
                kept = budget.cap
                ordered()

    @property
    def _basis(self) -> str:
        """The name of the settings that orders and findings change."""
        config = self._config
        return basis_of(
            config.scheduling.policy, config.prefillers, config.decoders, config.discovery.discover
        )
