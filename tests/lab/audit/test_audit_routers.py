"""How the script that judges audits measures a gain."""

import math
from typing import Any

import pytest
from tests.script import script

AUDITED = script("reproduce.live")
_MINUTES = 3.0


def counted(tokens_per_s: float, swing: float, *, offset_s: float) -> list[Any]:
    """Return readings of engines whose speed follows the tokens, which one list of requests brings."""
    now_s, tokens = 0.0, 0.0
    readings: list[Any] = []
    while now_s < 60.0 * _MINUTES + offset_s:
        if now_s >= offset_s + 2.0 * len(readings):
            readings.append(AUDITED.Counted(0, 1, round(tokens), now_s))
        tokens += 0.01 * tokens_per_s * (1.0 + swing * math.sin(tokens / 9_000))
        now_s += 0.01
    return readings


def found(tokens_per_s: float, swing: float, *, offset_s: float, predicted: float = 0.0) -> Any:
    prediction = {"policy": "br-h", "gain": predicted, "error": 0.02}
    audit = {"recovery": {"predictions": [prediction]}}
    return AUDITED.Found(audit, counted(tokens_per_s, swing, offset_s=offset_s))


def test_the_gain_is_of_the_same_tokens() -> None:
    """Of the same time it was off by 2 points here: the faster router gets further in the list."""
    before, after = found(290.0, 0.3, offset_s=20.0), found(350.0, 0.3, offset_s=20.0)
    gain, error = AUDITED._measured(before, after)
    assert gain == pytest.approx(350 / 290 - 1, abs=0.003)
    assert error < 0.01
    assert after.tokens_per_s / before.tokens_per_s - 1 != pytest.approx(gain, abs=0.02)


def test_a_gain_that_is_not_the_same_everywhere_has_an_error() -> None:
    before, after = found(290.0, 0.3, offset_s=20.0), found(350.0, 0.0, offset_s=20.0)
    _, error = AUDITED._measured(before, after)
    assert error > 0.03


def test_several_loads_tell_the_error_of_the_difference() -> None:
    before = [found(200.0, 0.0, offset_s=20.0, predicted=told) for told in (0.20, 0.24)]
    after = [found(rate, 0.0, offset_s=20.0) for rate in (240.0, 250.0)]
    assert AUDITED._gains(before[:1], after[:1]) == ["+20.0 +- 2.0 %", "+20.0 +- 0.0 %", "+0.0 %"]
    assert AUDITED._gains(before, after) == ["+22.0 +- 2.0 %", "+22.5 +- 2.5 %", "-0.5 +- 0.5 %"]
