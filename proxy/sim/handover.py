"""The way of a request to its rank: its KV cache is transferred, or the rank computes the prompt.

A KV transfer takes e + f x KV tokens. A rank takes d for each token of a prompt that it computes, as a
prefill server does. Those in its own prefix cache it neither pulls nor computes: of prompts, and where the
trace names conversations, of the answer that the next turn's prompt repeats.
"""

from collections.abc import Sequence
from functools import partial

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.sim.decode_fleet import DecodeFleet
from balanceroute.proxy.sim.loop import EventLoop
from balanceroute.proxy.sim.prefill_fleet import PrefillModel
from balanceroute.proxy.sim.prefix_cache import PrefixCache
from balanceroute.traces import TraceRequest


class Handover:
    """Gives requests to a fleet.

    Args:
        fleet: The ranks.
        loop: Virtual time.
        transfer_ns: e and f.
        prefill: Of the prefill servers; None if there are none.
        cache_tokens: Size of each rank's prefix cache; None for none.
    """

    def __init__(
        self,
        fleet: DecodeFleet,
        loop: EventLoop,
        *,
        transfer_ns: tuple[int, float],
        prefill: PrefillModel | None,
        cache_tokens: Sequence[int | None],
    ) -> None:
        self._fleet = fleet
        self._loop = loop
        self._transfer_ns = transfer_ns
        self._prefill = prefill
        size = 1 if prefill is None else prefill.block_tokens
        self._caches = [
            None if tokens is None else PrefixCache(tokens // size, size) for tokens in cache_tokens
        ]
        self._block_tokens = size
        # By conversation: its rank, and the latest turn.
        self._turns: dict[str, tuple[RankId, TraceRequest]] = {}

    def send(
        self, request: RequestId, rank: RankId, trace: TraceRequest, *, emitted: int, local: bool
    ) -> int:
        """Send a request to a rank; return the KV tokens that are transferred.

        Args:
            request: The request.
            rank: Its rank.
            trace: What it is.
            emitted: Tokens that it emitted before.
            local: Whether the rank computes the prompt.
        """
        kv_tokens = trace.prompt_tokens + emitted
        cached = self._cached(rank, trace)
        token_ns = 0.0 if self._prefill is None else self._prefill.ns_per_token
        base_ns, each_ns = self._transfer_ns
        pulled = 0 if local else kv_tokens - cached
        transfer_ns = 0 if local else base_ns + round(each_ns * pulled)
        submit = partial(
            self._fleet.submit,
            request,
            rank,
            kv_tokens=kv_tokens,
            output_tokens=trace.output_tokens - emitted,
            compute_ns=round(token_ns * (kv_tokens - cached)) if local else 0,
        )
        if transfer_ns:
            self._loop.call_at(self._loop.now_ns + transfer_ns, submit)
        else:
            submit()
        return pulled

    def _cached(self, rank: RankId, trace: TraceRequest) -> int:
        """Return how many tokens of a prompt a rank has; it has all of them from now on."""
        cache, size = self._caches[rank], self._block_tokens
        if cache is None:
            return 0
        cached = cache.use(trace.hash_ids, trace.prompt_tokens)
        if not trace.session:
            return cached
        home, before = self._turns.get(trace.session, (rank, trace))
        self._turns[trace.session] = rank, trace
        if home != rank or before is trace or cached < before.prompt_tokens // size * size:
            return cached
        held = before.prompt_tokens + before.output_tokens
        return max(cached, min(held, trace.prompt_tokens - 1) // size * size)
