"""What a page of the proxy's metrics says of its fleet."""

import pytest

from balanceroute.proxy.lab.advise.report import read_proxy_page
from balanceroute.proxy.lab.audit.observation import PageError


def page(*probes: int, queued: int = 0, pooled: int = 0) -> bytes:
    lines = ["# TYPE balanceroute_batch_limit gauge", "balanceroute_batch_limit 16.0"]
    for state, count in (("queued", queued), ("pooled", pooled)):
        lines.append(f'balanceroute_live_requests{{state="{state}"}} {count}')
    for rank in range(2):
        labels = f'{{rank="{rank}",name="http://d:{rank}"}}'
        lines.append(f"balanceroute_rank_kv_tokens{labels} {100 * (rank + 1)}.0")
        lines.append(f"balanceroute_rank_bound_requests{labels} 4.0")
    for number, count in enumerate(probes):
        labels = f'{{prefiller="{number}",name="http://p:{number}"}}'
        lines.append(f"balanceroute_prefiller_probes{labels} {count}.0")
    return "\n".join([*lines, "other 1", ""]).encode()


def test_loads_and_slots_are_those_of_the_ranks() -> None:
    look, batch = read_proxy_page(page(1, 0), 3.0)
    assert (look.time_s, batch) == (3.0, 16)
    told = {name: (one.kv_tokens, one.running) for name, one in look.decode.items()}
    assert told == {"http://d:0": (100.0, 4.0), "http://d:1": (200.0, 4.0)}
    assert [one.running for one in look.prefill.values()] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("probes", "prefill", "decode"), [((1, 1), 3.0, 2.0), ((1, 0), 0.0, 5.0), ((), 0.0, 2.0)]
)
def test_who_waits_before_prefill_waits_for_the_role_that_is_full(
    probes: tuple[int, ...], prefill: float, decode: float
) -> None:
    look, _ = read_proxy_page(page(*probes, queued=6, pooled=4), 0.0)
    assert {one.waiting for one in look.prefill.values()} <= {prefill}
    assert {one.waiting for one in look.decode.values()} == {decode}


@pytest.mark.parametrize("bad", [b"", b"<html>", b"balanceroute_batch_limit 4\n", b"vllm:x 1\n"])
def test_another_page_is_refused(bad: bytes) -> None:
    with pytest.raises(PageError, match="not a page of the proxy's metrics"):
        read_proxy_page(bad, 0.0)
