"""The KV memory of the engines: what the settings say, and what the engines' metrics say."""

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from balanceroute.proxy.live.engines.instances import Role, Target

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.engine_gauges import EngineGauges

_log = logging.getLogger(__name__)


class RankMemory:
    """How many KV tokens fit on a rank, and on a prefiller.

    Args:
        given: `--rank-kv-tokens`; None if it is not given.
        used: Whether what the ranks say is used where nothing is given.
        prefiller_share: How full a prefiller may be; None if nobody asks.

    Attributes:
        prefiller_tokens: KV tokens that each prefiller may hold: the least that one says, times that
            share. None if none says.
        tokens: KV tokens that fit on each rank: what is given, or the least that an engine says. None
            for no limit.
    """

    def __init__(
        self, given: int | None, *, used: bool, prefiller_share: float | None = None
    ) -> None:
        self.tokens = given
        self.prefiller_tokens: int | None = None
        self._prefiller_share = prefiller_share
        self._given = given
        self._used = used and given is None
        self._told: dict[Target, int] = {}

    def scraped(self, target: Target, gauges: "EngineGauges", present: Collection[Target]) -> bool:
        """Take in what an engine says; return whether what fits has changed.

        Args:
            target: The engine.
            gauges: What its page says.
            present: The engines that there are.
        """
        tokens = gauges.kv_tokens
        if tokens is None or self._told.get(target) == tokens:
            return False
        self._told = {one: size for one, size in self._told.items() if one in present}
        self._told[target] = tokens
        if target.role is Role.PREFILL:
            return self._fits_prefillers()
        fields = {"url": target.url, "kv_tokens": tokens}
        if self._given is not None and self._given > tokens:
            fields["rank_kv_tokens"] = self._given
            message = "a decode rank holds less than --rank-kv-tokens, and will preempt requests"
            _log.warning(message, extra={"fields": fields})
        before = self.tokens
        if self._used:
            self.tokens = self._least(Role.DECODE)
            _log.info("a decode rank's KV tokens", extra={"fields": fields})
        return self.tokens != before

    def _fits_prefillers(self) -> bool:
        if self._prefiller_share is None:
            return False
        before = self.prefiller_tokens
        self.prefiller_tokens = max(1, int(self._prefiller_share * self._least(Role.PREFILL)))
        return self.prefiller_tokens != before

    def _least(self, role: Role) -> int:
        return min(size for one, size in self._told.items() if one.role is role)
