"""Predictors in the whole proxy: what they are told and learn, and how they are judged."""

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.site import Site, play, served

from balanceroute.predictors import NoPrediction, PastRequest, RequestFeatures, Survival
from balanceroute.predictors.exact_match import ExactMatch
from balanceroute.predictors.files import load, save
from balanceroute.predictors.kinds import train
from balanceroute.predictors.past import read_log
from balanceroute.predictors.survival import LEAST_ANSWERS
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.live.prediction import make_predictor, predictor_name
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.live.settings.scheduling import SchedulingSettings
from balanceroute.proxy.live.telemetry.request_log import line_of
from balanceroute.topologies.topology import read_topology

if TYPE_CHECKING:
    from balanceroute.proxy.live.prediction import PredictorSet

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# The emulated engines' answer depends on the prompt alone.
STREAM: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "stream": True, "temperature": 0}
ENGINES: dict[str, Any] = {"prefill": ["http://p"], "decode": ["http://d"]}
TOPOLOGY = 'name = "x"\n[[prefill]]\nurl = "http://p"\n[[decode]]\nurl = "http://d"\n[proxy]\n'


def predictors_of(site: Site) -> "PredictorSet":
    return site.world.proxy.deployment.predictors


def told_to(site: Site) -> dict[int, RequestFeatures]:
    """Return what the predictors are told of each request from now on, the latest of each."""
    told: dict[int, RequestFeatures] = {}
    predictors = predictors_of(site)
    begin = predictors.begin

    def begin_and_tell(request: RequestId, features: RequestFeatures) -> None:
        told[request] = features
        begin(request, features)

    predictors.begin = begin_and_tell  # type: ignore[method-assign]
    return told


def expected_tokens(site: Site, number: int, *, age: int = 0, steps: int = 400) -> float:
    survival = predictors_of(site).survival([RequestId(number)], np.array([age]), steps)
    return float(survival[0, :-1].sum())


def metric(site: Site, name: str, **labels: str) -> float:
    shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
    begin = f"balanceroute_{name}{{{shown}}} " if labels else f"balanceroute_{name} "
    page = site.world.proxy.metrics.render().decode()
    (line,) = (line for line in page.splitlines() if line.startswith(begin))
    return float(line.removeprefix(begin))


# By name and from a file.


@pytest.mark.parametrize(
    ("word", "kind"), [("none", NoPrediction), ("survival", Survival), ("exact-match", ExactMatch)]
)
def test_a_predictor_is_made_by_its_name(word: str, kind: type) -> None:
    assert type(make_predictor(word)) is kind
    assert predictor_name(word) == word


def test_a_trained_predictor_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "trained.json"
    save(path, Survival([3, 4]))
    made = make_predictor(str(path))
    assert isinstance(made, Survival)
    assert made.state() == Survival([3, 4]).state()
    assert predictor_name(str(path)) == "trained.json"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON, or cut off"),
        (b"{}", "not a predictor"),
        (b'{"format": "balanceroute-predictor", "version": 9}', "version 9 is newer"),
    ],
)
@pytest.mark.parametrize("flag", ["predictor", "shadow_predictor"])
def test_a_trained_predictor_that_cannot_be_read_is_a_fault_of_the_configuration(
    content: bytes, reason: str, flag: str, tmp_path: Path
) -> None:
    path = tmp_path / "trained.json"
    path.write_bytes(content)
    given: dict[str, Any] = {"predictor": str(path), "shadow_predictor": [str(path)]}
    with pytest.raises(ConfigError) as refused:
        make_config(None, ENGINES | {flag: given[flag]})
    assert str(refused.value).startswith(f"--{flag.replace('_', '-')} is {path}: ")
    assert reason in str(refused.value)


def scheduling(folder: Path, text: str, **flags: object) -> SchedulingSettings:
    path = folder / "fleet.toml"
    path.write_text(TOPOLOGY + text)
    return make_config(read_topology(path), flags).scheduling


