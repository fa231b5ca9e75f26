"""What a broken exchange says of an engine."""

import errno

import pytest

from balanceroute.proxy.live.engines.engine_url import Fault, fault_of
from balanceroute.proxy.wire.messages import WireError, WireFault


def broken(kind: WireFault, cause: OSError | None = None) -> WireError:
    error = WireError(kind, "broken", sent=False, answered=False)
    error.__cause__ = cause
    return error


OF_THIS_MACHINE = {WireFault.NO_ADDRESS, WireFault.TOO_LATE}


@pytest.mark.parametrize("kind", [kind for kind in WireFault if kind not in OF_THIS_MACHINE])
def test_every_way_to_break_off_says_something_of_the_engine(kind: WireFault) -> None:
    assert fault_of(broken(kind)) is not Fault.LOCAL


def test_an_engine_is_not_blamed_for_file_descriptors_that_this_process_lacks() -> None:
    lacking = broken(WireFault.CONNECT, OSError(errno.EMFILE, "too many open files"))
    refused = broken(WireFault.CONNECT, OSError(errno.ECONNREFUSED, "connection refused"))
    assert fault_of(lacking) is Fault.LOCAL
    assert fault_of(refused) is Fault.CONNECT


@pytest.mark.parametrize("code", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT])
def test_only_a_refusal_says_that_nobody_is_there(code: int) -> None:
    assert fault_of(broken(WireFault.CONNECT, OSError(code, "no route"))) is Fault.UNREACHABLE
