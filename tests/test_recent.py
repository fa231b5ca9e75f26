"""The losses of the last answers, and choices that remember them."""

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.model_choice import (
    RECENT_INPUTS,
    WINDOW,
    DoubleDqn,
    GroupOutlook,
    QNetwork,
    Recent,
    WindowAim,
    inputs_of,
)

AIM = WindowAim(0.98, ((0.5, 0.9, 1.0), (0.7, 0.95, 0.96)))


def drawn(seed: int = 0, aim: WindowAim = AIM) -> DoubleDqn:
    inputs = inputs_of(3, 2, windows=True)
    network = QNetwork.drawn(inputs, 16, 3, np.random.default_rng(seed))
    return DoubleDqn(network, groups=3, tasks=2, aim=aim)


@given(st.lists(st.sampled_from([0.0, 0.04, 0.06, 0.22, 1.0]), min_size=1, max_size=80))
def test_a_window_is_kept_by_its_mean(losses: list[float]) -> None:
    recent, window = Recent(AIM), deque([0.0] * WINDOW, WINDOW)
    for loss in losses:
        window.append(loss)
        assert recent.add(loss) == (sum(window) / WINDOW <= 0.02 + 1e-9)
        seen = recent.seen()
        assert len(seen) == RECENT_INPUTS
        assert all(-1 <= one <= 1 for one in seen)


def test_what_is_left_grows_as_losses_leave_the_window() -> None:
    recent = Recent(AIM)
    assert recent.seen() == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    recent.add(0.2)
    assert recent.seen()[0] == pytest.approx(0.5)
    for _ in range(WINDOW - 2):
        recent.add(0.0)
    # It is the next one to leave.
    assert recent.seen()[:2] == pytest.approx([0.5, 0.5])
    recent.add(0.0)
    assert recent.seen() == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_an_answer_loses_against_the_best_model_for_its_task() -> None:
    assert AIM.loss(1, 0, kept=True) == pytest.approx(0.26)
    assert AIM.loss(1, 2, kept=True) == 0.0
    assert AIM.loss(1, 2, kept=False) == pytest.approx(0.96)


def test_a_choice_remembers_what_its_answers_lost() -> None:
    choice, fresh = drawn(1), drawn(1)
    for _ in range(WINDOW):
        choice.choose(0, 5.0, [GroupOutlook(1.5)] * 3)  # None is in time.
    draw = np.random.default_rng(2)
    told = [[GroupOutlook(float(one)) for one in draw.uniform(0, 1, 3)] for _ in range(50)]
    # Each of a choice of its own: what is chosen changes what is chosen next.
    before = [drawn(1).choose(0, 5.0, one) for one in told]
    assert before[0] == fresh.choose(0, 5.0, told[0])
    after = []
    for one in told:
        after.append(choice.choose(0, 5.0, one))
        for _ in range(WINDOW):
            choice.choose(0, 5.0, [GroupOutlook(1.5)] * 3)
    assert before != after


def test_weights_are_read_with_their_aim(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    choice = drawn(3)
    choice.write(path)
    again = DoubleDqn.read(path, groups=3, tasks=2)
    draw = np.random.default_rng(1)
    for _ in range(200):
        outlooks = [GroupOutlook(float(one)) for one in draw.uniform(0, 1.4, 3)]
        task, rate = int(draw.integers(2)), float(draw.uniform(0, 50))
        assert again.choose(task, rate, outlooks) == choice.choose(task, rate, outlooks)
    with pytest.raises(ConfigError, match="for 3 groups and 2 tasks, the alias has 3 and 4"):
        DoubleDqn.read(path, groups=3, tasks=4)


def test_an_aim_for_others_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scores of other groups"):
        drawn(aim=WindowAim(0.98, ((0.5, 1.0), (0.7, 0.9))))
    path = tmp_path / "weights.npz"
    drawn().write(path)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **(arrays | {"scores": np.full((2, 3), np.nan)}))
    with pytest.raises(ConfigError, match="no weights of a model router"):
        DoubleDqn.read(path, groups=3, tasks=2)
