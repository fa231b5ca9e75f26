"""Scenarios as files: what is read, and that faults say where they are."""

from pathlib import Path

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.model_choice.environment import GroupModel, read_scenario
from balanceroute.proxy.model_choice import Targets

GOOD = """
tpot_ms = 40
tasks = ["chat", "code"]
[[group]]
name = "small"
ranks = 4
slots = 64
step_base_ms = 8
step_us_per_token = 0.05
scores = [0.7, 0.5]
[[group]]
name = "large"
ranks = 8
slots = 32
step_base_ms = 30
step_us_per_token = 0.2
prefill_servers = 2
prefill_base_ms = 20
prefill_us_per_token = 5
scores = [1.0, 0.9]
"""


def test_a_scenario_is_read(tmp_path: Path) -> None:
    path = tmp_path / "auto.toml"
    path.write_text(GOOD)
    scenario = read_scenario(path)
    assert scenario.tasks == ("chat", "code")
    assert scenario.scores == ((0.7, 1.0), (0.5, 0.9))
    assert scenario.targets == Targets(tpot_ms=40)
    assert scenario.groups[1] == GroupModel(
        name="large",
        ranks=8,
        slots=32,
        step_base_ms=30,
        step_us_per_token=0.2,
        prefill_servers=2,
        prefill_base_ms=20,
        prefill_us_per_token=5,
    )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("tpot_ms = 40", "", "above 0 ms"),
        ("tpot_ms = 40", "tpot_ms = 0", r"tpot_ms"),
        ("tpot_ms = 40", "tpot = 40", "unknown field `tpot`"),
        ("ranks = 4", "ranks = 0", r"group\[0\].ranks"),
        ("ranks = 4", 'ranks = "4"', r"group\[0\].ranks"),
        ("slots = 32", "", "`slots`"),
        ("[0.7, 0.5]", "[0.7]", "argument 2 is longer|scores"),
        ("[0.7, 0.5]", "[0.7, 1.5]", "from 0 to 1"),
        ('["chat", "code"]', '["chat"]', "the scores must be 1 rows"),
        ('["chat", "code"]', "[", "line"),
    ],
)
def test_a_fault_says_where_it_is(tmp_path: Path, old: str, new: str, reason: str) -> None:
    path = tmp_path / "auto.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=reason) as refused:
        read_scenario(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml: No such file"):
        read_scenario(tmp_path / "none.toml")
