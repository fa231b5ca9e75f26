"""A group in virtual time, against the same group step by step."""

import random
from pathlib import Path

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.model_choice.environment import (
    GroupModel,
    GroupSim,
    SimulatedAnswer,
    SimulatedRequest,
    read_scenario,
)
from balanceroute.proxy.model_choice import Targets

MODEL = GroupModel(name="m", ranks=2, slots=4, step_base_ms=10, step_us_per_token=5)


def test_a_lone_request_takes_its_steps() -> None:
    group = GroupSim(MODEL)
    group.add(SimulatedRequest(0, 0.0, 1_000, 3))
    # Steps of 10 + 5 us x tokens / 2: the tokens grow from 1,000 by one in each.
    (answer,) = group.advance(1e9)
    assert answer.number == 0
    assert answer.ttft_ms == pytest.approx(12.5)
    assert answer.tpot_ms == pytest.approx((3 * 12.5 + 0.0025 * 4.5 - 12.5) / 2)


def test_nothing_ends_before_its_time() -> None:
    group = GroupSim(MODEL)
    group.add(SimulatedRequest(0, 0.0, 1_000, 3))
    assert group.advance(37.4) == []
    assert len(group.advance(37.6)) == 1


def by_steps(model: GroupModel, requests: list[SimulatedRequest]) -> list[SimulatedAnswer]:
    """Run the group step by step, with requests that join at the beginning of a step."""
    now, waiting, answers = 0.0, list(requests), list[SimulatedAnswer]()
    running: dict[
        SimulatedRequest, tuple[int, float]
    ] = {}  # By tokens done and the first one's time.
    while waiting or running:
        if not running and waiting[0].arrived_ms > now:
            now = waiting[0].arrived_ms
        while waiting and waiting[0].arrived_ms <= now and len(running) < model.ranks * model.slots:
            running[waiting.pop(0)] = (0, 0.0)
        tokens = sum(one.prompt_tokens + done for one, (done, _) in running.items())
        now += model.step_base_ms + model.step_us_per_token * tokens / model.ranks * 1e-3
        for one, (done, began_ms) in list(running.items()):
            first_ms = began_ms or now
            running[one] = (done + 1, first_ms)
            if done + 1 == one.output_tokens:
                del running[one]
                later = one.output_tokens - 1
                tpot_ms = (now - first_ms) / later if later else 0.0
                answers.append(SimulatedAnswer(one.number, first_ms - one.arrived_ms, tpot_ms))
    return answers


@pytest.mark.parametrize("seed", range(5))
def test_it_follows_a_group_that_is_run_step_by_step(seed: int) -> None:
    drawn = random.Random(seed)
    arrived_ms = 0.0
    requests = []
    for number in range(200):
        arrived_ms += drawn.expovariate(1 / 250)
        requests.append(
            SimulatedRequest(number, arrived_ms, drawn.randint(1, 4_000), drawn.randint(60, 300))
        )
    group, answers = GroupSim(MODEL), []
    for request in requests:
        answers += group.advance(request.arrived_ms)
        group.add(request)
    answers += group.advance(1e12)
    stepped = {one.number: one for one in by_steps(MODEL, requests)}
    assert sorted(one.number for one in answers) == sorted(stepped)
    # Requests join between two steps here, and at the beginning of the next one there.
    for answer in answers:
        assert answer.tpot_ms == pytest.approx(stepped[answer.number].tpot_ms, rel=0.05)
        assert answer.ttft_ms == pytest.approx(stepped[answer.number].ttft_ms, abs=300, rel=0.2)


def test_a_prefill_takes_its_time_and_one_at_a_time() -> None:
    model = GroupModel(
        name="m",
        ranks=1,
        slots=4,
        step_base_ms=1,
        step_us_per_token=0,
        prefill_servers=1,
        prefill_base_ms=5,
        prefill_us_per_token=10,
    )
    group = GroupSim(model)
    assert group.outlook(500) == (1, 11)
    for number in range(2):
        group.add(SimulatedRequest(number, 0.0, 500, 1))
    assert group.outlook(500) == (1, 31)
    answers = group.advance(100)
    assert [one.ttft_ms for one in answers] == [11, 21]


def test_a_full_group_tells_when_a_slot_comes_free() -> None:
    model = GroupModel(name="m", ranks=1, slots=1, step_base_ms=2, step_us_per_token=0)
    group = GroupSim(model)
    group.add(SimulatedRequest(0, 0.0, 1, 10))
    assert group.outlook(1) == (2, 22)
    group.add(SimulatedRequest(1, 0.0, 1, 10))
    answers = group.advance(1e3)
    assert [one.ttft_ms for one in answers] == [2, 22]


# Scenarios as files: what is read, and that faults say where they are.


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
