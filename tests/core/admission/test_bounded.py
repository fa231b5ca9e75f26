"""The bounded queue lets everyone in until too many wait, and says when to come again."""

import pytest

from balanceroute.proxy.core.admission import BoundedQueue, Refusal
from balanceroute.proxy.core.errors import ConfigError


@pytest.mark.parametrize(("waiting", "welcome"), [(0, True), (9, True), (10, False), (11, False)])
def test_requests_are_refused_once_the_limit_waits(waiting: int, welcome: bool) -> None:
    assert (BoundedQueue(10).refuse(waiting, now_ns=0) is None) == welcome


def test_a_refusal_says_why_and_when_to_come_again() -> None:
    refusal = BoundedQueue(2, retry_after_s=7).refuse(3, now_ns=0)
    assert refusal == Refusal("3 requests wait already", retry_after_s=7)


def test_a_limit_below_one_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="limit is 0"):
        BoundedQueue(0)
    with pytest.raises(ConfigError, match="retry_after_s is 0"):
        BoundedQueue(1, retry_after_s=0)