def test_paths_in_a_topology_start_at_its_folder(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        save(tmp_path / name, Survival([3]))
    found = scheduling(
        tmp_path,
        'predictor = "a.json"\npredictor_state = "s.json"\nshadow_predictor = ["none", "b.json"]',
    )
    assert found.predictor == str(tmp_path / "a.json")
    assert found.predictor_state == tmp_path / "s.json"
    assert found.shadow_predictor == ("none", str(tmp_path / "b.json"))
    found = scheduling(tmp_path, 'predictor = "a.json"', predictor="none")
    assert (found.predictor, found.predictor_state, found.shadow_predictor) == ("none", None, ())


def test_two_predictors_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "a.json", tmp_path / "other" / "a.json"]
    for path in paths:
        save(path, Survival([3]))
    flags = {"predictor": str(paths[0]), "shadow_predictor": [str(paths[1])]}
    with pytest.raises(ConfigError, match=r"--shadow-predictor has 'a\.json': metrics cannot tell"):
        make_config(None, ENGINES | flags)


def test_a_trained_predictor_is_never_written_to(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    save(path, Survival([3]))
    flags = {"predictor": str(path), "predictor_state": str(path)}
    with pytest.raises(ConfigError, match="the trained predictor is never written to"):
        make_config(None, ENGINES | flags)


# What they are told, and learn.


@served(flags={"predictor": "exact-match"}, mean_output_tokens=60.0)
async def test_recurring_prompts_are_recognised(site: Site) -> None:
    prompts = [f"t{i} why" for i in range(8)]
    told = told_to(site)
    lengths: dict[str, int] = {}
    for turn in range(4):
        for prompt in prompts:
            await site.post(COMPLETIONS, STREAM | {"prompt": prompt, "user": f"u{turn}"})
            lengths[prompt] = site.world.ended[-1].output_tokens
    mean = sum(lengths.values()) / len(lengths)
    blind = known = 0.0
    for prompt, length in lengths.items():
        exchange = await site.send(COMPLETIONS, STREAM | {"prompt": prompt}).until_events(1)
        known += abs(expected_tokens(site, max(told)) - length)
        blind += abs(mean - length)
        await exchange.end()
    assert blind / len(prompts) > 10
    assert known < 0.3 * blind


@served(flags={"predictor": "survival"})
async def test_no_prediction_exceeds_max_tokens(site: Site) -> None:
    values = STREAM | {"ignore_eos": True}
    for i in range(5):
        await site.post(COMPLETIONS, values | {"prompt": f"t{i}"})
    exchange = site.send(COMPLETIONS, values | {"prompt": "t9", "max_tokens": 30})
    await exchange.until_events(10)
    (number,) = site.world.proxy.deployment.driver.sessions
    assert expected_tokens(site, number, age=10) == pytest.approx(20, abs=0.1)
    await exchange.end()


@served(flags={"predictor": "survival"})
async def test_predictors_are_told_what_the_client_expects(site: Site) -> None:
    told = told_to(site)
    hint = [(b"x-expected-output-tokens", b"1200")]
    await site.post(COMPLETIONS, STREAM | {"prompt": "t1"}, hint)
    await site.post(COMPLETIONS, STREAM | {"prompt": "t2"})
    assert [told[number].expected_tokens for number in sorted(told)] == [1200, None]
    assert all(one.header(b"x-expected-output-tokens") is None for one in site.seen)


@served(flags={"predictor": "survival"})
async def test_the_log_tells_the_hints_that_were_used(site: Site) -> None:
    hint = [(b"x-expected-output-tokens", b"1200")]
    limited = STREAM | {"max_tokens": 30, "ignore_eos": True}
    for number in range(LEAST_ANSWERS + 1):
        await site.post(COMPLETIONS, limited | {"prompt": f"t{number}"})
    await site.post(COMPLETIONS, limited | {"prompt": "t98"}, hint)
    await site.post(COMPLETIONS, STREAM | {"prompt": "t99"})
    await site.rest()
    told = [(record.hint, record.hint_source) for record in site.world.ended]
    assert told == [(None, "")] * LEAST_ANSWERS + [(30, "limit"), (1200, "client"), (None, "")]


@served(flags={"predictor": "survival"}, mean_output_tokens=20.0)
async def test_a_limit_that_answers_reach_is_expected_to_be_reached(site: Site) -> None:
    for number in range(60):
        values = {"max_tokens": 80, "ignore_eos": True} if number % 2 else {}
        await site.post(COMPLETIONS, STREAM | {"prompt": f"t{number}"} | values)
    exchanges = [
        site.send(COMPLETIONS, STREAM | {"prompt": "t50"} | values)
        for values in ({"max_tokens": 80}, {})
    ]
    for exchange in exchanges:
        await exchange.until_events(1)
    limited, other = sorted(site.world.proxy.deployment.driver.sessions)
    assert expected_tokens(site, limited) > 72
    assert expected_tokens(site, other) < 60
    for exchange in exchanges:
        await exchange.end()


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ({"predictor": "none"}, 0),
        ({"predictor": "survival"}, 0),
        ({"predictor": "survival", "shadow_predictor": ["none"]}, 0),
        ({"predictor": "survival", "shadow_predictor": ["exact-match"]}, 2),
        ({"predictor": "exact-match"}, 2),
    ],
)
@served("flags")
async def test_keys_are_computed_for_those_who_use_them(
    site: Site, flags: dict[str, object], keys: int
) -> None:
    await site.post(COMPLETIONS, STREAM | {"prompt": "why " * 100})
    assert len(site.world.ended[0].keys) == keys


