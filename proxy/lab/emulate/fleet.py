"""An emulated deployment: prefillers and decode ranks in one process, behind real servers."""

import asyncio
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from ssl import SSLContext
from typing import Any

from msgspec import to_builtins

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate.barrier import Barrier, StepCounters
from balanceroute.proxy.lab.emulate.decoder import Decoder
from balanceroute.proxy.lab.emulate.engine import Engine, EngineRole
from balanceroute.proxy.lab.emulate.faults import Faults
from balanceroute.proxy.lab.emulate.generation import Routes
from balanceroute.proxy.lab.emulate.hub import HttpPoster, Hub
from balanceroute.proxy.lab.emulate.leases import LeaseEnd, Misread
from balanceroute.proxy.lab.emulate.prefiller import EmulatedPrefiller
from balanceroute.proxy.lab.emulate.prefix_caches import KvLog, Publish
from balanceroute.proxy.lab.emulate.settings import DpMode, EmulationSettings
from balanceroute.proxy.lab.emulate.tokens import AnswerLengths
from balanceroute.topologies import CONNECTORS, KvFlow

_LOG = logging.getLogger(__name__)


class FaultBoard:
    """Switches faults of engines on and off.

    An engine is chosen by its name ("decode/3"), by its place in the fleet, by its role ("prefill" or
    "decode", for all of them), or as one of "all".
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._tasks: set[asyncio.Task[None]] = set()

    def set(self, engine: str | int, **changes: Any) -> list[str]:
        """Change some faults of some engines; return the engines' names.

        Raises:
            ConfigError: There is no such engine or fault, or the value is invalid.
        """
        chosen = self._chosen(engine)
        for target, faults in [(target, target.faults.changed(changes)) for target in chosen]:
            before, target.faults = target.faults, faults
            self._apply(target, before)
        return [target.name for target in chosen]

    def clear(self, engine: str | int = "all") -> list[str]:
        """Switch all faults of some engines off; return the engines' names.

        Raises:
            ConfigError: There is no such engine.
        """
        chosen = self._chosen(engine)
        for target in chosen:
            before, target.faults = target.faults, Faults()
            self._apply(target, before)
        return [target.name for target in chosen]

    def active(self) -> Mapping[str, Faults]:
        return {target.name: target.faults for target in self._engines if target.faults != Faults()}

    def _chosen(self, engine: str | int) -> list[Engine]:
        chosen = [
            target
            for number, target in enumerate(self._engines)
            if engine in ("all", target.name, target.name.partition("/")[0])
            or (type(engine) is int and engine == number)
        ]
        if not chosen:
            raise ConfigError(f"engine {engine!r} is unknown")
        return chosen

    def _apply(self, engine: Engine, before: Faults) -> None:
        if engine.faults.stopping and not before.stopping:
            engine.abort()
        if engine.faults.frozen is not before.frozen:
            engine.freeze()
        if engine.faults.refuse and not before.refuse:
            engine.refuse()
        elif before.refuse and not engine.faults.refuse:
            task = asyncio.get_running_loop().create_task(self._listen(engine))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _listen(engine: Engine) -> None:
        if not engine.alive:
            return  # A killed one listens when it is restarted.
        try:
            await engine.listen(engine.port)
        except OSError as error:
            _LOG.warning("%s cannot listen again: %s", engine.name, error)


# The `/emulation` endpoints, on every engine's server: measurements, faults and lengths at run time.
#
# GET  /emulation/stats, /emulation/stats/picture, /emulation/faults
# POST /emulation/stats/reset
# POST /emulation/faults {"engine": "decode/3", "hang": true}
# POST /emulation/faults/clear {"engine": "all"}
# POST /emulation/lengths {"replay-1-0": 120, "replay-1-1": 7}
# POST /emulation/kill, /emulation/restore {"engine": "prefill/0"}


class FleetControl:
    """Answers requests under `/emulation`."""

    def __init__(self, fleet: "EmulatedFleet") -> None:
        self._fleet = fleet
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, method: bytes, name: str, body: bytes) -> tuple[int, object]:
        """Return status and JSON of a request."""
        try:
            return 200, self._do(method.decode("latin-1"), name, body)
        except ConfigError as error:
            return 400, {"error": str(error)}

    def _do(self, method: str, name: str, body: bytes) -> object:
        fleet = self._fleet
        match method, name:
            case "GET", "stats":
                return fleet.stats()
            case "GET", "stats/picture":
                return fleet.picture()
            case "POST", "stats/reset":
                fleet.reset_stats()
                return {}
            case "GET", "faults":
                active = fleet.faults.active()
                return {engine: to_builtins(faults) for engine, faults in active.items()}
            case "POST", "faults":
                values = _values(body)
                return {"engines": fleet.faults.set(values.pop("engine", "all"), **values)}
            case "POST", "faults/clear":
                return {"engines": fleet.faults.clear(_values(body).get("engine", "all"))}
            case "POST", "lengths":
                return {"lengths": fleet.lengths.add(_values(body))}
            case "POST", "kill":
                # Not at once: this engine may have to send the answer first.
                engine = fleet.engine(_values(body).get("engine"))
                asyncio.get_running_loop().call_soon(fleet.kill, engine.name)
                return {"engines": [engine.name]}
            case "POST", "restore":
                engine = fleet.engine(_values(body).get("engine"))
                task = asyncio.get_running_loop().create_task(self._restore(engine.name))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return {"engines": [engine.name]}
            case _:
                raise ConfigError(f"{method} /emulation/{name} is unknown")

    async def _restore(self, engine: str) -> None:
        try:
            await self._fleet.restore(engine)
        except OSError as error:
            _LOG.warning("%s cannot be started again: %s", engine, error)


def _values(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body or b"{}")
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("the body is not a JSON object")
    return values


# The first port of vLLM's NIXL side channels; no server listens there.
_SIDE_PORT = 5600
# A default that fits the emulated version; callers pass the real time.
_EPOCH_S = 1_795_000_000.0


class EmulatedFleet:
    """Prefillers and decode ranks with one barrier.

    Args:
        epoch_s: Unix time at 0 of the event loop's clock, for dates in answers.
        publish: With `kv_events`, publishes a prefiller's events; None for no publisher.
        trust: The certificates that ranks accept of an https proxy; None for all.

    Attributes:
        engines: Prefillers, then decode engines; with `DpMode.HEADER` one of these.
        kv_logs: With `kv_events`, those of the prefillers since they began last.
        rank_kv_logs: The same of the ranks, by number; `publish` does not get them.
    """

    def __init__(
        self,
        settings: EmulationSettings,
        *,
        rng: random.Random,
        epoch_s: float = _EPOCH_S,
        publish: Publish | None = None,
        trust: SSLContext | None = None,
    ) -> None:
        self.settings = settings
        self.kv_logs: dict[Engine, KvLog] = {}
        self.rank_kv_logs: dict[int, KvLog] = {}
        self._publish = publish
        self._port = 0
        self.engines: list[Engine] = []
        self._rng = rng
        self._epoch_s = epoch_s
        self._poster = HttpPoster(trust)
        self._prefillers: dict[Engine, EmulatedPrefiller] = {}
        self._hub: Hub
        self.faults: FaultBoard

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Start all engines.

        Raises:
            OSError: An address cannot be bound; nothing is left running.
        """
        settings = self.settings
        self._port = port
        self._hub = Hub(
            settings,
            self._rng,
            self._epoch_s,
            barrier=Barrier(
                settings, ranks=max(1, settings.ranks), rank_kv_tokens=settings.rank_kv_tokens
            ),
            poster=self._poster,
            control=FleetControl(self).handle,
        )
        self.engines = [self._engine(role) for role in self._roles()]
        self._hub.sources.extend(self.engines[: settings.prefillers])
        self.faults = FaultBoard(self.engines)
        try:
            for number, engine in enumerate(self.engines):
                first = len(self.engines) + number
                await engine.start(host, port and port + number, port and port + first)
        except BaseException:
            await self.close()
            raise

    @property
    def prefill_urls(self) -> list[str]:
        return [engine.url for engine in self.engines[: self.settings.prefillers]]

    @property
    def decode_urls(self) -> list[str]:
        """URLs of the decode ranks, with `@rank` if one server has them all."""
        engines = self.engines[self.settings.prefillers :]
        if self.settings.dp_mode is DpMode.PORTS:
            return [engine.url for engine in engines]
        return [f"{engine.url}@{rank}" for engine in engines for rank in engine.role.ranks]

    @property
    def bootstrap_urls(self) -> list[str]:
        urls = [engine.bootstrap_url for engine in self.engines[: self.settings.prefillers]]
        return [url for url in urls if url]

    @property
    def kv_addresses(self) -> list[tuple[str, str]]:
        """Where the prefillers publish their KV cache events, and send them again."""
        publishers = [engine.publisher for engine in self.engines]
        return [(one.events, one.replay) for one in publishers if one is not None]

    @property
    def lengths(self) -> AnswerLengths:
        return self._hub.lengths

    @property
    def idle(self) -> bool:
        """Whether nothing is held: no request, slot, block or lease."""
        return (
            all(engine.idle for engine in self.engines)
            and self._hub.barrier.idle
            and self._hub.book.idle
            and not any(prefiller.pool.used for prefiller in self._prefillers.values())
        )

    def engine(self, name: object) -> Engine:
        """Return an engine by its name ("decode/3") or its place in `engines`.

        Raises:
            ConfigError: There is no such engine.
        """
        for number, engine in enumerate(self.engines):
            if name == engine.name or (type(name) is int and name == number):
                return engine
        known = ", ".join(engine.name for engine in self.engines)
        raise ConfigError(f"engine {name!r} is unknown; known: {known}")

    def kill(self, engine: str | int) -> None:
        """End an engine like a killed process: connections are reset, then refused; all state is lost.

        The rest of its data-parallel group follows.

        Raises:
            ConfigError: There is no such engine.
        """
        self._end(self.engine(engine))

    def _end(self, engine: Engine) -> None:
        engine.kill()
        loop, settings = asyncio.get_running_loop(), self.settings
        for mate in self.group(engine):
            if mate.alive:
                loop.call_later(
                    settings.dp_death_s / settings.time_scale, self._follow, mate, mate.engine_id
                )

    def group(self, engine: Engine) -> list[Engine]:
        """Return the engines of a decode rank's data-parallel group; of a prefiller itself."""
        first, size = self.settings.prefillers, self.settings.dp_size
        place = self.engines.index(engine) - first
        return self.engines[first + place - place % size :][:size] if place >= 0 else [engine]

    @staticmethod
    def _follow(engine: Engine, engine_id: str) -> None:
        """End an engine whose group has ended, unless it was restarted since."""
        if engine.alive and engine.engine_id == engine_id:
            engine.kill()

    async def restore(self, engine: str | int) -> None:
        """Restart a killed engine on its old port, with its data-parallel group: what is left of that ends first.

        Raises:
            ConfigError: There is no such engine.
            OSError: The port is taken.
        """
        target = self.engine(engine)
        if target.alive:
            return
        group = self.group(target)
        for one in group:
            if one.alive:
                one.kill()
        for one in group:
            await one.start(one.host, one.port, one.bootstrap_port)

    async def close(self) -> None:
        for engine in self.engines:
            engine.kill()
        for prefiller in self._prefillers.values():
            prefiller.close()
        self._hub.barrier.close()
        await self._poster.close()
        await asyncio.sleep(0)  # Lost connections are reported in the loop's next iteration.

    @property
    def misreads(self) -> list[Misread]:
        """Requests that were answered with another prompt's KV cache."""
        return self._hub.book.misreads

    @property
    def overruns(self) -> list[str]:
        """Requests of which a decode engine died, as they need more KV blocks than a prefiller kept."""
        return self._hub.book.overruns

    def stats(self) -> dict[str, Any]:
        """Return the measurements since the last reset, and the present state."""
        barrier, book = self._hub.barrier, self._hub.book
        counters, settings = barrier.counters, self.settings
        capacity, steps = counters.capacity_tokens, counters.steps
        prefillers = self.engines[: settings.prefillers]
        waiting = [engine.work for engine in prefillers]
        ranks = [
            state for engine in self.engines[settings.prefillers :] for state in engine.states()
        ]
        return {
            "steps": steps,
            "idle_tokens": counters.idle_tokens,
            "capacity_tokens": capacity,
            "idle_fraction": counters.idle_tokens / capacity if capacity else 0.0,
            "mean_imbalance_tokens": counters.imbalance_tokens / steps if steps else 0.0,
            "output_tokens": counters.output_tokens,
            "busy_s": counters.busy_ns / 1e9,
            "tokens_per_s": 1e9 * counters.output_tokens / counters.busy_ns if steps else 0.0,
            "late_s": counters.late_s,
            "mean_late_s": counters.total_late_s / steps if steps else 0.0,
            "preemptions": counters.preemptions,
            "loads": barrier.loads[: settings.ranks],
            "running": [state.running for state in ranks],
            "waiting": [state.waiting for state in ranks],
            "arriving": [state.arriving for state in ranks],
            "prefill_running": [work.running(0) for work in waiting],
            "prefill_waiting": [work.waiting(0) for work in waiting],
            "held_blocks": [self._prefillers[engine].pool.used for engine in prefillers],
            "leases": {end.value: book.ends[end] for end in LeaseEnd} | {"held": book.held},
            "misses": {end.value: book.misses[end] for end in LeaseEnd},
            "misreads": len(book.misreads),
            "overruns": len(book.overruns),
            "mixed_pairs": book.mixed_pairs,
            "connections": [engine.connections for engine in self.engines],
            "idle": self.idle,
        }

    def picture(self) -> list[list[int]]:
        """Return the loads by step and rank of the first steps since the last reset."""
        ranks = self.settings.ranks
        return [loads[:ranks] for loads in self._hub.barrier.counters.picture]

    def age_leases(self, seconds: float) -> None:
        """Let all leases end that much earlier."""
        self._hub.book.age(seconds)

    def reset_stats(self) -> None:
        self._hub.barrier.counters = StepCounters()
        self._hub.book.ends.clear()
        self._hub.book.misses.clear()
        self._hub.book.misreads.clear()
        self._hub.book.overruns.clear()
        self._hub.book.mixed_pairs = 0

    def _engine(self, role: EngineRole) -> Engine:
        hub = self._hub_of(role)
        return Engine(
            role, hub, begin=self._begin, routes=lambda engine: Routes(engine, hub).answer
        )

    def _hub_of(self, role: EngineRole) -> Hub:
        """Return the hub for an engine, which may serve another model than the rest."""
        names = self.settings.engine_models.get(role.name)
        if names is None:
            return self._hub
        model, *adapters = names
        settings = replace(self.settings, model=model, adapters=tuple(adapters))
        return replace(self._hub, settings=settings)

    def _roles(self) -> list[EngineRole]:
        settings = self.settings
        split: list[tuple[int, ...]] = [(rank,) for rank in range(settings.ranks)]
        if settings.dp_mode is DpMode.HEADER and settings.ranks:
            split = [tuple(range(settings.ranks))]
        has_bootstrap = CONNECTORS[settings.connector].flow is KvFlow.NAMED
        prefillers = [
            EngineRole(
                f"prefill/{i}", (0,), settings.prefiller_kv_tokens, _SIDE_PORT + i, has_bootstrap
            )
            for i in range(settings.prefillers)
        ]
        first = _SIDE_PORT + settings.prefillers
        decoders = [
            EngineRole(f"decode/{i}", ranks, settings.rank_kv_tokens, first + i)
            for i, ranks in enumerate(split)
        ]
        return prefillers + decoders

    def _kv_log(self, engine: Engine) -> KvLog:
        """Return the log of a prefiller that begins, published where its last one was."""
        log = self.kv_logs[engine] = KvLog(self.settings, self._rng)
        if self._publish is not None:
            # Behind the engines and the bootstrap servers.
            first = self._port and self._port + 2 * (len(self.engines) + self.engines.index(engine))
            ports = (first, first and first + 1)
            if engine.publisher is not None:
                last = engine.publisher
                events, replay = (int(one.rpartition(":")[2]) for one in (last.events, last.replay))
                ports = events, replay
            engine.publisher = self._publish(log, engine.host, ports)
        return log

    def _begin(self, engine: Engine) -> EmulatedPrefiller | Decoder:
        """Return the executor behind an engine's server."""
        hub = self._hub
        if engine.name.startswith("prefill/"):
            log = self._kv_log(engine) if self.settings.kv_events else None
            prefiller = self._prefillers[engine] = EmulatedPrefiller(
                hub, engine, engine.counters, log
            )
            return prefiller
        ranks = list(engine.role.ranks)
        logs = [KvLog(self.settings, random.Random(rank)) for rank in ranks]
        self.rank_kv_logs |= zip(ranks, logs, strict=True)
        return Decoder(
            hub,
            ranks,
            peer=engine,
            counters=engine.counters,
            die=partial(self._end, engine),
            logs=logs if self.settings.kv_events else (),
        )
