"""The shared state of a fleet's engines."""

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from balanceroute.proxy.lab.emulate.barrier import Barrier
from balanceroute.proxy.lab.emulate.exchange import EngineExchange
from balanceroute.proxy.lab.emulate.leases import KvPeer, LeaseBook
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.lab.emulate.tokens import AnswerLengths
from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.messages import WireError


@dataclass(slots=True)
class EngineCall:
    exchange: EngineExchange
    request_id: str  # The id of the answer, which carries the client's `X-Request-Id`.
    suffix: str  # Makes the id unique inside the engine.
    rank: int  # Which of the engine's ranks serves it.
    length_name: str  # The id by which the length of its answer may be known.
    arrived_s: float  # When the request had arrived, on the event loop's clock.
    drop_kv: bool = False  # Leave `kv_transfer_params` out of the answer.
    alien_kv: bool = False  # Answer with those of another request.
    session: str = ""  # Its name in KV cache events; empty for none.

    @property
    def kv(self) -> Mapping[str, Any]:
        """`kv_transfer_params`, empty if there are none."""
        return self.exchange.request.kv or {}

    @property
    def name(self) -> str:
        """The client's `X-Request-Id`."""
        return self.request_id.partition("-")[2]

    @property
    def remote_decode(self) -> bool:
        """Whether a decoder will pull the KV cache."""
        return self.kv.get("do_remote_decode") is True

    @property
    def remote_prefill(self) -> bool:
        """Whether the KV cache comes from a prefiller."""
        return self.kv.get("do_remote_prefill") is True

    def external_id(self, prompt: int) -> str:
        """Return the id of one of the prompts, as a proxy can derive it."""
        chat = self.exchange.request.chat
        return self.request_id if chat else f"{self.request_id}-{prompt}"

    def internal_id(self, prompt: int) -> str:
        return f"{self.external_id(prompt)}-{self.suffix}"


# Posts JSON to another server: from a decode rank to the metaserver.

_LOG = logging.getLogger(__name__)
_TRIES = 3  # As vllm-ascend's layerwise connector.
# The metaserver may answer only when the prefill is done.
_TIMEOUT_S = 3_600.0
_MAX_BYTES = 1 << 20
_PORTS = {"http": 80, "https": 443}


class HttpPoster:
    """Posts JSON over HTTP, or over HTTPS to servers with a certificate of `trust`; None for all."""

    def __init__(self, trust: ssl.SSLContext | None = None) -> None:
        self._trust = trust
        self._endpoints: dict[tuple[str, str, int], Endpoint] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def post(self, url: str, body: bytes) -> None:
        """Post `body`, with retries if there is no answer."""
        task = asyncio.get_running_loop().create_task(self._post(url, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for endpoint in self._endpoints.values():
            endpoint.close()

    async def _post(self, url: str, body: bytes) -> None:
        parts = urlsplit(url)
        try:
            address = parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            _LOG.warning("no metaserver at %r", url)
            return
        if address not in self._endpoints:
            secure = parts.scheme == "https"
            self._endpoints[address] = Endpoint(*address[1:], ssl=self._tls() if secure else None)
        target = (parts.path or "/").encode()
        headers = [(b"content-type", b"application/json")]
        for _ in range(_TRIES):
            try:
                await fetch(
                    self._endpoints[address],
                    b"POST",
                    target,
                    headers,
                    body,
                    timeout_s=_TIMEOUT_S,
                    max_bytes=_MAX_BYTES,
                )
            except WireError as error:
                _LOG.warning("the metaserver %s did not answer: %s", url, error)
            else:
                return

    def _tls(self) -> ssl.SSLContext:
        if self._trust is None:
            self._trust = ssl.create_default_context()
            self._trust.check_hostname = False
            self._trust.verify_mode = ssl.CERT_NONE
        return self._trust


@dataclass(slots=True)
class Hub:
    settings: EmulationSettings
    rng: random.Random  # For ids and faults.
    epoch_s: float  # Unix time at 0 of the event loop's clock.
    barrier: Barrier
    poster: HttpPoster
    # Returns status and JSON of a request below `/emulation`, by method, path below it, and body.
    control: Callable[[bytes, str, bytes], tuple[int, object]]
    book: LeaseBook = field(default_factory=LeaseBook)
    sources: list[KvPeer] = field(default_factory=list)  # The prefillers, including dead ones.
    # The lengths of the answers to named requests.
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _date: tuple[int, bytes] = (-1, b"")

    @property
    def unix_s(self) -> int:
        return int(self.epoch_s + self.loop.time())

    def date(self) -> bytes:
        now = self.unix_s
        if self._date[0] != now:
            self._date = now, formatdate(now, usegmt=True).encode()
        return self._date[1]

    def hexadecimal(self, digits: int) -> str:
        return f"{self.rng.getrandbits(4 * digits):0{digits}x}"

    def uuid(self) -> str:
        """Return a random id, in the form of vLLM's engine ids."""
        return str(UUID(int=self.rng.getrandbits(128), version=4))
