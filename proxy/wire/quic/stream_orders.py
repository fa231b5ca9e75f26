"""In which order the streams of one connection are sent.

An order sorts the streams that have something to send, before each packet; the first one fills the
packet as far as it can. The rules are those of Chuppala, "Stream Scheduling Algorithms in QUIC"
(UCB/EECS-2024-64).
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple


class StreamPriority(NamedTuple):
    level: int = 0  # The higher goes first; 0 is the usual one.
    # When its last byte is due, in seconds of the connection's clock; inf for never.
    deadline_s: float = inf
    # When its first byte is due, likewise. Until that byte is sent, the earlier of both is the deadline.
    begin_s: float = inf


USUAL = StreamPriority()
StreamOrder = Callable[[StreamPriority, int, int], tuple[float, ...]]
"""Returns the key of a stream, by its priority, its number and its turn: the lowest is sent first.

The numbers of a client's streams are in the order in which it opened them. A stream's turn grows with
each packet that it had a part in.
"""


def _round_robin(priority: StreamPriority, number: int, turn: int) -> tuple[float, ...]:
    del priority, number
    return (turn,)


def _first_come(priority: StreamPriority, number: int, turn: int) -> tuple[float, ...]:
    del priority, turn
    return (number,)


def _earliest_deadline(priority: StreamPriority, number: int, turn: int) -> tuple[float, ...]:
    del turn
    return (priority.deadline_s, number)


def _absolute(priority: StreamPriority, number: int, turn: int) -> tuple[float, ...]:
    del turn
    return (-priority.level, number)


def _multilevel(priority: StreamPriority, number: int, turn: int) -> tuple[float, ...]:
    if priority.level >= 1:
        return (0, priority.deadline_s, number)
    return (1, turn)


STREAM_ORDERS: Mapping[str, StreamOrder] = {
    "rr": _round_robin,
    "fcfs": _first_come,
    "edf": _earliest_deadline,
    "abs": _absolute,
    "ml": _multilevel,
}
"""By name.

| order | streams |
| --- | --- |
| `rr` | take turns, a packet each |
| `fcfs` | in the order in which they were opened, one after the other |
| `edf` | the earliest deadline first |
| `abs` | the highest level first, and first come, first served within one |
| `ml` | levels above 0 first, by deadline; the rest takes turns |
"""
