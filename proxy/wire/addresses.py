"""The addresses of a host, cached for a time, and for longer while its name does not resolve."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable

_log = logging.getLogger(__name__)
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a name. Raises OSError (socket.gaierror) or UnicodeError."""

# How long a new look-up is waited for while the last addresses are known.
_PATIENCE_S = 1.0


class Addresses:
    """The addresses of one host.

    A name is resolved again after `ttl_s`, so that an engine that moved is found. While that fails or
    takes long, the last good addresses are used: a resolver that is down says nothing about the
    engine. Of several addresses, those at which the last attempt failed come last.

    Args:
        host: A name or an address.
        port: For the resolver.
        loop: Runs the look-ups.
        resolve: By default the loop's `getaddrinfo`.
        ttl_s: How long addresses are valid.
    """

    def __init__(
        self,
        host: str,
        port: int,
        loop: asyncio.AbstractEventLoop,
        *,
        resolve: Resolve | None = None,
        ttl_s: float = 5.0,
    ) -> None:
        self.known: list[str] = []  # The last good addresses; empty if the name has never resolved.
        self._host = host
        self._port = port
        self._loop = loop
        self._resolve = resolve or self._getaddrinfo
        self._ttl_s = ttl_s
        self._good_until_s = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._error: OSError | UnicodeError | None = None
        self._failing: set[str] = set()
        self._is_literal = _is_literal(host)
        if self._is_literal:
            self.known = [host]

    async def get(self) -> list[str]:
        """Return the addresses, in the order in which to try them.

        Raises:
            OSError: The name has never resolved (socket.gaierror).
            UnicodeError: The host is no valid name.
        """
        if self._is_literal or self._loop.time() < self._good_until_s:
            return self.known
        if self._asking is None:
            self._asking = self._loop.create_task(self._ask())
        # `wait` does not cancel the task with its caller: others may wait for it too.
        patience_s = _PATIENCE_S if self.known else None
        _, silent = await asyncio.wait([self._asking], timeout=patience_s)
        if silent:
            self._failed(TimeoutError(f"no answer within {patience_s:g} s"))
        if not self.known:
            assert self._error is not None
            raise self._error
        return self.known

    def tried(self, address: str, *, accepted: bool) -> None:
        """Note what became of an attempt to connect."""
        if accepted:
            self._failing.discard(address)
        else:
            self._failing.add(address)
        self.known = self._ordered(self.known)

    def invalidate(self) -> None:
        """Resolve again before the next connection: no address accepted this one."""
        self._good_until_s = 0.0

    async def _ask(self) -> None:
        try:
            found = await self._resolve(self._host, self._port)
            if not found:
                raise socket.gaierror(socket.EAI_AGAIN, "the name has no address")
        except (OSError, UnicodeError) as error:
            self._failed(error)
        else:
            self._failing.intersection_update(found)
            self.known, self._error = self._ordered(found), None
            self._good_until_s = self._loop.time() + self._ttl_s
        finally:
            self._asking = None

    def _ordered(self, addresses: list[str]) -> list[str]:
        if not self._failing:
            return addresses
        return sorted(addresses, key=lambda one: one in self._failing)

    def _failed(self, error: OSError | UnicodeError) -> None:
        if self.known:
            self._good_until_s = self._loop.time() + self._ttl_s
            if self._error is None:  # Logged once per outage.
                fields = {"host": self._host, "addresses": self.known, "reason": str(error)}
                message = "a name does not resolve; its last address is used"
                _log.warning(message, extra={"fields": fields})
        self._error = error

    async def _getaddrinfo(self, host: str, port: int) -> list[str]:
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [str(sockaddr[0]) for *_, sockaddr in found]


def listened_at(host: str) -> tuple[str, ...]:
    """Return where to listen for a host: `::` is every interface, for both families.

    Each family has a socket of its own, so that an IPv4 peer has the address that it has elsewhere.
    """
    return ("::", "0.0.0.0") if host == "::" else (host,)  # noqa: S104 - the user asks for it.


def bracketed(host: str) -> str:
    """Return a host as URLs and Host headers spell it."""
    return f"[{host}]" if ":" in host else host


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
