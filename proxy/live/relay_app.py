"""One relay: the public listener, its sessions, and connections of its own to the engines."""

import asyncio
import logging
import math
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from balanceroute.proxy.live.connectors import make_connector
from balanceroute.proxy.live.engine_connections import EngineConnections
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.frontend.groups import Group, Groups
from balanceroute.proxy.live.frontend.pass_through import PassThrough, PassThroughLimits
from balanceroute.proxy.live.listeners import PublicListener
from balanceroute.proxy.live.processes import from_relay, to_relay
from balanceroute.proxy.live.processes.frames import VERSION
from balanceroute.proxy.live.processes.mirror import Mirror
from balanceroute.proxy.live.processes.relay_records import RelayFailures, RelayPages, RelayRecords
from balanceroute.proxy.live.processes.remote_host import RemoteHost
from balanceroute.proxy.live.processes.stream_counts import StreamCounts
from balanceroute.proxy.live.processes.uplink import Uplink
from balanceroute.proxy.live.request.session_host import SessionContext
from balanceroute.proxy.live.request.stall_watch import StallWatch
from balanceroute.proxy.live.request.suspects import Suspects
from balanceroute.proxy.live.scheduling.sweep_timer import SWEEP_S
from balanceroute.proxy.live.scheduling.unique_tokens import UniqueTokens
from balanceroute.proxy.live.telemetry.decision_failures import DecisionFailures
from balanceroute.proxy.live.telemetry.process_log import redact_too

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.live.engines.instances import Target
    from balanceroute.proxy.live.environment import Environment
    from balanceroute.proxy.live.security.credentials import Credentials
    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.proxy.wire.http1.server import Server

_log = logging.getLogger(__name__)
# So long a client may take to use a connection that it believes to be open, once it is handed over.
_IDLE_S = 2.0


