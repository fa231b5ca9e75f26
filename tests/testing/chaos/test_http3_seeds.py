"""The whole proxy under faults, to clients that speak HTTP/3 over bad links."""

import pytest

pytest.importorskip("aioquic", reason="needs the extra h3")

from balanceroute.proxy.testing.chaos.http3_trial import run_seed_over_http3
from balanceroute.proxy.wire.http3.reply import Http3Reply

REQUESTS = 30


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_violates_nothing(seed: int) -> None:
    report = run_seed_over_http3(seed, requests=REQUESTS)
    assert not report.violations, f"seed {seed}"
    assert sum(report.outcomes.values()) > 0


def test_what_is_sent_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Http3Reply.write

    def twice(reply: Http3Reply, data: bytes) -> None:
        write(reply, data)
        write(reply, data)

    monkeypatch.setattr(Http3Reply, "write", twice)
    assert any(run_seed_over_http3(seed, requests=20).violations for seed in range(4))