@served(flags={"predictor": "exact-match"})
async def test_training_on_the_log_sees_what_serving_saw(site: Site, tmp_path: Path) -> None:
    system = {"role": "system", "content": "be brief"}
    told = told_to(site)
    for i in range(6):
        user = {"role": "user", "content": f"t{i % 3} why"}
        chat = STREAM | {"messages": [system, user], "n": 1 + i % 2, "max_tokens": 20 + i}
        await site.post(CHAT, chat | {"stream": i < 4, "temperature": 1})
        await site.post(COMPLETIONS, STREAM | {"prompt": list(range(5, 300))})
    # Direct: no prefiller counts its prompt. And one that its client leaves.
    await site.post(COMPLETIONS, STREAM | {"prompt": "t7 t8", "echo": True})
    exchange = site.send(COMPLETIONS, STREAM | {"prompt": "t1 " * 50, "ignore_eos": True})
    await exchange.until_events(3)
    exchange.call.abort()
    await site.rest()
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"".join(map(line_of, site.world.ended)))
    past = read_log(path)
    assert len(past) == 13
    assert [one.features for one in past] == [told[number] for number in range(13)]
    assert {len(one.features.keys) for one in past} == {1, 3}
    assert {one.choices for one in site.world.ended} == {1, 2}
    assert [one.output_tokens for one in past] == [
        round(record.output_tokens / record.choices) for record in site.world.ended[:-1]
    ]


def test_training_on_the_log_gives_what_serving_learned(tmp_path: Path) -> None:
    state, log = tmp_path / "state.json", tmp_path / "requests.jsonl"

    async def scenario(site: Site) -> None:
        for i in range(12):
            await site.post(COMPLETIONS, STREAM | {"prompt": f"t{i % 4} why " * 40})
        log.write_bytes(b"".join(map(line_of, site.world.ended)))

    play(scenario, flags={"predictor": "exact-match", "predictor_state": str(state)})
    served, trained = make_predictor(str(state)), ExactMatch(read_log(log))
    ages = np.arange(0, 400, 10)
    requests = [RequestId(0)] * len(ages)
    for one in read_log(log):
        for predictor in (served, trained):
            predictor.begin(requests[0], one.features)
        survival = served.survival(requests, ages, 40)
        assert np.array_equal(survival, trained.survival(requests, ages, 40))
        # It has learned something: an end is near at some age, and not at another.
        assert survival[:, -1].min() < 0.5 < survival[:, -1].max()


