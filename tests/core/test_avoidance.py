"""A request goes elsewhere than where it was lost, unless nothing else is open."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.warm_up import allowed, with_loss

T, F = True, False


@pytest.mark.parametrize(
    ("is_open", "lost_on", "expected"),
    [
        ([T, T, F], (), [T, T, F]),
        ([T, T, T], (1,), [T, F, T]),
        ([T, T, F], (1,), [T, F, F]),
        ([F, T, F], (1,), [F, T, F]),
        ([T, T, T], (2, 0), [F, T, F]),
        ([T, T, T], (2, 0, 1), [F, F, T]),
        ([T, T, F], (2, 1, 0), [F, T, F]),
        ([F, F, F], (1,), [F, F, F]),
    ],
)
def test_losses_are_forgiven_from_the_earliest_until_one_is_open(
    is_open: list[bool], lost_on: tuple[int, ...], expected: list[bool]
) -> None:
    assert allowed(is_open, lost_on) == expected


@given(
    is_open=st.lists(st.booleans(), min_size=1, max_size=5),
    losses=st.lists(st.integers(0, 4), max_size=8),
)
def test_an_open_instance_is_allowed_and_the_last_loss_is_not_while_another_is_open(
    is_open: list[bool], losses: list[int]
) -> None:
    given_open = list(is_open)
    lost_on: tuple[int, ...] = ()
    for instance in losses:
        lost_on = with_loss(lost_on, instance % len(is_open))
    left = allowed(is_open, lost_on)
    assert is_open == given_open
    assert any(left) == any(is_open)
    assert all(is_open[one] for one, may_go in enumerate(left) if may_go)
    if lost_on and any(is_open[one] for one in range(len(is_open)) if one != lost_on[-1]):
        assert not left[lost_on[-1]]


def test_a_second_loss_on_the_same_instance_is_its_latest() -> None:
    assert with_loss((2, 0, 1), 0) == (2, 1, 0)
    assert with_loss((), 3) == (3,)
