"""The bodies of the next requests, built ahead so that a long prompt delays no request."""

import asyncio
from collections import deque
from collections.abc import Sequence

from balanceroute.proxy.replay.body import Api, request_body
from balanceroute.proxy.replay.prompts import PromptBuilder
from balanceroute.proxy.replay.settings import Lengths
from balanceroute.proxy.replay.workload import PlannedRequest

# Enough for a burst of arrivals, in the memory of a few of the longest prompts.
MAX_BODIES = 64
MAX_BYTES = 32 << 20


class BodyQueue:
    """Bodies in the order of the requests.

    They are built one at a time, each in an iteration of the loop.
    """

    def __init__(
        self,
        requests: Sequence[PlannedRequest],
        prompts: PromptBuilder,
        *,
        api: Api,
        model: str,
        lengths: Lengths,
        request_ids: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._requests = requests
        self._prompts = prompts
        self._api = api
        self._model = model
        self._hidden = lengths is Lengths.HIDDEN
        self._request_ids = request_ids
        self._loop = loop
        self._ready: deque[bytes] = deque()
        self._bytes = 0
        self._built = 0
        self._handle: asyncio.Handle | None = None
        self._build_ahead()

    def take(self) -> bytes:
        """Return the next request's body."""
        body = self._ready.popleft() if self._ready else self._build()
        self._bytes -= len(body)
        self._build_ahead()
        return body

    def close(self) -> None:
        """Stop building."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _build_ahead(self) -> None:
        if self._handle is None and self._wants_more:
            self._handle = self._loop.call_soon(self._build_one)

    def _build_one(self) -> None:
        self._handle = None
        if self._wants_more:  # What was wanted may have been taken since.
            self._ready.append(self._build())
            self._build_ahead()

    @property
    def _wants_more(self) -> bool:
        return (
            self._built < len(self._requests)
            and len(self._ready) < MAX_BODIES
            and self._bytes < MAX_BYTES
        )

    def _build(self) -> bytes:
        request = self._requests[self._built]
        self._built += 1
        body = request_body(
            self._api,
            model=self._model,
            prompt=self._prompts.build(request),
            max_tokens=request.max_tokens if self._hidden else request.output_tokens,
            ignore_eos=not self._hidden,
            # By this the engines know how long the answer is.
            request_id=request.name(self._request_ids) if self._hidden else None,
        )
        self._bytes += len(body)
        return body