# What is kept.


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    flags = {"predictor": "survival", "predictor_state": str(path)}
    learned = []

    async def scenario(site: Site) -> None:
        learned.append(expected_tokens(site, 0, steps=20))
        for i in range(3):
            values = {"prompt": f"t{i}", "max_tokens": 5 + i, "ignore_eos": True}
            await site.post(COMPLETIONS, STREAM | values)

    play(scenario, flags=flags)
    assert load(path).state() == Survival([5, 6, 7]).state()
    play(scenario, flags=flags)
    assert load(path).state() == Survival([5, 6, 7, 5, 6, 7]).state()
    assert learned == [20.0, pytest.approx(6.0, abs=0.1)]


def test_it_is_saved_every_minute_if_anything_is_new(tmp_path: Path) -> None:
    path = tmp_path / "state.json"

    async def scenario(site: Site) -> None:
        await asyncio.sleep(130.0)
        assert not path.exists()
        await site.post(COMPLETIONS, STREAM | {"prompt": "t1"})
        await asyncio.sleep(60.0)
        assert metric(site, "predictor_state_saves_total", outcome="ok") == 1
        saved = path.stat()
        await asyncio.sleep(200.0)
        assert path.stat() == saved

    play(scenario, flags={"predictor": "survival", "predictor_state": str(path)})
    assert isinstance(load(path), Survival)


def test_a_trained_predictor_goes_on_learning_in_its_state(tmp_path: Path) -> None:
    trained, state = tmp_path / "trained.json", tmp_path / "state.json"
    save(trained, Survival([9]))
    before = trained.read_bytes()

    async def scenario(site: Site) -> None:
        values = {"prompt": "t1", "max_tokens": 5, "ignore_eos": True}
        await site.post(COMPLETIONS, STREAM | values)
        text = site.world.proxy.metrics.render().decode()
        assert 'predictor="trained.json"' in text
        assert str(tmp_path) not in text

    flags = {"predictor": str(trained), "predictor_state": str(state)}
    for _ in range(2):
        play(scenario, flags=flags)
    assert trained.read_bytes() == before
    assert load(state).state() == Survival([9, 5, 5]).state()


def test_a_state_that_cannot_be_used_is_put_aside_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    save(path, ExactMatch())
    foreign = path.read_bytes()

    async def scenario(site: Site) -> None:
        assert metric(site, "predictor_state_refusals_total") == 1
        assert path.read_bytes() == foreign  # Until there is something better.
        values = {"prompt": "t1", "max_tokens": 5, "ignore_eos": True}
        await site.post(COMPLETIONS, STREAM | values)

    play(scenario, flags={"predictor": "survival", "predictor_state": str(path)})
    assert load(path).state() == Survival([5]).state()
    assert (tmp_path / "state.json.bad").read_bytes() == foreign


