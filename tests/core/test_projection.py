"""The incremental projection against recounts, the true future, and naive per-request models."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.extended import usually

from balanceroute.predictors import NoPrediction, Oracle, Survival
from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.prediction import OutputPredictor, composite_steps
from balanceroute.proxy.core.projection import Form, Projection
from balanceroute.proxy.core.ranks import Ledger

RANKS = 3
HORIZON = 7
REFRESHES = [1, 3, 20]
# The rows start over every 256 steps: this wraps them around twice and a half.
LONG_RUN_STEPS = 640
# Output lengths of request 0, 1, ..: known to the oracle, and the history of the survival curves.
OUTPUTS = random.Random(11).choices([1, 2, 3, 5, 8, 13, 21, 34, 55, 400], k=4_000)


def make_predictor(name: str) -> OutputPredictor:
    match name:
        case "oracle":
            return Oracle({RequestId(number): output for number, output in enumerate(OUTPUTS)})
        case "survival":
            return Survival(OUTPUTS[:200])
        case _:
            return NoPrediction()


def make_projection(
    form: Form,
    predictor: OutputPredictor,
    refresh_tokens: int,
    *,
    horizon: int = HORIZON,
    kind: type[Projection] = Projection,
) -> Projection:
    projection = kind(
        ranks=RANKS,
        horizon_steps=horizon,
        refresh_tokens=refresh_tokens,
        predictor=predictor,
        form=form,
    )
    projection.loads_ahead(np.zeros(RANKS, np.int64))  # It rests until it is asked.
    return projection


class Fleet:
    """A ledger and a projection fed alike, as the scheduler does it."""

    def __init__(self, projection: Projection) -> None:
        self.ledger = Ledger(RANKS)
        self.projection = projection
        self.age: dict[RequestId, int] = {}
        self.rank: dict[RequestId, RankId] = {}
        self.started: set[RequestId] = set()

    def bind(
        self, number: int, rank: int, kv_tokens: int, age: int = 0, sequences: int = 1
    ) -> RequestId:
        request = RequestId(number)
        self.ledger.bind(request, RankId(rank), kv_tokens, slots=sequences)
        self.projection.bind(request, RankId(rank), kv_tokens, age, sequences)
        self.age[request] = age
        self.rank[request] = RankId(rank)
        return request

    def start(self, request: RequestId) -> None:
        self.ledger.start(request)
        self.projection.start(request)
        self.started.add(request)

    def step(self) -> None:
        self.ledger.step()
        self.projection.step()
        for request in self.started:
            self.age[request] += 1

    def emit(self, request: RequestId, tokens: int) -> None:
        self.ledger.emit(request, tokens)
        self.projection.emit(request, tokens)
        self.age[request] += tokens

    def unbind(self, request: RequestId) -> None:
        self.ledger.unbind(request)
        self.projection.unbind(request)
        del self.age[request], self.rank[request]
        self.started.discard(request)

    def ahead(self) -> NDArray[np.float64]:
        ahead = self.projection.loads_ahead(self.ledger.loads)
        assert ahead.shape == (RANKS, self.projection.horizon_steps + 1)
        assert ahead[:, 0].tolist() == self.ledger.loads.tolist()
        return ahead


Operation = tuple[str, int, int]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["bind", "bind", "start", "step", "step", "emit", "unbind", "look"]),
        st.integers(0, 40),
        st.integers(1, 25),
    ),
    max_size=60,
)


def perform(fleet: Fleet, number: int, operation: Operation, prompts: dict[RequestId, int]) -> None:
    """Do one of `OPERATIONS`, the one with this number."""
    kind, pick, amount = operation
    prompts[RequestId(number)] = amount
    present = sorted(fleet.rank)
    request = present[pick % len(present)] if present else None
    match kind:
        case "bind":
            sequences = 1 + amount % 3
            fleet.bind(number, pick % RANKS, amount, age=pick // 8, sequences=sequences)
        case "start" if request is not None and request not in fleet.started:
            fleet.start(request)
        case "step":
            for _ in range(amount):
                fleet.step()
        case "emit" if request in fleet.started:
            # Some were given too much by the steps.
            spare = min(amount, fleet.ledger.kv_tokens(request) - prompts[request])
            fleet.emit(request, amount if pick % 2 else -spare)
        case "unbind" if request is not None:
            fleet.unbind(request)
        case "look":
            fleet.ahead()
        case _:
            pass


OF_ANY_EVENTS = given(
    form=st.sampled_from(Form),
    name=st.sampled_from(["oracle", "survival", "none"]),
    refresh=st.sampled_from(REFRESHES),
    horizon=st.integers(1, 12),
    operations=OPERATIONS,
)


@OF_ANY_EVENTS
def test_rows_equal_a_recount_in_every_order_of_events(
    form: Form, name: str, refresh: int, horizon: int, operations: list[Operation]
) -> None:
    fleet = Fleet(make_projection(form, make_predictor(name), refresh, horizon=horizon))
    prompts: dict[RequestId, int] = {}
    for number, operation in enumerate(operations):
        perform(fleet, number, operation, prompts)
        # Not after each operation: a deposit that is still to be made must survive the others.
        if operation[2] % 2:
            fleet.projection.check()
    fleet.projection.check()
    fleet.ahead()
    for request in list(fleet.rank):
        fleet.unbind(request)
    fleet.projection.check()
    assert not fleet.ahead().any()


class InBatches(Projection):
    """Makes each deposit as one of several."""

    def _make_deposit(self, place: int, *, again: bool = False) -> None:
        self._make_deposits(np.array([place]), again=again)


@OF_ANY_EVENTS
def test_a_deposit_alone_is_that_of_a_batch(
    form: Form, name: str, refresh: int, horizon: int, operations: list[Operation]
) -> None:
    fleets = [
        Fleet(make_projection(form, make_predictor(name), refresh, horizon=horizon, kind=kind))
        for kind in (Projection, InBatches)
    ]
    prompts: dict[RequestId, int] = {}
    for number, operation in enumerate(operations):
        for fleet in fleets:
            perform(fleet, number, operation, prompts)
        alone, batch = (fleet.projection for fleet in fleets)
        assert alone._deposits.due.tolist() == batch._deposits.due.tolist()
        assert alone._rows.tolist() == batch._rows.tolist()
    assert fleets[0].ahead().tolist() == fleets[1].ahead().tolist()


def is_turn(request: RequestId, age: int, refresh: int) -> bool:
    """Return whether a refresh falls on this token: every `refresh` tokens, spread by number."""
    return (age + request) % refresh == 0


class NaivePoint:
    """DESIGN section 4 to the letter, one request at a time: N is an estimate that counts down."""

    def __init__(self, predictor: OutputPredictor, horizon: int, refresh: int) -> None:
        self._predictor, self._horizon, self._refresh = predictor, horizon, refresh
        self._estimate: dict[RequestId, int | None] = {}  # None stays.

    def predict(self, request: RequestId, age: int) -> None:
        row = self._predictor.survival([request], np.array([age]), self._horizon)
        steps = int(composite_steps(row, self._horizon)[0])
        self._estimate[request] = None if steps == self._horizon else steps

    def token(self, request: RequestId, age: int) -> None:
        estimate = self._estimate[request]
        if estimate is not None:
            self._estimate[request] = estimate = estimate - 1
        if estimate == 0 or is_turn(request, age, self._refresh):
            self.predict(request, age)

    def projected(self, request: RequestId, kv_tokens: int) -> list[float]:
        estimate = self._estimate[request]
        return [
            float(kv_tokens + ahead) if estimate is None or ahead < estimate else 0.0
            for ahead in range(self._horizon + 1)
        ]


class NaiveExpected:
    """Keeps each request's curve since its last prediction; asks anew when it says "gone"."""

    def __init__(self, predictor: OutputPredictor, horizon: int, refresh: int) -> None:
        self._predictor, self._horizon, self._refresh = predictor, horizon, refresh
        self._curve: dict[RequestId, list[float]] = {}
        self._tokens_since: dict[RequestId, int] = {}

    def predict(self, request: RequestId, age: int) -> None:
        steps = self._horizon + self._refresh
        row = self._predictor.survival([request], np.array([age]), steps)
        self._curve[request] = row[0].tolist()
        self._tokens_since[request] = 0

    def token(self, request: RequestId, age: int) -> None:
        self._tokens_since[request] += 1
        curve = self._curve[request]
        if curve[self._tokens_since[request]] < 0.5 or is_turn(request, age, self._refresh):
            self.predict(request, age)

    def projected(self, request: RequestId, kv_tokens: int) -> list[float]:
        since = self._tokens_since[request]
        return [
            float(np.rint((kv_tokens + ahead) * self._curve[request][since + ahead]))
            for ahead in range(self._horizon + 1)
        ]


