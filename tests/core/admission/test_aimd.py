"""The controller: its order of decisions, its bounds, and the values of both versions."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.admission import POST_4, POST_5, Aimd, AimdSettings, Decision
from balanceroute.proxy.core.errors import ConfigError

S = 1e9
ABOVE, BELOW, INSIDE = 2.5 * S, 1.0 * S, 2.0 * S


def test_jitter_around_the_target_changes_nothing() -> None:
    controller = Aimd(POST_5)
    for ttft_s in (1.9, 2.1, 1.95, 1.6, 2.4):
        assert controller.decide(ttft_s * S, demand=True) is Decision.HOLD
    assert controller.cap == 64


def test_a_high_percentile_multiplies_and_a_low_one_adds() -> None:
    controller = Aimd(replace(POST_5, cooldown_ticks=0))
    assert controller.decide(ABOVE, demand=True) is Decision.DECREASE
    assert controller.cap == 48
    assert controller.decide(BELOW, demand=True) is Decision.INCREASE
    assert controller.cap == 49


def test_the_first_version_subtracts() -> None:
    controller = Aimd(POST_4)
    controller.decide(ABOVE, demand=True)
    assert controller.cap == 60


def test_without_demand_the_limit_does_not_grow_but_shrinks() -> None:
    controller = Aimd(POST_5)
    assert controller.decide(BELOW, demand=False) is Decision.HOLD
    assert controller.decide(ABOVE, demand=False) is Decision.DECREASE


def test_after_a_decrease_measurements_are_stale_for_three_ticks() -> None:
    controller = Aimd(POST_5)
    controller.decide(ABOVE, demand=True)
    # What is not known does not use the cooldown up.
    assert controller.decide(None, demand=True) is Decision.UNKNOWN
    assert [controller.decide(ABOVE, demand=True) for _ in range(4)] == [
        Decision.COOLDOWN,
        Decision.COOLDOWN,
        Decision.COOLDOWN,
        Decision.DECREASE,
    ]


def test_a_decrease_at_the_floor_counts_and_cools_down() -> None:
    controller = Aimd(replace(POST_5, cap_initial=32))
    assert controller.decide(ABOVE, demand=True) is Decision.DECREASE
    assert controller.cap == 32
    assert controller.decide(BELOW, demand=True) is Decision.COOLDOWN


def test_slow_steps_shrink_the_limit_and_keep_it_from_growing() -> None:
    guarded = replace(POST_5, tpot_target_ns=100_000_000)
    assert Aimd(guarded).decide(BELOW, demand=True, tpot_ns=130e6) is Decision.DECREASE
    assert Aimd(guarded).decide(BELOW, demand=True, tpot_ns=100e6) is Decision.HOLD
    assert Aimd(guarded).decide(BELOW, demand=True, tpot_ns=50e6) is Decision.INCREASE
    assert Aimd(guarded).decide(BELOW, demand=True, tpot_ns=None) is Decision.INCREASE
    assert Aimd(POST_5).decide(BELOW, demand=True, tpot_ns=130e6) is Decision.INCREASE


SIGNALS = st.lists(
    st.tuples(st.none() | st.sampled_from([ABOVE, BELOW, INSIDE]), st.booleans()), max_size=60
)


@given(
    signals=SIGNALS,
    cooldown=st.integers(0, 4),
    factor=st.floats(0.0, 1.0),
    step_down=st.integers(0, 9),
    low=st.integers(1, 9),
    span=st.integers(0, 20),
)
def test_the_limit_stays_in_its_bounds_and_decreases_are_apart(
    signals: list[tuple[float | None, bool]],
    cooldown: int,
    factor: float,
    step_down: int,
    low: int,
    span: int,
) -> None:
    settings = AimdSettings(
        cap_min=low,
        cap_max=low + span,
        cap_initial=low + span // 2,
        cooldown_ticks=cooldown,
        factor=factor,
        step_down=step_down,
    )
    controller, decreases = Aimd(settings), list[int]()
    for tick, (ttft_ns, demand) in enumerate(signals):
        before = controller.cap
        decision = controller.decide(ttft_ns, demand=demand)
        assert low <= controller.cap <= low + span
        assert controller.cap <= before + (decision is Decision.INCREASE)
        if controller.cap < before:
            assert decision is Decision.DECREASE
        if decision is Decision.DECREASE:
            decreases.append(tick)
    assert all(later - tick > cooldown for tick, later in pairwise(decreases))


def test_a_limit_of_another_controller_begins_within_the_bounds() -> None:
    assert [POST_5.beginning_at(cap).cap_initial for cap in (1, 40, 999)] == [32, 40, 256]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_ns", 0),
        ("tick_ns", 0),
        ("band", -0.1),
        ("cap_min", 0),
        ("cap_max", 31),
        ("cap_initial", 257),
        ("factor", 1.1),
        ("factor", float("nan")),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        replace(POST_5, **{name: value})  # type: ignore[arg-type]
