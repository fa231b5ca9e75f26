"""Settings for every test: Hypothesis is deterministic unless told to search deeply.

`HYPOTHESIS_PROFILE=deep make test` draws many new examples instead.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# As the command line does; before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=5_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="module", autouse=True)
def end_by_signals() -> Iterator[None]:
    """Let the tests be ended from outside: uvloop leaves its handlers behind when a loop is closed."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
