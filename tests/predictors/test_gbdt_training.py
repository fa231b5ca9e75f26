"""Training: causal, bounded, the same every time, and refused where there is nothing to learn."""

import numpy as np
import pytest

from balanceroute.predictors import PastRequest, RequestFeatures, gbdt_training
from balanceroute.predictors.gbdt_training import train, train_measured
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId

H = 40


def past(count: int = 600, *, keyed: bool = True, seed: int = 0) -> list[PastRequest]:
    """Return requests whose key, if they have one, tells how long they get to within 40 tokens."""
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        kind, noise = int(rng.integers(5)), int(rng.integers(1, 40))
        output_tokens = 50 * kind + noise
        keys = (kind,) if keyed else ()
        features = RequestFeatures(int(rng.integers(1, 1_000)), keys=keys)
        arrival_s = number * 0.1
        finished_s = arrival_s + 0.01 * output_tokens
        requests.append(PastRequest(arrival_s, finished_s, features, output_tokens))
    return requests


def test_keys_that_tell_the_length_are_learned() -> None:
    training = train_measured(past())
    assert training.requests == 600
    assert training.requests_asked == 540
    assert training.finish.trees > 0
    assert training.finish.loss < 0.5 * training.finish.marginal_loss
    assert training.remaining.loss < training.remaining.marginal_loss
    predictor = training.predictor
    for kind in range(5):
        predictor.begin(RequestId(kind), RequestFeatures(100, keys=(kind,)))
    requests = [RequestId(kind) for kind in range(5)]
    stays = predictor.survival(requests, np.full(5, 100), H)[:, H]
    assert stays[2] < 0.1
    assert (stays[3:] > 0.9).all()


def test_without_a_signal_the_marginal_is_left() -> None:
    rng = np.random.default_rng(1)
    noise = [
        PastRequest(number * 0.1, number * 0.1 + 1.0, RequestFeatures(7), int(rng.geometric(0.01)))
        for number in range(2_000)
    ]
    training = train_measured(noise)
    for stage in (training.finish, training.remaining):
        assert stage.marginal_loss * 0.98 < stage.loss <= stage.marginal_loss
    predictor = training.predictor
    predictor.begin(RequestId(0), RequestFeatures(7))
    # Outputs without memory: the chance to go on is the same at every age.
    stays = [predictor.survival([RequestId(0)], np.array([age]), H)[0, H] for age in (0, 50, 100)]
    assert stays == pytest.approx([0.99**H] * 3, abs=0.06)


def test_trees_that_only_do_harm_are_not_kept() -> None:
    # Who asks for much gets little, until the later part turns that round.
    rng = np.random.default_rng(2)
    turned = []
    for number in range(1_000):
        short = bool(rng.integers(2))
        features = RequestFeatures(5, max_tokens=900 if short == (number < 800) else 100)
        output_tokens = int(rng.integers(1, 20)) if short else 60
        turned.append(PastRequest(float(number), number + 0.5, features, output_tokens))
    training = train_measured(turned)
    assert training.finish.trees == 0
    assert training.finish.loss == training.finish.marginal_loss
    assert "num_leaves=1\n" in training.predictor.state().texts["finish"]


def test_the_same_past_gives_the_same_predictor_in_any_order() -> None:
    requests = past()
    one, other = train(requests), train(requests[::-1])
    assert one.state() == other.state()
    assert train(requests, seed=1).state() != one.state()


def test_of_too_many_rows_a_share_of_the_requests_is_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything = train_measured(past())
    monkeypatch.setattr(gbdt_training, "MAX_ROWS", 1_500)
    some = train_measured(past())
    assert everything.finish.rows > 3_000
    assert 1_200 < some.finish.rows < 1_800
    assert some.requests_asked < everything.requests_asked
    # All have ended, asked about or not.
    assert some.predictor.state().fields == everything.predictor.state().fields


def test_each_request_is_asked_about_at_age_0_and_then_every_few_tokens() -> None:
    outputs = np.array([1, 20, 100, 21])
    questions = gbdt_training.questions_about(outputs, 20, np.random.default_rng(0))
    for number, output in enumerate(outputs.tolist()):
        ages = questions.age[questions.request == number]
        assert ages[0] == 0
        assert (ages < output).all()
        assert (np.diff(ages)[1:] == 20).all()
        assert not len(ages) > 1 or 1 <= ages[1] <= 20
        # None is left out.
        assert ages[-1] + 20 >= output


def test_progress_is_told_and_reaches_the_end_of_each_stage() -> None:
    told: dict[str, list[float]] = {}
    train(past(), progress=lambda what, share: told.setdefault(what, []).append(share))
    assert list(told) == ["features", "stage 1", "stage 2"]
    for shares in told.values():
        assert shares == sorted(shares)
        assert 0.0 <= shares[0] <= shares[-1] == 1.0


def constant(output_tokens: int, count: int = 300) -> list[PastRequest]:
    features = RequestFeatures(5)
    return [PastRequest(float(i), i + 1.0, features, output_tokens) for i in range(count)]


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ([], "0 requests are too few to train on, 200 the least"),
        (past(199), "199 requests are too few"),
        (constant(H), "every output ended within 40 tokens of every question"),
        (constant(3_000)[:200] + constant(5), "every output ended within"),
    ],
)
def test_too_little_to_learn_from_is_refused(requests: list[PastRequest], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        train(requests)


def test_a_past_in_which_nothing_ends_in_sight_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing ended within 40 tokens"):
        train(constant(50), age_step=10**6)


@pytest.mark.parametrize("horizon_steps", [0, 10_001])
def test_a_horizon_out_of_range_is_refused(horizon_steps: int) -> None:
    with pytest.raises(
        ConfigError, match=f"horizon_steps must be in 1..10000, not {horizon_steps}"
    ):
        train(past(), horizon_steps=horizon_steps)


def test_questions_without_a_distance_are_refused() -> None:
    with pytest.raises(ConfigError, match="age_step must be at least 1, not 0"):
        train(past(), age_step=0)
