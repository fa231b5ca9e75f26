"""Whom a kill met: what the scheduler process had, or what came over a relay that ended."""

from balanceroute.proxy.testing.chaos.answer_reader import Ending, Received
from balanceroute.proxy.testing.soak.kill_hits import PHASES, Kill, hits_of, phases_in


def test_a_phase_is_the_state_and_whether_tokens_came() -> None:
    rows = [(state, 0) for state in ("queued", "prefilling", "pooled", "decoding")]
    requests = [
        {"request_id": f"req-{i}", "state": state, "emitted_tokens": tokens}
        for i, (state, tokens) in enumerate([*rows, ("decoding", 3)])
    ]
    assert tuple(phases_in({"requests": requests}).values()) == PHASES


def test_a_relay_that_ends_hits_what_broke_until_the_next_kill() -> None:
    answers = [
        ("broken", Received(ending=Ending.CUT, ended_s=10.1)),
        ("without a byte", Received(ending=Ending.UNANSWERED, ended_s=10.2)),
        ("of the other relay", Received(ending=Ending.CUT, ended_s=12.1)),
        ("done before", Received(ending=Ending.COMPLETE, ended_s=10.1)),
    ]
    live = {name: "streaming" for name, _ in answers} | {"without a byte": "queued"}
    first, second = Kill(10.0, True, live), Kill(12.0, True, {"of the other relay": "pooled"})
    assert hits_of([first], answers[:2]) == {"streaming": 1, "queued": 1}
    assert hits_of([first, second], answers) == {"streaming": 1, "queued": 1, "pooled": 1}


def test_the_scheduler_process_hits_all_that_it_knew() -> None:
    live = {"a": "pooled", "b": "streaming", "c": "streaming"}
    answers = [("a", Received(ending=Ending.COMPLETE, ended_s=99.0))]
    assert hits_of([Kill(10.0, False, live)], answers) == {"pooled": 1, "streaming": 2}
    assert not hits_of([Kill(10.0, False, None)], answers)
