"""What can go wrong with an engine."""

import errno
from collections.abc import Iterator
from enum import Enum
from ssl import SSLCertVerificationError

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.wire.messages import WireError, WireFault


class Fault(Enum):
    """How an exchange with an engine failed."""

    CONNECT = "connect"  # Refused, or its certificate is another's: the engine is not there.
    UNREACHABLE = "unreachable"  # No route, no such name, or no TLS.
    CONNECT_TIMEOUT = "connect_timeout"
    RESET = "reset"  # Closed before a complete answer.
    TIMEOUT = "timeout"  # Connected, then silent for too long.
    SERVER_ERROR = "server_error"  # An answer of 5xx.
    PROTOCOL = "protocol"  # An answer that is not HTTP, or not what was asked for.
    # Ours: no file descriptor, memory or port left, or no resolver. Says nothing of the engine.
    LOCAL = "local"


# The system's errors that mean a want of this process. A proxy that blamed the engines for them
# would quarantine all of them at once.
_LOCAL_ERRORS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)
_FAULTS = {
    WireFault.CONNECT: Fault.UNREACHABLE,
    WireFault.NO_ADDRESS: Fault.LOCAL,
    WireFault.CONNECT_TIMEOUT: Fault.CONNECT_TIMEOUT,
    WireFault.RESET: Fault.RESET,
    WireFault.STALE: Fault.RESET,
    WireFault.PROTOCOL: Fault.PROTOCOL,
    WireFault.TOO_LARGE: Fault.PROTOCOL,
    WireFault.TIMEOUT: Fault.TIMEOUT,
    WireFault.TOO_LATE: Fault.LOCAL,
}


def fault_of(error: WireError) -> Fault:
    """Return what a broken exchange says of its engine."""
    if error.kind is WireFault.CONNECT and is_refused(error):
        return Fault.CONNECT
    if is_local(error):
        return Fault.LOCAL
    return _FAULTS[error.kind]


def is_local(error: BaseException) -> bool:
    """Tell whether an error comes, through any chain of causes, from a want of this process."""
    return any(isinstance(one, OSError) and one.errno in _LOCAL_ERRORS for one in _causes(error))


def is_refused(error: BaseException) -> bool:
    """Tell whether an error comes, through any chain of causes, from a refusal of either side."""
    refusals = ConnectionRefusedError, SSLCertVerificationError
    return any(isinstance(one, refusals) for one in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and whatever it comes from."""
    seen: set[int] = set()
    open_ends: list[BaseException | None] = [error]
    while open_ends:
        cause = open_ends.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        open_ends += [cause.__cause__, cause.__context__]
        if isinstance(cause, BaseExceptionGroup):
            open_ends += cause.exceptions


class FetchError(BalanceRouteError):
    """A request to an engine that got no usable answer."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(f"{fault.value}: {message}")
        self.fault = fault
