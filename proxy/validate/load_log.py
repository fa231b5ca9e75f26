"""Reads the load log (`balanceroute.proxy.live.control.load_log`): the proxy's load of each rank."""

import json
from array import array
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.validate.errors import ValidationError

_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one rank, in the order of time.

    Attributes:
        times_ns: int64[samples], Unix time.
        started_tokens: int64[samples], KV tokens of the requests that the proxy counts in its batch.
        bound_tokens: int64[samples], KV tokens of all requests sent to it.
    """

    times_ns: NDArray[np.int64]
    started_tokens: NDArray[np.int64]
    bound_tokens: NDArray[np.int64]


def read_load_log(path: Path) -> dict[str, Samples]:
    """Return the samples of every rank, by its name, in the order of their first lines.

    A last line without its end is left out: the proxy may be writing it.

    Raises:
        ValidationError: A line is no sample, or there is none.
        OSError: The file cannot be read.
    """
    rows: dict[str, array[int]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                try:
                    _read(line, rows)
                except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                    reason = f"{path}:{number}: no sample of a load log"
                    raise ValidationError(reason) from error
    if not rows:
        raise ValidationError(f"{path}: a load log without samples")
    return {name: _samples(row) for name, row in rows.items()}


def _read(line: bytes, rows: "dict[str, array[int]]") -> None:
    sample = json.loads(line)
    time_s = float(sample["time_s"])
    if not isfinite(time_s):
        raise ValueError(time_s)
    for name, load in sample["loads"].items():
        if len(load) != _COLUMNS or not all(type(number) is int for number in load):
            raise ValueError(load)
        started_tokens, _, bound_tokens, _ = load
        row = rows.setdefault(name, array("q"))
        row.extend((round(time_s * 1e9), started_tokens, bound_tokens))


def _samples(row: "array[int]") -> Samples:
    table = np.array(row, np.int64).reshape(-1, 3)
    # A wall clock may be set back.
    table = table[np.argsort(table[:, 0], kind="stable")]
    return Samples(*(np.ascontiguousarray(column) for column in table.T))
