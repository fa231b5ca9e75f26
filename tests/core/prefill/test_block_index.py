"""The index of blocks against plain sets, and its bounds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.prefill.prefix_memory import BlockIndex, block_keys

# Prompts as paths in a small tree, so that many share a beginning.
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def chain(path: list[int]) -> tuple[int, ...]:
    """Return a hash of each beginning of a path."""
    hashes, value = [], 1
    for step in path:
        value = (value * 1_000_003 + step + 1) % (1 << 63)
        hashes.append(value)
    return tuple(hashes)


def keys(*blocks: int) -> list[int]:
    found: list[int] = block_keys(blocks).tolist()
    return found


@given(st.lists(PATHS, max_size=40), PATHS)
def test_with_room_for_all_it_knows_the_longest_common_beginning(
    added: list[list[int]], asked: list[int]
) -> None:
    index = BlockIndex(4 * 40 * 12)
    for path in added:
        index.add(block_keys(chain(path)))
    known = {block for path in added for block in chain(path)}
    blocks = chain(asked)
    expected = 0
    while expected < len(blocks) and blocks[expected] in known:
        expected += 1
    assert index.leading(keys(*blocks))[0] == expected


@given(st.lists(PATHS, min_size=30, max_size=60))
def test_the_latest_prompts_are_known_whatever_was_dropped(added: list[list[int]]) -> None:
    index = BlockIndex(64)
    for path, before in zip(added[1:], added, strict=False):
        index.add(block_keys(chain(path)))
        for one in (path, before if path != added[1] else path):
            assert index.leading(keys(*chain(one)))[0] == len(one)


def test_memory_is_bounded() -> None:
    index = BlockIndex(1_000)
    for start in range(0, 100_000, 100):
        index.add(block_keys(tuple(range(start, start + 100))))
    tables = index._tables
    assert len(tables) == 4
    assert sum(table.count for table in tables) <= 1_000
    assert sum(table._keys.nbytes for table in tables) <= 20_000
    assert index.leading(keys(*range(99_900, 100_000)))[0] == 100
    assert index.leading(keys(*range(98_000, 98_100)))[0] == 0


def test_of_a_prompt_longer_than_a_table_the_beginning_is_known() -> None:
    index = BlockIndex(400)
    index.add(block_keys(tuple(range(1_000))))
    assert index.leading(keys(*range(1_000)))[0] == 100


def test_what_was_added_before_can_be_dropped() -> None:
    index = BlockIndex(40)
    index.add(block_keys(tuple(range(10))))
    index.add(block_keys(tuple(range(20, 30))))
    known, table = index.leading(keys(*range(10)))
    assert (known, table < index.newest) == (10, True)
    index.drop(table)
    assert index.leading(keys(*range(10)))[0] == 0
    assert index.leading(keys(*range(20, 30)))[0] == 10


def test_no_key_is_zero_which_marks_a_free_slot() -> None:
    assert np.all(block_keys((0, 1, (1 << 63) - 1)) != 0)
    index = BlockIndex(100)
    assert index.leading(keys(0))[0] == 0
    index.add(block_keys((0,)))
    assert index.leading(keys(0, 1))[0] == 1