Naive = NaivePoint | NaiveExpected
NAIVE: dict[Form, type[Naive]] = {Form.POINT: NaivePoint, Form.EXPECTED: NaiveExpected}


def naive_rows(fleet: Fleet, naive: Naive) -> NDArray[np.float64]:
    """Return the rows before the first column is set to the load."""
    rows = np.zeros((RANKS, fleet.projection.horizon_steps + 1))
    for request, rank in fleet.rank.items():
        rows[rank] += naive.projected(request, fleet.ledger.kv_tokens(request))
    return rows


def feed_some(fleet: Fleet, rng: random.Random, arrived: int) -> list[RequestId]:
    """Bind and start up to two requests; return them."""
    admitted = []
    if len(fleet.rank) < 24:
        for number in range(arrived, arrived + rng.randrange(3)):
            age = rng.choice([0, 0, 4]) if OUTPUTS[number] > 4 else 0
            kv_tokens = age + rng.randrange(1, 200)
            admitted.append(fleet.bind(number, rng.randrange(RANKS), kv_tokens, age))
            fleet.start(admitted[-1])
    return admitted


@pytest.mark.parametrize("refresh", usually({1, 20}, REFRESHES))
@pytest.mark.parametrize("name", usually({"oracle", "survival"}, ["oracle", "survival", "none"]))
@pytest.mark.parametrize("form", Form)
def test_a_long_run_equals_the_naive_model(form: Form, name: str, refresh: int) -> None:
    predictor = make_predictor(name)
    naive = NAIVE[form](predictor, HORIZON, refresh)
    fleet = Fleet(make_projection(form, predictor, refresh))
    rng = random.Random(refresh)
    arrived = 0
    for step in range(LONG_RUN_STEPS):
        for request in feed_some(fleet, rng, arrived):
            naive.predict(request, fleet.age[request])
            arrived += 1
        fleet.step()
        for request, age in fleet.age.items():
            naive.token(request, age)
        # A request that ends leaves in the step it ends; a few leave before their time.
        for request in [r for r in fleet.rank if fleet.age[r] >= OUTPUTS[r] or rng.random() < 0.01]:
            fleet.unbind(request)
        running = sorted(fleet.rank)
        if running and rng.random() < 0.1:
            request = rng.choice(running)
            if fleet.age[request] + 2 < OUTPUTS[request]:
                fleet.emit(request, 2)
                naive.predict(request, fleet.age[request])
        rows = naive_rows(fleet, naive)
        loads = fleet.ledger.loads
        scale = np.divide(loads, rows[:, 0], out=np.ones(RANKS), where=rows[:, 0] > 0)
        expected = rows * scale[:, None]
        expected[:, 0] = loads
        if form is Form.POINT:
            assert (scale == 1.0).all()
        assert fleet.ahead().tolist() == expected.tolist(), f"step {step}"
        if step % 16 == 0:
            fleet.projection.check()
    assert arrived > 64


