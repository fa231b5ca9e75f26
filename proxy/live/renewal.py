"""Certificates, keys and tenants that are read again on a signal while the proxy serves."""

import logging
from collections.abc import Callable
from typing import Protocol

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security.credentials import Credentials

_log = logging.getLogger(__name__)


class Renewable(Protocol):
    """What uses credentials."""

    def renew(self, read: Callable[[], Credentials]) -> dict[str, object]:
        """Read them and use them; return how many there are. Raises ConfigError."""


def renew(one: Renewable, read: Callable[[], Credentials]) -> None:
    """Read them again, and use them unless one of them is bad; see `Proxy.renew`."""
    try:
        fields = one.renew(read)
    except ConfigError as error:
        fields = {"reason": error}
        _log.error("certificates, keys and tenants stay as they are", extra={"fields": fields})
        return
    _log.info("certificates, keys and tenants were read again", extra={"fields": fields})
