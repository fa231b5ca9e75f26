"""What a Mooncake bootstrap server tells of its engine."""

import pytest
from tests.support.site import transcript

from balanceroute.proxy.live.connectors import BootstrapIdentity
from balanceroute.proxy.live.engines.engine_facts import read_identity
from balanceroute.proxy.live.engines.engine_url import Fault, FetchError

ADDRESS = "http://10.0.0.1:8998"


def test_the_first_rank_of_a_real_server_is_named() -> None:
    identity = read_identity(transcript("mooncake_bootstrap_query.resp"), ADDRESS)
    assert identity == BootstrapIdentity("fd6a7f72-dbd6-4709-a301-6a1566937c76", ADDRESS)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\xff",
        b"not json",
        b"[" * 100_000,
        b"null",
        b"[]",
        b'"0"',
        b"{}",
        b'{"1": {"engine_id": "a"}}',
        b'{"0": []}',
        b'{"0": {}}',
        b'{"0": {"engine_id": null}}',
        b'{"0": {"engine_id": ""}}',
        b'{"0": {"engine_id": 7}}',
    ],
)
def test_any_other_page_is_a_fault_of_the_protocol(page: bytes) -> None:
    with pytest.raises(FetchError, match="names no engine") as caught:
        read_identity(page, ADDRESS)
    assert caught.value.fault is Fault.PROTOCOL
