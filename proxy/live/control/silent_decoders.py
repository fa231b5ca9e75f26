"""Decode servers that did not tell their ranks when the proxy started."""

import asyncio
import logging
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.errors import ConflictError
from balanceroute.proxy.live.engines.instances import Role

if TYPE_CHECKING:
    from balanceroute.proxy.live.control.roster import Roster
    from balanceroute.proxy.live.settings.engines import DecodeServer

# Between two questions for the ranks of a decode server that does not answer yet.
_DISCOVERY_S = 1.0
_log = logging.getLogger(__name__)


async def await_decoder(roster: "Roster", server: "DecodeServer") -> None:
    """Ask a decode server for its ranks until it tells them, then add them."""
    while True:
        await asyncio.sleep(_DISCOVERY_S)
        try:
            await roster.add(Role.DECODE, server.url.base, ranks=None, bootstrap=None)
        except ConflictError:
            return  # It was added meanwhile.
        except ConfigError as error:
            _log.debug("no ranks yet", extra={"fields": {"reason": str(error)}})
        else:
            return