class RelayApp:
    """One relay. `connect` it, `start` it, then `drain` and `close` it.

    Args:
        config: The settings, as the scheduler process has them.
        environment: Its log and its observers are not used: the scheduler process logs.
        place: Its place among the relays.
        digest: Of the settings.

    Attributes:
        host: Its sessions' and its listener's way to the scheduler process.
        public: Its listener.
    """

    def __init__(
        self, config: "ProxyConfig", environment: "Environment", *, place: int, digest: str
    ) -> None:
        loop = asyncio.get_running_loop()
        self._config = config
        self._place, self._digest = place, digest
        self._ends_s = math.inf
        limited = bool(config.credentials.tenants)
        out = Uplink(loop.call_soon, loop.call_later, limited=limited)
        pump = self._pump = environment.pump
        counts = StreamCounts(out.send, lambda: out.behind, pump)
        self.mirror = Mirror(EngineConnections(config, environment.uptime_s), self._quarantined)
        context = SessionContext(
            make_connector(config.engines.connector, callback=config.engines.metaserver_url),
            config.legs,
            config.lease_s,
            clock=loop.time,
            uptime_s=environment.uptime_s,
            call_later=loop.call_later,
            unique=UniqueTokens(environment.rng),
            stalls=StallWatch(SWEEP_S, environment.uptime_s),
            observe_gap=counts.observe_gap,
            max_model_len=self.mirror.models.max_model_len,
            hand_offs={},
            suspects=Suspects(loop.time, key=b""),
            pump=pump,
        )
        failures = DecisionFailures(RelayFailures(out.send), loop.time)
        self.host = RemoteHost(
            self.mirror,
            context,
            failures,
            out,
            counts,
            occupancy=self._occupancy,
            waiting=config.admission.queue_limit,
            limited=limited,
        )
        records = RelayRecords(out.send)
        self.pass_through = PassThrough(
            self.mirror.instances,
            self.host,
            metrics=records,
            retried=records.retried,
            log=records,
            tenancy=self.host.tenancy,
            limits=PassThroughLimits(
                config.scheduling.single_engine_limit, config.admission.queue_limit
            ),
        )
        self.public = PublicListener(
            config,
            Groups([self._group()]),
            metrics=records,
            pages=RelayPages(self.host.questions.ask_page),
            log=records,
            unix_s=environment.unix_s,
            random_bits=environment.rng.getrandbits,
        )

    def connect(
        self,
        write: "Callable[[Sequence[from_relay.FromRelay]], None]",
        behind: "Callable[[], bool]" = lambda: False,
    ) -> None:
        """Speak to a scheduler process.

        Args:
            write: Sends messages as one frame.
            behind: Returns whether those are read too slowly for what can wait.
        """
        suspects = self.host.context.suspects
        hello = from_relay.Hello(VERSION, self._place, self._digest, suspects.key, suspects.tell())
        self.host.uplink.connect(write, hello, behind)

    def gone(self) -> None:
        """Go on without the scheduler process, whose connection is closed, until the next `connect`."""
        self.host.gone()

    def take(self, messages: Sequence[to_relay.ToRelay]) -> None:
        """Take the messages of a frame from the scheduler process."""
        self.host.take(messages)

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen on sockets that are bound, or else at the address of the settings.

        Raises:
            ConfigError: The address cannot be bound.
        """
        await self.public.start(sockets)
        if not self._config.engines.metaserver_url:
            scheme = "http" if self.public.tls is None else "https"
            own = EngineUrl(scheme, self._config.listening.host, self.public.server.port)
            self.host.use_connector(
                make_connector(self._config.engines.connector, callback=own.base)
            )

    def servers(self) -> "list[Server]":
        """Return what listens."""
        return [self.public.server]

    def renew(self, read: "Callable[[], Credentials]") -> dict[str, object]:
        """Read keys and the certificate again and use them; see `ControlPlane.renew`.

        Raises:
            ConfigError: One of them is bad; then everything stays.
        """
        credentials = read()
        self.public.load_certificate()
        redact_too(credentials.secrets)
        self.public.use(credentials)
        return {"api_keys": len(credentials.api_keys)}

    async def hand_over(self) -> None:
        """Leave new connections to another process; return when those that are open have ended.

        Or when time is up, which is then up for `drain` too.
        """
        loop, server = asyncio.get_running_loop(), self.public.server
        self._ends_s = loop.time() + self._config.times.drain_timeout_s
        server.hand_over(idle_s=_IDLE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._ends_s):
                # Not at once: who has just connected is not counted yet.
                await asyncio.sleep(_IDLE_S)
                await server.drain()

    async def drain(self) -> None:
        """Take nothing new, and wait until everything that runs has ended or time is up."""
        server = self.public.server
        self.host.draining = True
        decode_first = self.host.context.connector.facts.decode_first
        if not decode_first:
            server.stop_accepting()
        # Else decode ranks call back here until the last request has ended.
        ends_s = asyncio.get_running_loop().time() + self._config.times.drain_timeout_s
        try:
            async with asyncio.timeout_at(min(ends_s, self._ends_s)):
                await self.host.drained()
                server.stop_accepting()
                await server.drain()
        except TimeoutError:
            fields = {"count": len(self.host.sessions), "connections": server.connections}
            _log.warning("cut at shutdown", extra={"fields": fields})

    async def close(self) -> None:
        """End what is left and close every socket."""
        self.host.shut_down()
        self.host.stop()
        self.mirror.close()
        self.public.gateway.refusals.log.report()
        self.public.server.close()
        await self.public.server.drain()
        if self._pump is not None:
            self._pump.close()
        self.host.uplink.flush()

    def cut(self) -> None:
        """End as a process ends that is killed: nobody is told anything."""
        self.host.uplink.close()
        self.host.stop()
        self.public.server.close()
        self.mirror.close()

    def _group(self) -> Group:
        config = self._config
        return Group(
            "",
            config.engines.model,
            self.host,
            served=self.mirror.models,
            routes=self.mirror.routes,
            pass_through=self.pass_through,
            tenancy=self.host.tenancy,
            key_is_tenant=config.admission.fair_queue != "none",
        )

    def _quarantined(self, target: "Target") -> None:
        self.pass_through.lost(target)

    def _occupancy(self, lag_s: float) -> from_relay.Occupancy:
        server = self.public.server
        return from_relay.Occupancy(
            server.connections,
            server.limit.rejected,
            server.limit.evicted,
            server.bodies.used,
            server.bodies.rejected,
            sum(endpoint.connections for endpoint in self.mirror.endpoints.values()),
            self.pass_through.in_flight,
            lag_s,
            0 if self._pump is None else self._pump.streams,
            0 if self._pump is None else self._pump.events,
        )