@pytest.mark.parametrize("refresh", REFRESHES)
def test_with_the_oracle_the_projection_is_the_future(refresh: int) -> None:
    fleet = Fleet(make_projection(Form.EXPECTED, make_predictor("oracle"), refresh))
    rng = random.Random(3)
    arrived = 0
    for _ in range(LONG_RUN_STEPS):
        arrived += len(feed_some(fleet, rng, arrived))
        fleet.step()
        for request in [r for r in fleet.rank if fleet.age[r] >= OUTPUTS[r]]:
            fleet.unbind(request)
        future = np.zeros((RANKS, HORIZON + 1))
        for request, rank in fleet.rank.items():
            left = OUTPUTS[request] - fleet.age[request]
            for ahead in range(min(left, HORIZON + 1)):
                future[rank, ahead] += fleet.ledger.kv_tokens(request) + ahead
        assert fleet.ahead().tolist() == future.tolist()


@pytest.mark.parametrize("form", Form)
def test_no_prediction_projects_the_growth_alone(form: Form) -> None:
    fleet = Fleet(make_projection(form, NoPrediction(), 3))
    for number, rank in enumerate([0, 0, 2]):
        fleet.start(fleet.bind(number, rank, 100))
    for _ in range(50):
        fleet.step()
    steps = np.arange(HORIZON + 1)
    assert fleet.ahead().tolist() == [
        (300 + 2 * steps).tolist(),
        [0] * len(steps),
        (150 + steps).tolist(),
    ]


