"""The whole proxy under faults, to clients that speak HTTP/3 over bad links."""

from functools import partial
from typing import TYPE_CHECKING, Protocol

import pytest

pytest.importorskip("aioquic", reason="needs the extra h3")

from tests.support.certificate import make_certificate
from tests.support.chaos.http3_trial import run_seed_over_http3

from balanceroute.proxy.wire.streams import StreamReply

if TYPE_CHECKING:
    from tests.support.chaos.trial import TrialReport

REQUESTS = 30


class RunSeed(Protocol):
    """Carries a seed's plan out."""

    def __call__(self, seed: int, *, requests: int) -> "TrialReport": ...


@pytest.fixture(scope="module")
def run_seed(tmp_path_factory: pytest.TempPathFactory) -> "RunSeed":
    """Return what runs a seed."""
    cert, key = make_certificate(tmp_path_factory.mktemp("tls"), kind="ed25519")
    return partial(run_seed_over_http3, cert=cert, key=key)


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_violates_nothing(run_seed: "RunSeed", seed: int) -> None:
    report = run_seed(seed, requests=REQUESTS)
    assert not report.violations, f"seed {seed}"
    assert sum(report.outcomes.values()) > 0


def test_what_is_sent_twice_is_found(run_seed: "RunSeed", monkeypatch: pytest.MonkeyPatch) -> None:
    write = StreamReply.write

    def twice(reply: StreamReply, data: bytes) -> None:
        write(reply, data)
        write(reply, data)

    monkeypatch.setattr(StreamReply, "write", twice)
    assert any(run_seed(seed, requests=20).violations for seed in range(4))
