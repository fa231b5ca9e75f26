"""What the soak reads off the proxy's pages and log."""

import json

from tests.support.soak.run import held_by_engines, held_by_proxy, phase_of, record_of

from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.live.telemetry.request_log import line_of


def test_a_log_line_tells_the_record_but_for_its_times() -> None:
    record = RequestRecord(
        request_id="req-3",
        endpoint="/v1/completions",
        arrived_ns=0,
        arrived_unix_s=7.5,
        model="m",
        stream=True,
        outcome=Outcome.UPSTREAM_ERROR,
        status=502,
        output_tokens=4,
        retries=2,
        recomputes=1,
        reason="it failed",
    )
    assert record_of(json.loads(line_of(record))) == record


def test_a_cancelled_request_was_where_its_times_end() -> None:
    line: dict[str, object] = {"queue_s": None, "prefill_s": None, "rank": "", "ttft_s": None}
    phases = [phase_of(line)]
    for name in line:
        line[name] = 0.1
        phases.append(phase_of(line))
    assert phases == ["queued", "prefilling", "pooled", "before the first token", "streaming"]


def test_whatever_is_held_is_told() -> None:
    rank = {"name": "d", "kv_tokens": 0, "bound": 0, "started": 0}
    prefiller = {"name": "p", "probes": 0, "held_tokens": 0}
    counts = ("queued", "prefilling", "pooled", "decoding", "client_connections")
    state = dict.fromkeys(counts, 0) | {"ranks": [rank], "prefillers": [prefiller]}
    assert held_by_proxy(state) == {}
    for name in counts:
        assert list(held_by_proxy(state | {name: 2}).values()) == [2]
    for name in ("kv_tokens", "bound", "started"):
        assert held_by_proxy(state | {"ranks": [rank | {name: 3}]}) == {f"{name} of d": 3}
    for name in ("probes", "held_tokens"):
        held = held_by_proxy(state | {"prefillers": [prefiller | {name: 3}]})
        assert held == {f"{name} of p": 3}
    lists = ("loads", "running", "waiting", "arriving", "held_blocks")
    stats = {name: [0, 0] for name in lists} | {"idle": True, "leases": {"held": 0}}
    assert held_by_engines(stats) == {}
    for name in lists:
        assert held_by_engines(stats | {name: [0, 1]}) == {name: [0, 1]}
    assert held_by_engines(stats | {"idle": False})
    assert held_by_engines(stats | {"leases": {"held": 1}})