@pytest.mark.parametrize("refresh", REFRESHES)
@pytest.mark.parametrize("form", Form)
def test_an_unstarted_request_does_not_grow(form: Form, refresh: int) -> None:
    predictor = Survival([4] * 3 + [30])
    late = Fleet(make_projection(form, predictor, refresh))
    # One that had started leaves its place in the tables to it.
    late.start(late.bind(9, 0, 5))
    late.unbind(RequestId(9))
    request = late.bind(0, 1, 100, age=1)
    for _ in range(50):
        late.step()
        assert late.ahead()[:, 0].tolist() == [0.0, 100.0, 0.0]
    late.start(request)
    now = Fleet(make_projection(form, predictor, refresh))
    now.start(now.bind(0, 1, 100, age=1))
    for _ in range(20):
        # From its start on it is projected as if it had been bound just then.
        assert late.ahead().tolist() == now.ahead().tolist()
        late.step()
        now.step()
    assert late.ledger.kv_tokens(request) == 120


# What is predicted has to be so at every token, so that it does not matter whose turn is when.
@pytest.mark.parametrize(("name", "refresh"), [("survival", 1), ("none", 5)])
def test_a_request_with_sequences_is_projected_like_as_many_requests(
    name: str, refresh: int
) -> None:
    one = Fleet(make_projection(Form.POINT, make_predictor(name), refresh))
    many = Fleet(make_projection(Form.POINT, make_predictor(name), refresh))
    together = one.bind(0, 1, 3 * 40, age=1, sequences=3)
    each = [many.bind(number, 1, 40, age=1) for number in range(3)]
    for step in range(60):
        if step == 2:
            one.start(together)
            for request in each:
                many.start(request)
        if step in {30, 33, 34}:
            one.emit(together, 3 * 2)
            for request in each:
                many.emit(request, 2)
        assert one.ahead().tolist() == many.ahead().tolist(), f"step {step}"
        one.step()
        many.step()
        one.projection.check()


def test_the_age_of_a_request_with_sequences_is_that_of_one_of_them() -> None:
    spy = Spy()
    fleet = Fleet(make_projection(Form.EXPECTED, spy, 20))
    request = fleet.bind(0, 0, 30, age=4, sequences=3)
    fleet.start(request)
    for tokens, age in ((0, 4), (2, 4), (1, 5), (6, 7), (-1, 6), (-2, 6), (-3, 5)):
        fleet.emit(request, tokens)
        fleet.ahead()
        assert spy.batches[-1] == [(request, age)]


