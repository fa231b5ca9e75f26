"""Stages of a request, by the times of its record."""

from balanceroute.proxy.live.telemetry.record import RequestRecord, stages_of


def record() -> RequestRecord:
    one = RequestRecord("r", "/v1/completions", 1, 0.0, stream=True)
    one.prefiller, one.rank = "http://p:1", "http://d:1"
    one.prefill_started_ns, one.prefilled_ns, one.admitted_ns = 2, 3, 4
    return one


def test_a_stage_begins_where_the_one_before_it_ends() -> None:
    one = record()
    one.first_token_ns = 5
    names = [(step.name, step.began_ns) for step in stages_of(one)]
    assert names == [("queue", 1), ("prefill", 2), ("pool", 3), ("transfer", 4), ("decode", 5)]


def test_a_first_token_of_an_earlier_binding_began_no_stage_of_the_last_one() -> None:
    one = record()
    one.admitted_ns, one.first_token_ns = 9, 5
    names = [(step.name, step.began_ns) for step in stages_of(one)]
    assert names == [("queue", 1), ("prefill", 2), ("pool", 3), ("decode", 9)]
