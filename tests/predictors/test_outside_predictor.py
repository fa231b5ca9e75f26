"""A predictor from outside the repository, simulated and served."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from balanceroute import simulate
from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.errors import ConfigError, PredictorError
from balanceroute.proxy.live.prediction import make_predictor, named
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.traces import TraceRequest

MODULE = """
import numpy as np
from balanceroute.predictors import Survival

class Mine(Survival):
    made = []

    def __init__(self):
        super().__init__()
        self.seen = []
        self.made.append(self)

    def observe(self, request, output_tokens):
        self.seen.append(output_tokens)
        super().observe(request, output_tokens)

class Plain:
    def survival(self, requests, ages, steps): ...
    def begin(self, request, features): ...
    def observe(self, request, output_tokens): ...
    def forget(self, request): ...

class Short(Plain):
    def survival(self, requests, ages, steps):
        return np.ones((len(requests), steps))

class Above(Plain):
    def survival(self, requests, ages, steps):
        return np.full((len(requests), steps + 1), 2.0)

class Failing(Plain):
    def survival(self, requests, ages, steps):
        raise KeyError(7)

class Forgetful(Plain):
    def begin(self, request, features):
        return features.no_such

def none():
    return object()
"""
ENGINES: dict[str, object] = {"prefill": ["http://p:1"], "decode": ["http://d:1"]}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_predictors.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield
    sys.modules.pop("my_predictors", None)


def test_a_simulation_tells_it_every_output() -> None:
    requests = [TraceRequest(10**8 * i, 300 + i, 5 + i % 7) for i in range(60)]
    ours, theirs = (
        simulate(requests, policies=["br-h"], backlog=16, ranks=2, batch=4, predictor=name)
        for name in ("survival", "my_predictors:Mine")
    )
    (mine,) = sys.modules["my_predictors"].Mine.made
    assert sorted(mine.seen) == sorted(one.output_tokens for one in requests)
    for figure in ("idle_fraction", "output_tokens_per_s", "pool_wait_s_p99"):
        assert theirs[0].mean[figure] == ours[0].mean[figure]


def test_it_is_served_and_named() -> None:
    config = make_config(None, ENGINES | {"predictor": "my_predictors:Mine"})
    word = config.scheduling.predictor
    predictor = make_predictor(word)
    assert type(predictor).__name__ == "Mine"
    assert not isinstance(predictor, NoPrediction)
    assert named(word, predictor).name == "my_predictors:Mine"
    # What a file says has the file's folder before it.
    assert type(make_predictor("/etc/balanceroute/my_predictors:Mine")).__name__ == "Mine"


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("my_predictors:none", "--predictor is not usable: predictor 'my_predictors:none' is none"),
        ("my_predictors:absent", "cannot be imported"),
        ("absent", "which is neither a predictor nor a file"),
    ],
)
def test_what_is_no_predictor_is_refused_at_start(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_config(None, ENGINES | {"predictor": word})


def test_one_without_a_state_cannot_be_kept(tmp_path: Path) -> None:
    flags = {"predictor": "my_predictors:Plain", "predictor_state": str(tmp_path / "state")}
    with pytest.raises(ConfigError, match="my_predictors:Plain has no state to keep"):
        make_config(None, ENGINES | flags)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Short", r"survival is \(\d+, 40\), not \(\d+, 41\)"),
        ("Above", "survival is not in 0..1"),
        ("Plain", r"survival is \(\), not \("),
        ("Failing", r"survival: KeyError\(7\)"),
        ("Forgetful", r"begin: AttributeError\("),
    ],
)
def test_a_simulation_tells_what_is_wrong_with_its_answers(name: str, reason: str) -> None:
    requests = [TraceRequest(10**8 * i, 300 + i, 5 + i % 7) for i in range(60)]
    name = f"my_predictors:{name}"
    with pytest.raises(PredictorError, match=f"predictor '{name}': {reason}"):
        simulate(requests, policies=["br-h"], backlog=16, ranks=2, batch=4, predictor=name)


def test_the_example_of_the_page_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "predictors.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "guess.py").write_text(code)
    requests = [TraceRequest(10**8 * i, 300 + i, 5 + i % 7) for i in range(60)]
    words = {"policies": ["br-h"], "backlog": 16, "ranks": 2, "batch": 4}
    (found,) = simulate(requests, predictor="guess:Memoryless", **words)  # type: ignore[arg-type]
    assert found.mean["output_tokens_per_s"] > 0
    assert sys.modules.pop("guess").Memoryless().survival([1, 2], None, 4).shape == (2, 5)
