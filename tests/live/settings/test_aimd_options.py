"""What the flags of the limit on requests in flight come to."""

import pytest
from tests.live.settings.configs import of_flags

from balanceroute.proxy.core.admission import POST_4, POST_5


def test_without_the_flag_nothing_is_limited() -> None:
    config = of_flags()
    assert config.aimd.settings is None
    assert config.times.queue_ttl_s == 600.0
    assert config.too_long_waits is None


def test_a_preset_has_its_own_values_and_its_own_timeout() -> None:
    assert of_flags(aimd="post5").aimd.settings == POST_5
    assert of_flags(aimd="post4").aimd.settings == POST_4
    assert of_flags(aimd="post5").times.queue_ttl_s == 1.0
    assert of_flags(aimd="post5", aimd_ttft_s=5.0).times.queue_ttl_s == 2.5
    assert of_flags(aimd="post4").times.queue_ttl_s == 30.0
    assert of_flags(aimd="post5", queue_ttl_s=7.0).times.queue_ttl_s == 7.0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (None, 8, (8, 8, 8)),
        (300, None, (300, 300, 300)),
        (4, 80, (4, 64, 80)),
        (70, 90, (70, 70, 90)),
    ],
)
def test_the_bounds_of_the_limit(
    low: int | None, high: int | None, expected: tuple[int, int, int]
) -> None:
    settings = of_flags(aimd="post5", aimd_min=low, aimd_max=high).aimd.settings
    assert settings is not None
    assert (settings.cap_min, settings.cap_initial, settings.cap_max) == expected


def test_waits_that_exceed_the_target_are_told() -> None:
    told = of_flags(aimd="post5").too_long_waits
    assert told == (
        "requests may wait for longer than --aimd-ttft-s (2): "
        "--queue-ttl-s (1) + --pool-ttl-s (600)"
    )
    assert of_flags(aimd="post5", pool_ttl_s=1.0).too_long_waits is None
