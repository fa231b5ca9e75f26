"""A token bucket grants no more than rate x time + burst, to the nanosecond."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.admission.rules import Rate
from balanceroute.proxy.core.admission.tenants import Bucket
from balanceroute.proxy.core.errors import ConfigError

S = 1_000_000_000


def test_a_bucket_is_full_at_first_and_refills_at_its_rate() -> None:
    bucket = Bucket(Rate(60, 3), now_ns=5 * S)
    assert [bucket.wait_ns(amount, 5 * S) for amount in (1, 3, 4)] == [0, 0, S]
    bucket.take(3, 5 * S)
    assert bucket.available(5 * S) == 0
    assert bucket.wait_ns(1, 5 * S) == S
    assert bucket.available(6 * S - 1) == 0
    assert bucket.available(6 * S) == 1
    assert bucket.available(100 * S) == 3


def test_what_was_taken_beyond_it_is_a_debt() -> None:
    bucket = Bucket(Rate(60, 3), now_ns=0)
    bucket.take(10, 0)
    assert bucket.available(0) == -7
    assert bucket.wait_ns(1, 0) == 8 * S
    bucket.take(-20, 0)
    assert bucket.available(0) == 3


def test_another_rate_leaves_what_was_taken() -> None:
    bucket = Bucket(Rate(60, 10), now_ns=0)
    bucket.take(6, 0)
    bucket.change(Rate(600, 20), now_ns=0)
    assert bucket.available(0) == 4
    assert bucket.available(S) == 14
    bucket.change(Rate(60, 2), now_ns=S)
    assert bucket.available(S) == 2


@pytest.mark.parametrize(("rate", "name"), [((0, 1), "per_minute"), ((1, 0), "burst")])
def test_a_rate_that_lets_nothing_pass_is_refused_by_name(rate: tuple[int, int], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        Rate(*rate)


@given(
    rate=st.builds(Rate, st.integers(1, 10**9), st.integers(1, 10**9)),
    asks=st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 10**9)), max_size=30),
)
def test_grants_never_exceed_the_rate_and_a_wait_is_exact(
    rate: Rate, asks: list[tuple[int, int]]
) -> None:
    bucket = Bucket(rate, now_ns=0)
    now_ns = granted = 0
    for pause_ns, amount in asks:
        now_ns += pause_ns
        wait_ns = bucket.wait_ns(amount, now_ns)
        if amount > rate.burst:
            assert wait_ns
            continue
        if wait_ns:
            # Not a nanosecond earlier, and then at once.
            assert bucket.wait_ns(amount, now_ns + wait_ns - 1) == 1
            now_ns += wait_ns
            assert bucket.wait_ns(amount, now_ns) == 0
        bucket.take(amount, now_ns)
        granted += amount
        assert granted * 60 * S <= rate.per_minute * now_ns + rate.burst * 60 * S
