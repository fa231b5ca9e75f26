"""States are read strictly: every value is of the type and in the range that was asked for."""

import numpy as np
import pytest

from balanceroute.predictors import State, StateError
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS, packed


def state(value: object) -> State:
    return State("any", {"field": value})


@pytest.mark.parametrize("value", [True, 1.0, "1", None, [1], -1, 11])
def test_an_integer_is_an_integer_in_range(value: object) -> None:
    with pytest.raises(StateError, match="'field' must be"):
        state(value).integer("field", least=0, most=10)


@pytest.mark.parametrize(
    "value", [True, "1", None, float("nan"), float("inf"), 10**400, -0.5, 10.5]
)
def test_a_number_is_finite_and_in_range(value: object) -> None:
    with pytest.raises(StateError, match="'field' must be"):
        state(value).number("field", least=0, most=10)


@pytest.mark.parametrize(
    "value", [(1,), {"1": 1}, "12", None, [1.0], [True], [None], [[1]], [-1], [1, 11], [2**70]]
)
def test_integers_are_a_list_of_integers_in_range(value: object) -> None:
    with pytest.raises(StateError, match="'field' must"):
        state(value).integers("field", least=0, most=10)


@pytest.mark.parametrize("kind", [np.uint64, np.int32, np.float64])
def test_packed_numbers_are_read_as_they_were(kind: type[np.generic]) -> None:
    array = np.array([0, 1, 250], kind)
    read = state(packed(array)).packed("field", kind, least=0, most=250)
    assert (read.dtype, read.tolist()) == (array.dtype, array.tolist())
    array = np.zeros(0, kind)
    assert state(packed(array)).packed("field", kind, least=1, most=1).size == 0


def test_numbers_are_packed_with_their_little_end_first() -> None:
    assert packed(np.array([1], ">i4")) == packed(np.array([1], "<i4")) == "AQAAAA=="


@pytest.mark.parametrize(
    "value",
    [
        [1.0],
        None,
        "1.0",
        "AQAAAA",
        "AQAA AA==",
        "AQAAAAA=",
        packed(np.array([1.0, np.nan, 2.0])),
        packed(np.array([np.inf])),
        packed(np.array([-0.5, 1.0])),
        packed(np.array([1.0, 11.0])),
    ],
)
def test_packed_numbers_are_finite_and_in_range(value: object) -> None:
    with pytest.raises(StateError, match="'field' must"):
        state(value).packed("field", np.float64, least=0, most=10)


@pytest.mark.parametrize("value", [[-1], [MAX_OUTPUT_TOKENS + 1], [2**70]])
def test_outputs_are_lengths(value: object) -> None:
    with pytest.raises(StateError, match="'field' must"):
        state(value).outputs("field")


def test_what_is_right_is_returned_as_it_is() -> None:
    assert state(10).integer("field", least=0, most=10) == 10
    assert state(10).number("field") == 10.0
    assert state([]).integers("field", least=1, most=1) == []
    assert state([0, MAX_OUTPUT_TOKENS]).outputs("field").tolist() == [0, MAX_OUTPUT_TOKENS]
    assert State("any", {}, {"model": "tree"}).text("model") == "tree"


def test_what_is_missing_is_named() -> None:
    empty = State("any", {})
    with pytest.raises(StateError, match="field 'field' is missing"):
        empty.value("field")
    with pytest.raises(StateError, match="text 'model' is missing"):
        empty.text("model")
