"""The step trace's file format: one line of JSON, then records of a fixed size.

The line has the format and its version, the engine (`identity`), and the length of a record in
bytes. Records follow without padding, little-endian, in the order in which the steps
ended. A record that is cut short by a kill is no record. Versions differ in the records' fields.

Fields of a record, version 1:

    step              u64  Number of the step among those of this file, from 0. A gap is a loss.
    start_ns          u64  Before the scheduler was asked for the batch; Unix time.
    end_ns            u64  After the scheduler took the model's output; Unix time.
    kv_tokens         u64  KV tokens of the batch, including those that this step computes: the
                           sum over its requests of prompt tokens and tokens emitted before.
    running           u32  Requests that the scheduler holds as running.
    batch             u32  Requests in the batch.
    scheduled_tokens  u32  Tokens that this step computes.
    prefill_tokens    u32  Those of requests that compute more than a token and its drafts.
    wave              u32  vLLM's wave of a data-parallel group, and
    wave_step         u32  the step in it: equal on all ranks for one step of the barrier.
                           UNKNOWN if there is no barrier.
    flags             u32  Sum of the flags below.

With asynchronous scheduling a step starts while the one before still runs, so that steps overlap:
a step's own time is from the end of the one before, or from its start if that is later.
"""

import json
from struct import Struct
from typing import Final

FORMAT: Final = "balanceroute-steps"
VERSION: Final = 1
SUFFIX: Final = ".steps"

FIELDS: Final = (
    ("step", "Q"),
    ("start_ns", "Q"),
    ("end_ns", "Q"),
    ("kv_tokens", "Q"),
    ("running", "I"),
    ("batch", "I"),
    ("scheduled_tokens", "I"),
    ("prefill_tokens", "I"),
    ("wave", "I"),
    ("wave_step", "I"),
    ("flags", "I"),
)
"""Names and struct codes of a record's fields, in order."""

RECORD: Final = Struct("<" + "".join(code for _, code in FIELDS))

UNKNOWN: Final = 0xFFFF_FFFF
"""A wave of an engine that has none."""

DUMMY: Final = 1
"""Flag: the rank had nothing to compute and only took part in the barrier."""

MAX_HEADER_BYTES: Final = 1 << 16


def header_line(identity: dict[str, object]) -> bytes:
    """Return a file's first line."""
    header = {"format": FORMAT, "version": VERSION, "record_bytes": RECORD.size, **identity}
    return json.dumps(header, separators=(",", ":")).encode("ascii") + b"\n"
