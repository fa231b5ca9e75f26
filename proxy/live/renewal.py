"""Certificates and keys that are read again while the proxy serves.

All files are read and checked before any of them takes effect: if one is bad, everything stays.
Connections that are open, and requests that run, are not touched.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security.credentials import Credentials
from balanceroute.proxy.live.security.tls import load_certificate
from balanceroute.proxy.live.telemetry.process_log import redact_too

if TYPE_CHECKING:
    from balanceroute.proxy.live.proxy import Proxy

_log = logging.getLogger(__name__)


def renew(proxy: "Proxy", read: Callable[[], Credentials]) -> None:
    """Read certificates and keys again, and use them unless `read` raises ConfigError."""
    try:
        credentials = read()
        if proxy.tls is not None:
            listening = proxy.config.listening
            assert listening.tls_cert is not None
            assert listening.tls_key is not None
            load_certificate(proxy.tls, listening.tls_cert, listening.tls_key)
    except ConfigError as error:
        _log.error("certificates and keys stay as they are", extra={"fields": {"reason": error}})
        return
    redact_too(credentials.secrets)
    proxy.gateway.use_keys(credentials.api_keys, credentials.engine_key)
    if proxy.pages is not None:
        proxy.pages.token = credentials.admin_token
    if credentials.engine_key is not None:
        proxy.deployment.fetcher.use_key(credentials.engine_key.value)
    fields = {"api_keys": len(credentials.api_keys)}
    _log.info("certificates and keys were read again", extra={"fields": fields})