def test_a_trained_model_serves_and_is_kept_with_what_it_saw(tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    rng = random.Random(3)
    past = []
    for i in range(600):
        key, output = i % 30, max(1, round(rng.gauss(20 + 10 * (i % 30), 3)))
        features = RequestFeatures(100 + 10 * key, None, (key,))
        past.append(PastRequest(i / 5, i / 5 + 3, features, output))
    trained, state = tmp_path / "gbdt.json", tmp_path / "state.json"
    save(trained, train("gbdt", past))

    async def scenario(site: Site) -> None:
        assert metric(site, "predictor_state_refusals_total") == 0
        for i in range(4):
            await site.post(COMPLETIONS, STREAM | {"prompt": f"t{i} why", "ignore_eos": True})
        active, _ = (await site.state())["predictors"]
        assert (active["name"], active["failed"]) == ("gbdt.json", False)
        assert active["rows"] > 10
        assert site.world.ended[0].keys

    flags = {"predictor": str(trained), "predictor_state": str(state)}
    for _ in range(2):
        play(scenario, flags=flags | {"shadow_predictor": ["survival"]})
    assert load(state).state().texts == load(trained).state().texts


# How they are judged.


@served(
    flags={"predictor": "survival", "shadow_predictor": ["exact-match", "none"], "batch": 16},
    batch_limit=16,
    mean_output_tokens=80.0,
)
async def test_the_active_predictor_and_its_shadows_are_scored_on_the_same_rows(site: Site) -> None:
    for _ in range(6):
        exchanges = [site.send(COMPLETIONS, STREAM | {"prompt": f"t{i} why"}) for i in range(12)]
        for exchange in exchanges:
            await exchange.end()
    active, matched, blind = (await site.admin("/admin/state")).json["state"]["predictors"]
    assert [one["name"] for one in (active, matched, blind)] == [
        "survival",
        "exact-match",
        "none",
    ]
    assert (active["active"], matched["active"]) == (True, False)
    assert active["rows"] == matched["rows"] == blind["rows"] > 50
    assert (await site.state())["rows_judged"] == active["rows"]
    assert blind["auc"] == 0.5
    assert sum(blind["decile_rows"]) == blind["decile_rows"][0] == blind["rows"]
    # Whoever never expects an end errs as often as there is one.
    assert blind["brier"] == blind["observed"][0]
    # Each prompt has its length, so keys tell more than all lengths together do.
    assert matched["brier"] < 0.7 * active["brier"]
    assert matched["auc"] > active["auc"] > 0.5
    for one in (active, matched):
        for name, score in {"auc_ratio": "auc", "brier_ratio": "brier"}.items():
            assert metric(site, f"predictor_{name}", predictor=one["name"]) == one[score]
    assert metric(site, "predictor_error_tokens_count") == active["rows"]
    assert metric(site, "predictor_scoring_duration_seconds_count") > 10
    await site.rest()
    assert len(predictors_of(site)._board) == 0


@pytest.mark.parametrize("policy", ["br-0", "jsq"])
@served(flags=lambda policy: {"policy": policy})
async def test_predictors_are_scored_whatever_the_policy(site: Site, policy: str) -> None:
    values = {"ignore_eos": True, "max_tokens": 200}
    await site.post(COMPLETIONS, STREAM | values | {"prompt": "t1"})
    assert metric(site, "predictor_refreshes_total") == 0
    assert metric(site, "predictor_rows_judged_total") >= 3


@served()
async def test_answers_that_are_not_streamed_are_scored_by_the_clock(site: Site) -> None:
    values = STREAM | {"ignore_eos": True, "max_tokens": 200, "stream": False}
    for i in range(3):
        await site.post(COMPLETIONS, values | {"prompt": f"t{i}"})
    # The first tells the time of a step; the other two are a window after the other.
    assert metric(site, "predictor_rows_judged_total") >= 6


@served()
async def test_a_client_that_leaves_spoils_no_score(site: Site) -> None:
    exchange = site.send(
        COMPLETIONS, STREAM | {"prompt": "t1", "ignore_eos": True, "max_tokens": 300}
    )
    await exchange.until_events(60)
    judged = metric(site, "predictor_rows_judged_total")
    assert judged == 1  # The first 40 tokens are over.
    exchange.call.abort()
    await site.rest()
    assert metric(site, "predictor_rows_judged_total") == judged
    assert len(predictors_of(site)._board) == 0


def test_nothing_is_done_for_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def count(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*arguments)

        monkeypatch.setattr(kind, name, count)

    for name in ("begin", "survival", "observe", "forget"):
        counted(ExactMatch, name)

    async def scenario(site: Site) -> None:
        nonlocal calls
        values = STREAM | {"prompt": "t1", "ignore_eos": True, "max_tokens": 400}
        exchange = site.send(COMPLETIONS, values)
        await exchange.until_events(5)
        calls = 0
        await exchange.until_events(385)
        # Every 20 tokens by the policy, every 41 by the judge; a step of the clock may be two.
        assert calls <= 380 / 20 + 380 / 41 + 2

    play(scenario, flags={"predictor": "exact-match"})
