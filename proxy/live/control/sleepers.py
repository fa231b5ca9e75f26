"""Engines that sleep: they take requests, and do not serve them."""

import logging
from collections.abc import Callable

from balanceroute.proxy.live.engines.instances import Instances, Target

_log = logging.getLogger(__name__)


class Sleepers:
    """Keeps which ones do.

    Args:
        instances: All of them.
        changed: Called when one has fallen asleep or is awake again.
    """

    def __init__(self, instances: Instances, changed: Callable[[], None]) -> None:
        self._instances = instances
        self._changed = changed

    def note(self, target: Target, *, asleep: bool) -> None:
        """Take in whether an engine sleeps."""
        present = self._instances.of(target)
        if all(one.asleep == asleep for one in present):
            return
        for one in present:
            one.asleep = asleep
        fields = {"role": target.role.value, "url": target.url}
        _log.warning("instance %s", "sleeps" if asleep else "is awake", extra={"fields": fields})
        self._changed()