def test_tokens_taken_back_leave_the_projection() -> None:
    fleet = Fleet(make_projection(Form.EXPECTED, NoPrediction(), 3))
    request = fleet.bind(0, 1, 100)
    fleet.start(request)
    for _ in range(4):
        fleet.step()
    fleet.emit(request, -4)
    assert fleet.ahead()[1].tolist() == list(range(100, 101 + HORIZON))
    fleet.projection.check()


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("name", ["oracle", "survival", "none"])
@pytest.mark.parametrize("form", Form)
def test_newcomers_add_what_binding_adds(form: Form, name: str, sequences: int) -> None:
    fleet = Fleet(make_projection(form, make_predictor(name), 3))
    for number in range(4):
        fleet.start(fleet.bind(number, 0, 50 + number))
    for number in range(4, 20):
        before = fleet.ahead()
        survival = fleet.projection.survival([RequestId(number)], [2])
        adds = fleet.projection.newcomers([70 + number], survival, [sequences])[0]
        # Asking binds nothing.
        assert fleet.ahead().tolist() == before.tolist()
        fleet.bind(number, number % 2, 70 + number, age=2, sequences=sequences)
        gained = fleet.ahead() - before
        # Only deposits are whole tokens.
        assert gained[number % 2].tolist() == np.rint(adds).tolist()
        assert not np.delete(gained, number % 2, axis=0).any()
    for _ in range(5):
        fleet.step()
    survival = fleet.projection.survival([RequestId(20)], [0])
    adds = fleet.projection.newcomers([33], survival, [1])[0]
    fleet.bind(20, 2, 33)
    assert fleet.ahead()[2].tolist() == np.rint(adds).tolist()


def test_a_departure_that_does_not_come_is_predicted_anew() -> None:
    # Certain to end after 3 tokens, says the history; at age 3 nothing longer was seen: it stays.
    fleet = Fleet(make_projection(Form.POINT, Survival([3] * 9), 20, horizon=5))
    fleet.start(fleet.bind(0, 0, 10))
    assert fleet.ahead()[0].tolist() == [10, 11, 12, 0, 0, 0]
    fleet.step()
    assert fleet.ahead()[0].tolist() == [11, 12, 0, 0, 0, 0]
    fleet.step()
    assert fleet.ahead()[0].tolist() == [12, 0, 0, 0, 0, 0]
    fleet.step()
    assert fleet.ahead()[0].tolist() == [13, 14, 15, 16, 17, 18]


def test_an_estimate_at_the_horizon_stays_until_the_next_refresh() -> None:
    oracle = Oracle({RequestId(0): 5})
    fleet = Fleet(make_projection(Form.POINT, oracle, 2, horizon=5))
    fleet.start(fleet.bind(0, 0, 10))
    assert fleet.ahead()[0].tolist() == [10, 11, 12, 13, 14, 15]
    fleet.step()
    assert fleet.ahead()[0].tolist() == [11, 12, 13, 14, 15, 16]
    fleet.step()
    assert fleet.ahead()[0].tolist() == [12, 13, 14, 0, 0, 0]


def test_survivors_carry_the_expected_form_back_to_the_load() -> None:
    # Half end after one token; who is there after it holds all its tokens, not half of them.
    fleet = Fleet(
        make_projection(Form.EXPECTED, Survival([1, 1, 9, 9], half_life=None), 20, horizon=2)
    )
    fleet.start(fleet.bind(0, 0, 99))
    assert fleet.ahead()[0].tolist() == [99, 50, 50]  # 100 / 2; 101 / 2 rounded to even.
    fleet.step()
    assert fleet.ahead()[0].tolist() == [100, 100, 102]  # Twice 50, 50 and 51.


