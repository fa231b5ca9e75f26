"""The bounded queue lets everyone in until too many wait, and says when to come again."""

import pytest

from balanceroute.proxy.core.admission import ADMISSIONS, BoundedQueue, Ending, Load, Refusal
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import Ticket

TICKET = Ticket(10)


@pytest.mark.parametrize(("waiting", "welcome"), [(0, True), (9, True), (10, False), (11, False)])
def test_requests_are_rejected_once_the_limit_waits(waiting: int, welcome: bool) -> None:
    admission = ADMISSIONS["bounded"](10)
    admission.ended(TICKET, Ending(served=True, first_token_ns=5, output_tokens=1), now_ns=9)
    assert (admission.offer(TICKET, Load(waiting), now_ns=0) is None) == welcome


def test_a_refusal_says_why_and_when_to_come_again() -> None:
    refusal = BoundedQueue(2, retry_after_s=7).offer(TICKET, Load(3), now_ns=0)
    assert refusal == Refusal(429, "3 requests wait already", retry_after_s=7)


def test_a_limit_below_one_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="limit is 0"):
        BoundedQueue(0)
    with pytest.raises(ConfigError, match="retry_after_s is 0"):
        BoundedQueue(1, retry_after_s=0)
