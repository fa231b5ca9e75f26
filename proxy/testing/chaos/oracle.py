"""What each request must be answered: the answers of one engine that nothing is wrong with.

The reference engine speaks to nobody else and has room for everything. As the emulated model's text
is decided by the request alone, whatever the proxy and its engines go through must end in the same
answer. What tells engines apart is put out of sight: times, fingerprints, the id's suffix.
"""

import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace

from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import DpMode, EmulationSettings
from balanceroute.proxy.testing.chaos.requests import ClientRequest, with_seed
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.fetch import fetch
from balanceroute.proxy.wire.messages import Response

_TIMEOUT_S = 3_600.0
_MAX_BYTES = 1 << 30
_AT_A_TIME = 64
_CREATED = re.compile(rb'"(created(?:_at)?)":\d+')
# Of a response and its items, and what vouches for thoughts: no two are alike.
_DRAWN = re.compile(rb'"((?:resp|msg|rs|fc|ctc)_|signature":")[0-9a-f]{16,32}"')
_FINGERPRINT = re.compile(rb'"system_fingerprint":"vllm-[^"]*"')


class Oracle:
    """A reference engine.

    Attributes:
        merges: Whether engines may put several tokens into one event.
    """

    def __init__(self, settings: EmulationSettings) -> None:
        self.merges = settings.merged_outputs > 0
        self._fleet = EmulatedFleet(
            replace(
                settings,
                prefillers=0,
                ranks=1,
                dp_mode=DpMode.PORTS,
                batch_limit=10**9,
                rank_kv_tokens=None,
                # As fast as can be: only what is said matters.
                step_base_ns=1,
                step_ns_per_token=0.0,
                prefill_base_ns=0,
                prefill_ns_per_token=0.0,
            ),
            rng=random.Random(0),
        )
        self._endpoint: Endpoint
        self._known: dict[tuple[int, bool, int | None, bool], Response] = {}

    async def start(self) -> None:
        """Start the engine."""
        await self._fleet.start()
        self._endpoint = Endpoint("127.0.0.1", self._fleet.engines[0].port)

    async def learn(self, requests: Sequence[ClientRequest]) -> None:
        """Get the answers to many requests at a time, which real time is short for otherwise."""
        for begin in range(0, len(requests), _AT_A_TIME):
            some = requests[begin : begin + _AT_A_TIME]
            await asyncio.gather(*(self.answer(request) for request in some))

    async def answer(
        self,
        request: ClientRequest,
        *,
        eos_first: bool = False,
        seed: int | None = None,
        as_prefiller: bool = False,
    ) -> Response:
        """Return the answer to a request.

        Args:
            request: The request.
            eos_first: Whether the first token ends it.
            seed: The one that the proxy drew for it.
            as_prefiller: Whether to draw as a prefiller does, which is otherwise without a seed.
        """
        key = request.number, eos_first, seed, as_prefiller
        if key not in self._known:
            body, values = request.body, dict(request.values)
            # With it an engine without a seed draws as a prefiller, and no client may give it.
            steered = values.pop("kv_transfer_params", None) is not None
            if as_prefiller:
                values["kv_transfer_params"] = {"do_remote_decode": True}
            if steered or as_prefiller or seed is not None:
                body = json.dumps(values if seed is None else with_seed(values, seed)).encode()
            self._known[key] = await self._ask(request, body, eos_first=eos_first)
        return self._known[key]

    async def _ask(self, request: ClientRequest, body: bytes, *, eos_first: bool) -> Response:
        self._fleet.faults.set("all", eos_first=float(eos_first))
        return await fetch(
            self._endpoint,
            b"POST",
            request.path.encode(),
            [
                (b"content-type", b"application/json"),
                (b"x-request-id", request.request_id.encode()),
            ],
            body,
            timeout_s=_TIMEOUT_S,
            max_bytes=_MAX_BYTES,
        )

    async def close(self) -> None:
        """Stop the engine."""
        self._endpoint.close()
        await self._fleet.close()


def comparable(body: bytes, request_id: str) -> bytes:
    """Return an answer without what differs between two right answers.

    The id is the request's own, but may have a suffix of eight digits if it was in use.
    """
    body = _CREATED.sub(rb'"\1":0', body)
    body = _DRAWN.sub(rb'"\1-"', body)
    body = _FINGERPRINT.sub(b'"system_fingerprint":"-"', body)
    name = re.escape(request_id.encode())
    own = re.compile(
        rb'"((?:request_)?id)":"((?:(?:chat)?cmpl|generate-tokens)-%b)-[0-9a-f]{8}"' % name
    )
    return own.sub(rb'"\1":"\2"', body)
