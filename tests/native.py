"""What tests of the native library need."""

import shutil

import pytest

from balanceroute.proxy.wire.http1.pump import find_library

# Where cargo is, `make native` builds it: to skip then would hide that nobody did.
needs_native = pytest.mark.skipif(
    find_library() is None and shutil.which("cargo") is None,
    reason="neither the native library is here nor cargo, which would build it (make native)",
)
