"""Requests of the past as predictors see them: those of traces, and of the proxy's own log.

The log is described in `balanceroute.proxy.live.telemetry.request_log`. This module reads the facts that the
predictor got while the proxy served: the prompt's length by the engine's count, or estimated without one;
the limit; the keys; the length that the client expected.
"""

import hashlib
import re
from array import array
from collections.abc import Iterable
from decimal import Decimal
from os import PathLike
from pathlib import Path

from balanceroute.predictors.base import PastRequest, RequestFeatures
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS
from balanceroute.traces import TraceError, TraceRequest
from balanceroute.traces.formats import is_of_the_process
from balanceroute.traces.lines import (
    NS_PER_S,
    MalformedLineError,
    decode_object,
    nanoseconds_from_json,
    required,
    shown,
    text_lines,
    tokens_from_json,
)

_KEY = re.compile(r"[0-9a-f]{16}")


def read_log(path: str | PathLike[str]) -> list[PastRequest]:
    """Read the requests that ended by themselves, in the order of their arrival.

    Left out are requests of every other outcome, those that emitted nothing or more than any
    predictor takes, and those whose prompt was not measured. Times are seconds since 1970. Blank lines
    and those of the process log in between are passed over; nothing else is.

    Args:
        path: The log, through gzip or not. Logs of before there were keys have none.

    Raises:
        TraceError: The file cannot be read, a line is malformed, or no request is left.
    """
    path = Path(path)
    with text_lines(path) as lines:
        requests = [request for line in lines if (request := _request(line)) is not None]
    if not requests:
        raise TraceError(path, 0, "the log holds no request that ended by itself")
    requests.sort(key=lambda request: request.arrival_s)
    return requests


def _request(line: str) -> PastRequest | None:
    """Return the request of a line, None if there is nothing to learn from it."""
    entry = decode_object(line)
    if is_of_the_process(entry):
        return None
    outcome = required(entry, "outcome")
    if not isinstance(outcome, str):
        raise MalformedLineError(f"outcome is not a text: {shown(outcome)}")
    if outcome != "ok":
        return None
    sequences = tokens_from_json("choices", required(entry, "choices"))
    if sequences < 1:
        raise MalformedLineError("choices is 0")
    emitted = tokens_from_json("output_tokens", required(entry, "output_tokens"))
    output_tokens = max(1, round(emitted / sequences))
    counted = tokens_from_json("prompt_tokens", required(entry, "prompt_tokens"))
    estimate = tokens_from_json("prompt_estimate", entry.get("prompt_estimate", 0))
    if estimate and entry.get("prefiller") == "":
        counted = estimate  # It was counted by the answer: too late for the predictor.
    limit = entry.get("max_tokens")
    features = RequestFeatures(
        counted or estimate,
        None if limit is None else tokens_from_json("max_tokens", limit),
        _keys(entry.get("keys", [])),
        _expected(entry),
    )
    arrival_s = _seconds(entry, "arrival_s")
    finished_s = arrival_s + _seconds(entry, "duration_s")
    if not emitted or output_tokens > MAX_OUTPUT_TOKENS or not features.prompt_tokens:
        return None
    return PastRequest(float(arrival_s), float(finished_s), features, output_tokens)


def _expected(entry: dict[str, object]) -> int | None:
    """Return the client's expectation; each predictor finds out itself whether a limit counts."""
    hint = entry.get("hint")
    if hint is None or entry.get("hint_source") != "client":
        return None
    return tokens_from_json("hint", hint)


def _seconds(entry: dict[str, object], name: str) -> Decimal:
    time_ns = nanoseconds_from_json(name, required(entry, name), unit_ns=NS_PER_S)
    return Decimal(time_ns) / NS_PER_S


def _keys(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise MalformedLineError(f"keys is not a list: {shown(value)}")
    for key in value:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise MalformedLineError(f"keys holds {shown(key)}, not 16 hexadecimal digits")
    return tuple(int(key, 16) for key in value)


# Requests of a trace as predictors see them.

_NS_PER_S = 1e9
# The whole prompt, then its first blocks, in which conversations and applications differ.
_BEGINNINGS = (None, 4, 2, 1)


def features_of(request: TraceRequest) -> RequestFeatures:
    """Return the facts of a request before it decodes: never its output.

    Requests whose prompts have the same blocks, or begin with the same blocks, have keys in common.
    """
    ids = request.hash_ids
    keys = dict.fromkeys(_key(ids[:end]) for end in _BEGINNINGS if ids[:end])
    return RequestFeatures(request.prompt_tokens, request.max_tokens, tuple(keys))


def _key(ids: tuple[int, ...]) -> int:
    digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def past_requests(requests: Iterable[TraceRequest], *, token_s: float = 0.05) -> list[PastRequest]:
    """Return the requests that emitted anything, in the order of their arrival.

    Traces do not say when a request ended; that is taken to be `token_s` a token after its arrival.
    """
    return [
        PastRequest(
            arrival_s=request.arrival_ns / _NS_PER_S,
            finished_s=request.arrival_ns / _NS_PER_S + request.output_tokens * token_s,
            features=features_of(request),
            output_tokens=request.output_tokens,
        )
        for request in requests
        if request.output_tokens
    ]
