"""Fair queueing in a proxy: one key's backlog does not hold up another key."""

from pathlib import Path

import pytest
from tests.live.frontend.gateway_requests import BODY, keys
from tests.support.site import Exchanged, Site, play


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        ("none", "abcdxyz"),
        ("request", "axbyczd"),
        ("prompt-tokens", "axyzbcd"),
        ("kv-token-seconds", "axyzbcd"),
    ],
)
def test_a_key_with_a_backlog_shares_the_prefiller(
    tmp_path: Path, cost: str, expected: str
) -> None:
    async def scenario(site: Site) -> None:
        def send(name: str, key: bytes, tokens: int) -> Exchanged:
            headers = [(b"x-request-id", name.encode()), (b"authorization", b"Bearer " + key)]
            values = BODY | {"prompt": list(range(100, 100 + tokens))}
            return site.send("/v1/completions", values, headers=headers)

        # The first one is in prefill while the others arrive.
        requests = [send(name, b"many", 40) for name in "abcd"]
        requests += [send(name, b"few", 15) for name in "xyz"]
        for request in requests:
            assert (await request.end()).status == 200, request.body
        names = [seen.header(b"x-request-id") for seen in site.received("prefill")]
        assert "".join(chr(name[0]) for name in names if name) == expected

    flags = {
        "fair_queue": cost,
        "probe_limit": 1,
        "api_key_file": keys(tmp_path, "keys", "many", "few"),
    }
    play(scenario, prefillers=1, flags=flags)
