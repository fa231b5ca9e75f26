"""Requests of a trace as predictors see them."""

import hashlib
from array import array
from collections.abc import Iterable

from balanceroute.predictors.base import PastRequest, RequestFeatures
from balanceroute.traces import TraceRequest

_NS_PER_S = 1e9
# The whole prompt, then its first blocks, in which conversations and applications differ.
_BEGINNINGS = (None, 4, 2, 1)


def features_of(request: TraceRequest) -> RequestFeatures:
    """Return what is known of a request before it decodes: never its output.

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
