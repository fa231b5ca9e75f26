"""What recurring tasks could tell at most, in the tables of what predictors are worth."""

import numpy as np
import pytest
from tests.script import script

from balanceroute.predictors import RequestFeatures
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.lab.sim.workload import Workload

results = script("reproduce.predictors")


@pytest.mark.parametrize(("median", "age"), [(400.0, 0), (3_000.0, 2_500)])
def test_known_tasks_say_how_long_answers_are(median: float, age: int) -> None:
    rng = np.random.default_rng(1)
    outputs = np.maximum(1, np.rint(median * rng.lognormal(0.0, 0.3, 40_000)))
    running = outputs[outputs > age]
    tasks = results.KnownTasks(np.array([1.0, median]), 0.3)
    survival = tasks.survival([RequestId(1)], np.array([age]), 1_000)[0]
    observed = [(running > age + ahead).mean() for ahead in range(0, 1_001, 100)]
    assert survival[::100] == pytest.approx(observed, abs=0.02)
    assert survival[0] == 1.0


def test_known_tasks_know_the_task_of_each_request() -> None:
    name, seed = "servegen_reasoning.jsonl.gz", "rec"
    requests = results.recurring(name, seed, 0.01)[:50]
    predictor = results.known_tasks(name, seed, 0.01)(Workload(requests, []), PolicySettings())
    for number, request in enumerate(requests):
        predictor.begin(RequestId(number), RequestFeatures(request.prompt_tokens))
        longest = 2 * request.output_tokens
        survival = predictor.survival([RequestId(number)], np.zeros(1, np.int64), longest)[0]
        assert survival.sum() == pytest.approx(request.output_tokens, rel=0.05, abs=1.0)