class Spy(NoPrediction):
    """No prediction, with a record of who was asked about at what age."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[RequestId, int]]] = []

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        self.batches.append(list(zip(requests, ages.tolist(), strict=True)))
        return super().survival(requests, ages, steps)


def test_predictions_that_fall_together_are_asked_for_in_one_batch() -> None:
    spy = Spy()
    fleet = Fleet(make_projection(Form.EXPECTED, spy, 3))
    requests = [fleet.bind(number, number % RANKS, 10) for number in range(12)]
    for request in requests:
        fleet.start(request)
    fleet.ahead()
    assert [sorted(batch) for batch in spy.batches] == [[(request, 0) for request in requests]]
    for _ in range(30):
        fleet.step()
        fleet.ahead()
    # From then on a third of them a step, each at every third of its tokens.
    assert [len(batch) for batch in spy.batches[1:]] == [4] * 30
    for request in requests:
        ages = [age for batch in spy.batches for asked, age in batch if asked == request]
        assert ages[0] == 0
        assert 1 <= ages[1] <= 3
        assert np.diff(ages[1:]).tolist() == [3] * (len(ages) - 2)


def test_a_request_that_left_is_not_asked_about() -> None:
    spy = Spy()
    fleet = Fleet(make_projection(Form.EXPECTED, spy, 2))
    request = fleet.bind(0, 0, 10)
    fleet.unbind(request)
    for _ in range(6):
        fleet.step()
    assert spy.batches == []
    request = fleet.bind(0, 0, 10)
    fleet.step()
    fleet.unbind(request)
    for _ in range(6):
        fleet.step()
    assert spy.batches == [[(request, 0)]]


def test_hundreds_of_requests_find_room() -> None:
    fleet = Fleet(make_projection(Form.EXPECTED, make_predictor("survival"), 20))
    for number in range(300):
        fleet.start(fleet.bind(number, number % RANKS, 10))
        if number % 100 == 50:
            fleet.step()
            fleet.projection.check()
    for number in range(0, 300, 2):
        fleet.unbind(RequestId(number))
    fleet.ahead()
    fleet.projection.check()


@pytest.mark.parametrize("column", [0, 1, HORIZON])
def test_check_notices_a_tampered_row(column: int) -> None:
    fleet = Fleet(make_projection(Form.EXPECTED, NoPrediction(), 3))
    fleet.bind(0, 1, 10)
    fleet.step()
    fleet.projection.check()
    fleet.projection._rows[2, fleet.projection._head + column] += 1
    with pytest.raises(AssertionError, match="differs from a recount"):
        fleet.projection.check()


def test_nothing_is_predicted_before_somebody_asks_for_the_loads_ahead() -> None:
    spy = Spy()
    projection = make_projection(Form.EXPECTED, spy, 2)
    projection.clear()
    fleet = Fleet(projection)
    first, second = fleet.bind(0, 0, 10), fleet.bind(1, 1, 20)
    fleet.start(first)
    for _ in range(9):
        fleet.step()
    fleet.unbind(second)
    assert spy.batches == []
    fleet.ahead()
    assert spy.batches == [[(first, 9)]]
    fleet.projection.check()


def test_a_rest_leaves_no_trace() -> None:
    rested, awake = (Fleet(make_projection(Form.EXPECTED, NoPrediction(), 20)) for _ in range(2))
    for fleet in (rested, awake):
        for number in range(4):
            fleet.start(fleet.bind(number, number % RANKS, 10 * number, age=number))
        fleet.step()
    rested.projection.rest()
    for fleet in (rested, awake):
        for _ in range(50):
            fleet.step()
        fleet.start(fleet.bind(9, 0, 70))
        fleet.emit(RequestId(1), 3)
        fleet.unbind(RequestId(2))
        fleet.step()
        fleet.projection.check()
    loads = awake.ledger.loads
    assert np.array_equal(rested.projection.loads_ahead(loads), awake.projection.loads_ahead(loads))
    rested.projection.check()


@pytest.mark.parametrize("resting", [False, True])
def test_it_tells_what_runs_and_what_left(resting: bool) -> None:
    projection = make_projection(Form.EXPECTED, NoPrediction(), 20)
    left: list[tuple[int, int, int | None]] = []
    projection.on_leave = lambda *request: left.append(request)
    if resting:
        projection.rest()
    fleet = Fleet(projection)
    fleet.start(fleet.bind(1, 0, 50, age=5))
    fleet.start(fleet.bind(2, 2, 80, sequences=2))
    fleet.bind(3, 0, 30)
    for _ in range(7):
        fleet.step()
    fleet.emit(RequestId(1), 2)
    running = projection.running_on(np.array([True, False, True]))
    told = {
        request: (rank, tokens, age)
        for request, rank, tokens, age in zip(
            running.requests.tolist(),
            running.ranks.tolist(),
            running.kv_tokens.tolist(),
            running.ages.tolist(),
            strict=True,
        )
    }
    assert told == {1: (0, 59, 14), 2: (2, 94, 7), 3: (0, 30, 0)}
    for number in (1, 2, 3):
        fleet.unbind(RequestId(number))
    # The third never decoded.
    assert left == [(1, 45, 14), (2, 40, 7), (3, 30, None)]
    assert not len(projection.running_on(np.ones(RANKS, np.bool_)).requests)
