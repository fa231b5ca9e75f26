"""Engines that sleep: they take requests, and do not serve them."""

import logging

from balanceroute.proxy.live.engines.instances import Instances, Target

_log = logging.getLogger(__name__)


def note_sleep(instances: Instances, target: Target, *, asleep: bool) -> bool:
    """Take in whether an engine sleeps; return whether that is new."""
    present = instances.of(target)
    if all(one.asleep == asleep for one in present):
        return False
    for one in present:
        one.asleep = asleep
    fields = {"role": target.role.value, "url": target.url}
    _log.warning("instance %s", "sleeps" if asleep else "is awake", extra={"fields": fields})
    return True
