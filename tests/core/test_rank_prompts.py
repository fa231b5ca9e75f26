"""What a prompt on one rank costs the others, and what its time tells."""

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.local_prefill import RankPrompts

RANK0, RANK1, RANK2 = RankId(0), RankId(1), RankId(2)
A, B, C = RequestId(0), RequestId(1), RequestId(2)


def test_ranks_that_compute_in_one_step_wait_for_the_longest() -> None:
    prompts = RankPrompts()
    assert prompts.longer_ns(50.0, RANK0) == prompts.longer_ns(50.0) == 50.0
    prompts.add(A, RANK0, 30.0, 5)
    assert prompts.longer_ns(50.0, RANK0) == 50.0
    assert prompts.longer_ns(50.0, RANK1) == prompts.longer_ns(50.0) == 20.0
    assert prompts.longer_ns(20.0, RANK1) == 0.0
    prompts.add(B, RANK1, 10.0, 6)
    assert prompts.longer_ns(25.0, RANK1) == 5.0
    prompts.step(7)  # They are computed now, and the next one in the step behind.
    assert prompts.longer_ns(50.0, RANK1) == 50.0


def test_the_time_of_a_prompt_is_known_of_the_longest_alone() -> None:
    prompts = RankPrompts()
    prompts.add(A, RANK0, 30.0, 5)
    prompts.add(B, RANK1, 10.0, 6)
    prompts.step(7)
    prompts.add(C, RANK1, 99.0, 8)  # For the next step.
    a, b = prompts.end(A, 47), prompts.end(B, 47)
    assert a is not None
    assert b is not None
    assert (a.begun_ns, a.longest_ns, a.decides) == (7, 30.0, True)
    assert (b.begun_ns, b.longest_ns, b.decides) == (7, 30.0, False)
    prompts.step(47)
    c = prompts.end(C, 150)
    assert c is not None
    assert (c.begun_ns, c.longest_ns, c.decides) == (47, 99.0, True)
    assert prompts.end(C, 151) is None


def test_one_rank_computes_its_prompts_one_after_the_other() -> None:
    prompts = RankPrompts()
    prompts.add(A, RANK0, 30.0, 5)
    prompts.step(7)
    prompts.add(B, RANK0, 20.0, 7)  # At the end of a step, in time for the next one.
    prompts.add(C, RANK2, 40.0, 7)
    ended = [prompts.end(one, 60) for one in (A, B, C)]
    assert [one and (one.begun_ns, one.longest_ns, one.decides) for one in ended] == [
        (7, 50.0, False),
        (7, 50.0, False),
        (7, 50.0, False),
    ]


def test_where_no_step_runs_a_prompt_begins_at_once() -> None:
    prompts = RankPrompts()
    prompts.add(A, RANK0, 30.0, 5)
    ended = prompts.end(A, 40)
    assert ended is not None
    assert (ended.begun_ns, ended.decides) == (5, True)
