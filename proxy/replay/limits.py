"""The limits that clients set: what a replay sends as `max_tokens` where lengths are hidden.

No published trace records what clients sent. Many send no limit at all (the OpenAI client's and
LangChain's default, the latter since it dropped its 256), others a round number, often a framework's
default: 256, 512, 1024, 2048, 4096. `SHARES` is our assumption of their shares. A limit depends on the
seed and the request's number alone, so it says nothing about the length of the answer. An answer that
was recorded longer than its limit is cut there, as it would have been.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from balanceroute.proxy.replay.body import Api
from balanceroute.proxy.replay.workload import PlannedRequest
from balanceroute.traces import TraceRequest

SHARES: Mapping[int | None, int] = {None: 50, 4096: 20, 2048: 10, 1024: 10, 512: 5, 256: 5}
"""How many of a hundred clients set which limit; None is no limit."""

_CLIENTS = [limit for limit, share in SHARES.items() for _ in range(share)]
_LARGEST = max(limit for limit in SHARES if limit is not None)


def with_limits(requests: Iterable[PlannedRequest], *, seed: int, api: Api) -> list[PlannedRequest]:
    """Give every request the limit of some client.

    Args:
        requests: The requests.
        seed: Another seed draws other limits.
        api: The endpoint. A completion without `max_tokens` has 16 tokens in vLLM, and a message must
            have it, so there a client without a limit sends the largest.
    """
    return [replace(request, max_tokens=_limit(seed, request.number, api)) for request in requests]


def as_sent(requests: Iterable[PlannedRequest]) -> list[TraceRequest]:
    """Return planned requests as a trace of what is sent, their limits included."""
    return [
        TraceRequest(
            request.arrival_ns,
            request.prompt_tokens,
            request.answer_tokens,
            request.hash_ids,
            request.max_tokens,
        )
        for request in requests
    ]


def _limit(seed: int, number: int, api: Api) -> int | None:
    digest = hashlib.blake2b(f"{seed}/limit/{number}".encode(), digest_size=8).digest()
    limit = _CLIENTS[int.from_bytes(digest, "little") % len(_CLIENTS)]
    if limit is None and api in (Api.COMPLETIONS, Api.MESSAGES):
        return _LARGEST
    return limit
