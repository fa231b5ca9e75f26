"""The choices: which group each takes, and that a group without engines is never taken."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.model_choice import (
    DoubleDqn,
    Greedy,
    GroupOutlook,
    ModelChoice,
    QNetwork,
    Static,
    Targets,
    inputs_of,
)


def drawn(seed: int = 0, *, groups: int = 3, tasks: int = 2) -> DoubleDqn:
    network = QNetwork.drawn(inputs_of(groups, tasks), 16, groups, np.random.default_rng(seed))
    return DoubleDqn(network, groups=groups, tasks=tasks)


CHOICES: list[ModelChoice] = [Static(0), Static(1), Static(2), Greedy(), drawn()]


@pytest.mark.parametrize("choice", CHOICES)
@given(
    task=st.integers(0, 1),
    rate=st.floats(0, 1e6),
    outlooks=st.lists(
        st.builds(GroupOutlook, st.floats(0, 1e9), st.booleans()), min_size=3, max_size=3
    ).filter(lambda given: any(one.healthy for one in given)),
)
def test_a_group_without_engines_is_never_taken(
    choice: ModelChoice, task: int, rate: float, outlooks: Sequence[GroupOutlook]
) -> None:
    assert outlooks[choice.choose(task, rate, outlooks)].healthy


@given(st.lists(st.floats(0, 3), min_size=3, max_size=3), st.integers(0, 50))
def test_what_was_learned_keeps_the_targets_where_a_group_does(
    shares: list[float], seed: int
) -> None:
    place = drawn(seed).choose(0, 1.0, [GroupOutlook(one) for one in shares])
    assert shares[place] <= 1 or min(shares) > 1


def test_static_takes_the_nearest_smaller_group_then_larger_ones() -> None:
    choice = Static(1)
    assert choice.choose(0, 0, [GroupOutlook(9), GroupOutlook(9), GroupOutlook(0)]) == 1
    assert (
        choice.choose(0, 0, [GroupOutlook(9), GroupOutlook(0, healthy=False), GroupOutlook(0)]) == 0
    )
    down = GroupOutlook(0, healthy=False)
    assert choice.choose(0, 0, [down, down, GroupOutlook(9)]) == 2


def test_greedy_takes_the_largest_that_keeps_the_targets_else_the_nearest_to_it() -> None:
    choice = Greedy()
    assert choice.choose(0, 0, [GroupOutlook(0.1), GroupOutlook(1.0), GroupOutlook(1.01)]) == 1
    assert choice.choose(0, 0, [GroupOutlook(1.4), GroupOutlook(1.2), GroupOutlook(1.3)]) == 1


def test_weights_are_read_as_they_were_written(tmp_path: Path) -> None:
    choice = drawn(7)
    choice.write(tmp_path / "weights.npz")
    again = DoubleDqn.read(tmp_path / "weights.npz", groups=3, tasks=2)
    draw = np.random.default_rng(1)
    for _ in range(100):
        outlooks = [GroupOutlook(float(share)) for share in draw.uniform(0, 1, 3)]
        rate = float(draw.uniform(0, 50))
        assert again.choose(1, rate, outlooks) == choice.choose(1, rate, outlooks)


_ONE_ARRAY = BytesIO()
np.save(_ONE_ARRAY, np.zeros(3))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no weights"),
        (b"PK\x03\x04 and nothing", "no weights"),
        # A pickle, which numpy's own words advise to load.
        (b"# A page", "no weights of a model router$"),
        (_ONE_ARRAY.getvalue(), "no weights of a model router$"),
        (None, "No such file"),
    ],
)
def test_a_file_without_weights_is_refused(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "weights.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        DoubleDqn.read(path, groups=3, tasks=2)


def test_weights_of_another_alias_or_shape_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    drawn().write(path)
    with pytest.raises(ConfigError, match="for 3 groups and 2 tasks, the alias has 2 and 3"):
        DoubleDqn.read(path, groups=2, tasks=3)
    network = QNetwork.drawn(inputs_of(3, 2), 16, 3, np.random.default_rng(0))
    network.parameters["b1"] = network.parameters["b1"][:3]
    DoubleDqn(network, groups=3, tasks=2).write(path)
    with pytest.raises(ConfigError, match="shapes"):
        DoubleDqn.read(path, groups=3, tasks=2)
    network = QNetwork.drawn(inputs_of(3, 2), 16, 3, np.random.default_rng(0))
    network.parameters["w0"][0, 0] = np.nan
    DoubleDqn(network, groups=3, tasks=2).write(path)
    with pytest.raises(ConfigError, match="no weights"):
        DoubleDqn.read(path, groups=3, tasks=2)


def test_the_tighter_target_counts() -> None:
    assert Targets(tpot_ms=40).share_used(20, 1e9) == 0.5
    assert Targets(ttft_ms=1_000).share_used(1e9, 250) == 0.25
    assert Targets(tpot_ms=40, ttft_ms=1_000).share_used(20, 900) == 0.9
    for tpot_ms, ttft_ms in ((None, None), (0.0, None), (40.0, -1.0)):
        with pytest.raises(ConfigError, match="above 0"):
            Targets(tpot_ms, ttft_ms)
