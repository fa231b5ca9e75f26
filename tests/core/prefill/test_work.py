"""What prefillers have to compute, in measured time."""

import pytest

from balanceroute.proxy.core.events import PrefillerId, RequestId
from balanceroute.proxy.core.prefill.work import PrefillWork, ServiceModel

P0, P1 = PrefillerId(0), PrefillerId(1)
A, B, C = (RequestId(number) for number in range(3))


def trained(base_ns: int, per_token_ns: int, prefiller: PrefillerId = P0) -> PrefillWork:
    work = PrefillWork()
    now_ns = 0
    for number in range(10, 200):
        tokens = 100 * (1 + number % 7)
        work.begin(RequestId(number), prefiller, tokens, now_ns)
        now_ns += base_ns + per_token_ns * tokens
        work.end(RequestId(number), tokens, now_ns)
    return work


def test_the_line_is_found() -> None:
    work = trained(5_000, 70)
    assert work.service_ns(P0, 1_000) == pytest.approx(75_000, rel=0.03)
    assert work.service_ns(P0, 0) == pytest.approx(5_000, rel=0.4)
    # One that has computed nothing counts as fast as the others.
    assert work.service_ns(P1, 1_000) == work.service_ns(P0, 1_000)


def test_prompts_of_one_length_cost_what_they_take_and_shorter_ones_less() -> None:
    model = ServiceModel()
    for _ in range(50):
        model.observe(1_000, 50_000)
    base, slope = model.line
    assert base + 1_000 * slope == pytest.approx(50_000)
    assert base == pytest.approx(0.0, abs=1e-6)


def test_before_the_first_prefill_tokens_stand_for_time() -> None:
    work = PrefillWork()
    work.begin(A, P0, 300, 0)
    assert work.wait_ns(P0, 10**9) == 300
    assert work.service_ns(P1, 40) == 40
    assert work.wait_ns(P1, 0) == 0


def test_the_wait_is_the_queue_less_what_is_done_of_the_first() -> None:
    work = trained(0, 100)
    work.begin(A, P0, 1_000, 10**9)
    work.begin(B, P0, 500, 10**9)
    assert work.wait_ns(P0, 10**9) == pytest.approx(150_000, rel=0.02)
    assert work.wait_ns(P0, 10**9 + 60_000) == pytest.approx(90_000, rel=0.02)
    # One that takes longer than expected is not done before it ends.
    assert work.wait_ns(P0, 10**9 + 900_000) == pytest.approx(50_000, rel=0.02)
    work.end(A, 1_000, 10**9 + 900_000)
    assert work.wait_ns(P0, 10**9 + 900_000) == pytest.approx(50_000, rel=0.2)


def test_a_lost_prefill_teaches_nothing() -> None:
    work = trained(0, 100)
    before = work.service_ns(P0, 1_000)
    work.begin(A, P0, 1_000, 0)
    work.begin(B, P0, 1_000, 0)
    work.begin(C, P0, 1_000, 0)
    work.end(A, None, 5)
    work.end(B, None, 10**12)
    assert work.service_ns(P0, 1_000) == before
    work.end(C, None, 10**12)
    assert work.wait_ns(P0, 10**12) == 0
    work.end(C, None, 10**12)


def test_a_slow_prefiller_is_known_by_its_own_times() -> None:
    work = trained(0, 100)
    for number in range(300, 340):
        work.begin(RequestId(number), P1, 100 + number, 0)
        work.end(RequestId(number), 100 + number, 400 * (100 + number))
    assert work.service_ns(P1, 1_000) > 3.5 * work.service_ns(P0, 1_000)


def test_a_prefiller_is_as_busy_as_it_was_lately() -> None:
    work = PrefillWork()
    assert work.utilisation(P0, 5) == 0.0
    now_ns = 10
    for number in range(2_000):  # Busy for a quarter of the time, then for all of it.
        idle_ns = 3_000 if number < 1_000 else 0
        now_ns += idle_ns
        work.begin(RequestId(number), P0, 100, now_ns)
        now_ns += 1_000
        work.end(RequestId(number), 100, now_ns)
        if number == 999:
            assert work.utilisation(P0, now_ns) == pytest.approx(0.25, abs=0.02)
    assert work.utilisation(P0, now_ns) > 0.99
    assert work.utilisation(P0, now_ns + 64_000 * 10) < 0.01
