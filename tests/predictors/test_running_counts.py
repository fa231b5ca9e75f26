"""What the counts say is the same whatever was asked before."""

import numpy as np
import pytest

from balanceroute.predictors.survival import RunningCounts

# Outputs of 0 to 3 tokens, in two groups.
LENGTHS = np.array([[0.0, 1.0, 2.0, 4.0], [1.0, 0.0, 0.0, 8.0]])


@pytest.mark.parametrize("asked_before", [(), (1,), (5,), (1, 5), (5, 1)])
def test_an_answer_does_not_depend_on_earlier_ones(asked_before: tuple[int, ...]) -> None:
    counts = RunningCounts(LENGTHS)
    groups, ages = np.array([0, 1, 1]), np.array([0, 0, 2])
    for steps in asked_before:
        counts.after(groups, ages, steps)
    assert counts.after(groups, ages, 1).tolist() == [[7.0, 6.0], [8.0, 8.0], [8.0, 0.0]]
    assert counts.after(groups, ages, 2)[:, -1].tolist() == [4.0, 8.0, 0.0]
