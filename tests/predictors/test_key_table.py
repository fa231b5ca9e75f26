"""The table of keys: bounded, the longest unused yields, and outputs are counted as points."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors.exact_match import KeyRecordTable


def still(_: int) -> float:
    return 1.0


def rows(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def counts(table: KeyRecordTable, key: int, age: int, steps: int) -> list[float]:
    row: list[float] = table.counts(rows(table.use(key)), rows(age), steps)[0].tolist()
    return row


def points(outputs: list[int], depth: int) -> list[float]:
    """Return what the outputs of one key count as, and how much each of them."""
    kept: list[tuple[int, int]] = []
    for place, output in enumerate(outputs):
        spread = int(output * 0.2)
        if place:
            spread = min(spread, abs(output - outputs[place - 1]))
        kept.append((output, spread))
    number = 8 if len(outputs) <= 8 else 4
    return [
        output + spread * (2 * point / (number - 1) - 1)
        for output, spread in kept[-depth:]
        for point in range(number)
    ]


@given(
    outputs=st.lists(st.integers(1, 120), min_size=1, max_size=30),
    depth=st.sampled_from([8, 9, 32]),
    age=st.integers(0, 140),
    steps=st.integers(0, 40),
)
def test_outputs_count_as_points_around_them(
    outputs: list[int], depth: int, age: int, steps: int
) -> None:
    table = KeyRecordTable(capacity=4, depth=depth)
    for output in outputs:
        table.add(7, output, still)
    spread = points(outputs, depth)
    each = len(spread) // min(len(outputs), depth)
    found = counts(table, 7, age, steps)
    # Points on the edge between two tokens may be rounded either way.
    for ahead, count in enumerate(found):
        least = sum(point > age + ahead + 0.501 for point in spread) / each
        most = sum(point > age + ahead + 0.499 for point in spread) / each
        assert least - 1e-9 <= count <= most + 1e-9


def test_many_slots_are_counted_as_each_alone() -> None:
    table = KeyRecordTable(capacity=100, depth=16)
    for number in range(300):
        table.add(number % 40, 1 + number * 7 % 90, still)
        table.add(99, 1 + number * 7 % 90, still)
    keys = [*range(50), 99, 99, 99]
    slots = rows(*(table.use(key) for key in keys))
    ages = np.arange(len(keys)) % 60
    together = table.counts(slots, ages, 30).tolist()
    assert together == [
        counts(table, key, age, 30) for key, age in zip(keys, ages.tolist(), strict=True)
    ]


def test_a_key_whose_answers_are_always_the_same_is_trusted_to_the_token() -> None:
    table = KeyRecordTable(capacity=4, depth=4)
    for _ in range(5):
        table.add(7, 100, lambda _: 0.0)
    assert counts(table, 7, 98, 3) == [4.0, 4.0, 0.0, 0.0]
    assert table.trust(rows(table.use(7)))[0] > 1.4


def test_a_key_that_moves_as_all_outputs_do_is_hardly_trusted() -> None:
    table = KeyRecordTable(capacity=4, depth=4)
    assert table.trust(rows(table.use(7))) == pytest.approx(1.0)
    for _ in range(3_000):
        table.add(7, 100, lambda _: 1.0)
    assert table.trust(rows(table.use(7)))[0] < 0.03


def test_the_slot_of_no_key_stays_empty() -> None:
    table = KeyRecordTable(capacity=2, depth=8)
    for key in range(10):
        table.add(key, 50, still)
    assert table.counts(rows(0), rows(0), 2).tolist() == [[0.0] * 3]
    assert table.added(rows(0)).tolist() == [0]


@given(
    operations=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 99))),
    capacity=st.integers(1, 5),
    depth=st.integers(1, 4),
)
def test_the_longest_unused_key_yields(
    operations: list[tuple[bool, int, int]], capacity: int, depth: int
) -> None:
    table = KeyRecordTable(capacity=capacity, depth=depth)
    model: OrderedDict[int, list[int]] = OrderedDict()
    for adds, key, output in operations:
        if key not in model and len(model) == capacity:
            model.popitem(last=False)
        model.setdefault(key, [])
        model.move_to_end(key)
        if adds:
            table.add(key, output, still)
            model[key].append(output)
        else:
            slot = table.use(key)
            assert table.keys_of(rows(slot)).tolist() == [key]
            assert table.added(rows(slot)).tolist() == [len(model[key])]
        assert len(table) == len(model)
    records = table.records()
    known = {key: outputs[-depth:] for key, outputs in model.items() if outputs}
    assert records.keys.tolist() == list(known)
    assert records.held.tolist() == [len(outputs) for outputs in known.values()]
    assert records.outputs.tolist() == [one for outputs in known.values() for one in outputs]


@given(
    operations=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), max_size=40),
    capacity=st.integers(1, 12),
    depth=st.integers(1, 12),
)
def test_a_restored_table_goes_on_as_the_one_before(
    operations: list[tuple[int, int]], capacity: int, depth: int
) -> None:
    table, restored = (KeyRecordTable(capacity=capacity, depth=depth) for _ in range(2))
    for key, output in operations:
        table.add(key, output, still)
    restored.restore(table.records())
    for key, output in operations[:7]:
        assert counts(restored, key, 10, 50) == counts(table, key, 10, 50)
        for one in (table, restored):
            one.add(key + 5, output, still)
    for one, other in zip(
        (getattr(table.records(), name) for name in table.records().__slots__),
        (getattr(restored.records(), name) for name in table.records().__slots__),
        strict=True,
    ):
        assert one.tolist() == other.tolist()


def test_a_smaller_table_takes_the_latest_of_a_larger_one() -> None:
    table, small = KeyRecordTable(capacity=10, depth=4), KeyRecordTable(capacity=2, depth=2)
    for key in range(5):
        for output in (10, 20, 30):
            table.add(key, output + key, still)
    small.restore(table.records())
    records = small.records()
    assert records.keys.tolist() == [3, 4]
    assert records.outputs.tolist() == [23, 33, 24, 34]
