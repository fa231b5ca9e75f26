"""`[alias.NAME]` tables: what they say, and what is refused."""

from pathlib import Path

import pytest
from tests.live.settings.test_config import TWO, made

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.model_choice import Greedy, Static

AUTO = '[alias.auto]\ngroups = ["small", "large"]\n'
TASKS = "tasks = { chat = [0.7, 1.0], code = [0.5, 0.9] }\n"


def test_an_alias_has_targets_tasks_and_scores(tmp_path: Path) -> None:
    more = (
        'tpot_ms = 40\nttft_ms = 900\ndefault_task = "code"\npaths = { "/v1/messages" = "chat" }\n'
    )
    (alias,) = made(tmp_path, TWO + AUTO + TASKS + more).aliases
    assert (alias.name, alias.groups, alias.tasks) == ("auto", ("small", "large"), ("chat", "code"))
    assert alias.scores == ((0.7, 1.0), (0.5, 0.9))
    assert (alias.default_task, alias.paths) == ("code", (("/v1/messages", "chat"),))
    assert alias.targets is not None
    assert (alias.targets.tpot_ms, alias.targets.ttft_ms) == (40, 900)
    assert isinstance(alias.make_choice(), Greedy)
    assert alias.worth.scores["code", "large"] == 0.9
    assert not alias.fall_back


def test_the_static_choice_is_the_largest_unless_it_is_named(tmp_path: Path) -> None:
    static = AUTO + 'chooser = "static"\n'
    (alias,) = made(tmp_path, TWO + static).aliases
    assert (alias.static, alias.targets) == (1, None)
    assert isinstance(alias.make_choice(), Static)
    (alias,) = made(tmp_path, TWO + static + 'static = "small"').aliases
    assert alias.static == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (AUTO, "[alias.auto].chooser is greedy, which needs tpot_ms or ttft_ms"),
        (AUTO.replace("large", "larg") + "tpot_ms = 1", "there is no group 'larg'; did you mean"),
        (AUTO.replace("small", "large") + "tpot_ms = 1", "groups names 'large' twice"),
        ("[alias.auto]\ntpot_ms = 1", "[alias.auto].groups: names no group"),
        (AUTO.replace("auto", "small"), "[alias.small]: a model has this name"),
        (AUTO + 'tpot_ms = 1\nchooser = "best"', "must be one of static, greedy, ddqn"),
        (AUTO + 'tpot_ms = 1\nchooser = "ddqn"', "[alias.auto].weights is missing: ddqn needs it"),
        (AUTO + 'tpot_ms = 1\nweights = "x.npz"', "[alias.auto].weights goes with ddqn alone"),
        (
            AUTO + 'tpot_ms = 1\nchooser = "ddqn"\nweights = "none.npz"',
            "none.npz cannot be read",
        ),
        (AUTO + "tpot_ms = 0", "[alias.auto].tpot_ms is 0, must be from 0.001"),
        (AUTO + "tpot = 1", "[alias.auto].tpot: unknown key; did you mean"),
        (AUTO + "tpot_ms = 1\ntasks = { chat = [1] }", "has 1 scores for 'chat', must be 2"),
        (AUTO + "tpot_ms = 1\ntasks = { chat = [1, 2] }", "must be numbers from 0 to 1"),
        (AUTO + "tpot_ms = 1\ntasks = 3", "[alias.auto].tasks is 3, must be a table"),
        (AUTO + TASKS + 'tpot_ms = 1\ndefault_task = "x"', "default_task: there is no 'x'"),
        (AUTO + TASKS + 'tpot_ms = 1\npaths = { "/v1" = "x" }', "paths: there is no 'x'"),
        (AUTO + TASKS + 'tpot_ms = 1\npaths = { v1 = "chat" }', "has 'v1', which is no path"),
        (AUTO + 'tpot_ms = 1\nstatic = "small"', "goes with the chooser static alone"),
        (AUTO + 'tpot_ms = 1\nfall_back = ["500"]', "has '500', must be of 429, 503, timeout"),
        (AUTO + "tpot_ms = 1\nfall_back_after_s = 3", "needs timeout in fall_back"),
        ("[alias]\nauto = 3", "alias.auto: must be a table: write [alias.auto]"),
    ],
)
def test_an_alias_that_cannot_be_served_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises((ConfigError, ValueError)) as error:
        made(tmp_path, TWO + text)
    assert reason in str(error.value)
    assert "fleet.toml" in str(error.value)
