"""The cap on retries."""

from balanceroute.proxy.live.scheduling.driver import RetryBudget


def spend_all(budget: RetryBudget) -> int:
    count = 0
    while budget.spend():
        count += 1
    return count


def test_the_first_failures_may_be_retried() -> None:
    assert spend_all(RetryBudget()) == 10


def test_an_outage_is_retried_for_a_fifth_of_the_requests() -> None:
    budget = RetryBudget(reserve=0.0)
    retried = 0
    for _ in range(1_000):
        budget.earn()
        retried += spend_all(budget)
    assert 199 <= retried <= 200


def test_a_quiet_day_saves_up_no_storm() -> None:
    budget = RetryBudget(most=10.0)
    for _ in range(100_000):
        budget.earn()
    assert spend_all(budget) == 10


def test_nothing_is_spent_when_nothing_is_left() -> None:
    budget = RetryBudget(reserve=0.0, share=0.5)
    assert not budget.spend()
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
