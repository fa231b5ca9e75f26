"""Every (state, trigger) pair, against the table written out by hand."""

import itertools

import pytest

from balanceroute.proxy.core.errors import BalanceRouteError, LifecycleError
from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.lifecycle import TRANSITIONS, LifecycleState, Request, Trigger

# A row is a state, a column a trigger; "." is not allowed.
GOLDEN = """
           PREFILL    SKIP_PREFILL PREFILLED PREFILL_LOST ADMIT    DECODE_LOST RECOMPUTE FINISH FAIL   CANCEL
QUEUED     PREFILLING POOLED       .         .            .        .           .         .      FAILED CANCELLED
PREFILLING .          .            POOLED    QUEUED       .        .           .         DONE   FAILED CANCELLED
POOLED     .          .            .         QUEUED       DECODING .           .         .      FAILED CANCELLED
DECODING   .          .            .         QUEUED       .        POOLED      QUEUED    DONE   FAILED CANCELLED
DONE       .          .            .         .            .        .           .         .      .      .
FAILED     .          .            .         .            .        .           .         .      .      .
CANCELLED  .          .            .         .            .        .           .         .      .      .
"""
TERMINAL = {LifecycleState.DONE, LifecycleState.FAILED, LifecycleState.CANCELLED}


def golden() -> dict[tuple[LifecycleState, Trigger], LifecycleState | None]:
    header, *rows = (line.split() for line in GOLDEN.strip().splitlines())
    return {
        (LifecycleState[row[0]], Trigger[trigger]): None if end == "." else LifecycleState[end]
        for row in rows
        for trigger, end in zip(header, row[1:], strict=True)
    }


PAIRS = list(itertools.product(LifecycleState, Trigger))


def test_the_golden_table_names_every_pair() -> None:
    assert sorted(golden(), key=str) == sorted(PAIRS, key=str)


@pytest.mark.parametrize(
    ("state", "trigger"), PAIRS, ids=[f"{state.name}-{trigger.name}" for state, trigger in PAIRS]
)
def test_a_trigger_moves_as_the_golden_table_says_or_raises(
    state: LifecycleState, trigger: Trigger
) -> None:
    request = Request(RequestId(7), Ticket(1), waiting_since_ns=0, state=state)
    end = golden()[state, trigger]
    if end is None:
        with pytest.raises(LifecycleError, match=rf"request 7: {trigger.name} .* {state.name}"):
            request.move(trigger)
        assert request.state is state
    else:
        request.move(trigger)
        assert request.state is end


def reachable(start: LifecycleState) -> set[LifecycleState]:
    found, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        for (origin, _), end in TRANSITIONS.items():
            if origin is state and end not in found:
                found.add(end)
                frontier.append(end)
    return found


@pytest.mark.parametrize("state", [state for state in LifecycleState if state not in TERMINAL])
def test_every_live_state_can_end_in_every_way(state: LifecycleState) -> None:
    assert reachable(state) >= TERMINAL


@pytest.mark.parametrize("state", [state for state in LifecycleState if state in TERMINAL])
def test_a_terminal_state_has_no_exit(state: LifecycleState) -> None:
    assert reachable(state) == {state}


def test_a_new_request_waits_and_holds_nothing() -> None:
    request = Request(RequestId(0), Ticket(3), waiting_since_ns=0)
    assert request.state is LifecycleState.QUEUED
    assert (request.prefiller, request.rank) == (None, None)
    assert not request.prefilling
    assert not request.started
    assert request.emitted_before == 0
    assert (request.lost_on_prefillers, request.lost_on_ranks) == ((), ())


def test_the_load_of_a_request_is_its_prompt_once_per_slot() -> None:
    assert Request(RequestId(0), Ticket(3), waiting_since_ns=0).kv_tokens() == 3
    assert Request(RequestId(0), Ticket(3, slots=4), waiting_since_ns=0).kv_tokens() == 12


def test_a_lifecycle_error_is_one_of_ours() -> None:
    assert issubclass(LifecycleError, BalanceRouteError)
