"""Hostile requests get an answer that says why, and hurt nobody else."""

import random

import pytest
from tests.support.chaos.fuzz import draw_case, fuzz

from balanceroute.proxy.live.frontend.gateway import Gateway
from balanceroute.proxy.wire.messages import HttpRequest, Reply


@pytest.mark.parametrize("seed", range(4))
def test_an_honest_request_is_answered_right_after_each_hostile_one(seed: int) -> None:
    report = fuzz(seed, cases=150)
    assert not report.violations
    assert report.statuses[200] > 15
    assert report.statuses[400] > 50


def test_a_failing_application_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Gateway.__call__

    def fail(self: Gateway, request: HttpRequest, reply: Reply) -> None:
        if b"9223372036854775808" in request.body:
            raise OverflowError("planted")
        serve(self, request, reply)

    monkeypatch.setattr(Gateway, "__call__", fail)
    assert any("500" in violation for violation in fuzz(0, cases=150).violations)


def test_the_same_generator_draws_the_same_cases() -> None:
    def drawn() -> list[bytes]:
        rng = random.Random(3)
        return [draw_case(rng, number).data for number in range(200)]

    assert drawn() == drawn()


def test_every_way_to_spoil_a_request_is_drawn() -> None:
    rng = random.Random(0)
    kinds = {kind for number in range(2_000) for kind in draw_case(rng, number).kinds}
    assert len(kinds) == 24
