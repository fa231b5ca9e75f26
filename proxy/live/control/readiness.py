"""Tells the log when the fleet becomes ready, or ceases to be."""

import logging

from balanceroute.proxy.live.engines.instances import Instances, Role

_log = logging.getLogger(__name__)


class Readiness:
    """Whether each role has an engine that is up, as it was logged last."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self._missing: set[Role] = set()
        self._was_ready = False

    def log(self) -> None:
        """Log when a role has no engine left, and when each has one again."""
        missing = self._instances.missing
        self._was_ready |= not missing
        new = missing - self._missing - self._instances.unprobed  # These may be up.
        message = (
            "no engine of a role is up" if self._was_ready else "waiting for engines of a role"
        )
        for role in sorted(new, key=_name):
            _log.warning(message, extra={"fields": {"role": role.value}})
        if self._missing and not missing:
            _log.warning("the fleet is ready: an engine of each role is up")
        self._missing = self._missing & missing | new


def _name(role: Role) -> str:
    return role.value
