"""The process of a proxy: its logs, its signals, its descriptors, and its end."""

import asyncio
import ctypes
import gc
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.descriptors import DescriptorWatch, connections_for, raise_limit
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.proxy import Proxy
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.telemetry.process_log import LineWriter, set_up_process_log
from balanceroute.proxy.live.telemetry.record import Log, RequestRecord
from balanceroute.proxy.live.telemetry.registry import TOKEN_GAP_BOUNDS_S
from balanceroute.proxy.live.telemetry.request_log import RequestLog
from balanceroute.proxy.wire.http1.pump import LibraryError, Pump, find_library, load_library

_log = logging.getLogger(__name__)
_FLUSH_S = 2.0
# The loop's clock stops while the machine is suspended. Elsewhere than on Linux no clock may go on.
_UPTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# See mallopt(3): free memory at the end of the heap that is kept, and the largest block that is in it.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_KEPT_BYTES = 32 << 20
_MOST_REUSED_BYTES = 4 << 20
# Of the native pump, unless the settings say how many, and streams that it may move.
_MOST_THREADS, _MOST_STREAMS = 8, 65_536
# Engines to have descriptors for where they are still to be found.
_FOUND = 64


class _NoLog:
    def request_ended(self, record: RequestRecord) -> None:
        del record


class Logs:
    """The logs of a process, behind threads of their own.

    Attributes:
        requests: The request log.
        write_loads: Takes a line per sample of the ranks' loads; None for no samples.
    """

    def __init__(self, config: ProxyConfig) -> None:
        log = config.log
        writer = _make_writer(log.log)
        # Without a sink too: Python itself would write warnings to standard error.
        write = _discard if writer is None else writer.write
        secrets = config.credentials.secrets
        set_up_process_log(write, level=log.log_level, secrets=secrets)
        self.requests: Log = _NoLog() if writer is None else RequestLog(writer.write)
        of_loads = None
        if log.load_log is not None:
            of_loads = LineWriter(log.load_log, complain=_complain)
        self.write_loads = None if of_loads is None else of_loads.write
        self._writers = [one for one in (writer, of_loads) if one is not None]

    def dropped(self) -> int:
        return sum(one.dropped for one in self._writers)

    def reopen(self) -> None:
        """Open the files again after they were moved away."""
        for one in self._writers:
            one.reopen()

    def close(self) -> None:
        for one in self._writers:
            one.close(timeout_s=_FLUSH_S)


def make_environment(logs: Logs, shortages: Callable[[], int], pump: Pump | None) -> Environment:
    """Return what a process on a real machine gives the proxy; see `Environment`."""
    return Environment(
        log=logs.requests,
        rng=random.SystemRandom(),
        unix_s=time.time,  # noqa: TID251 - this is the edge that owns the clock.
        stopwatch=time.perf_counter,
        uptime_s=partial(time.clock_gettime, _UPTIME),
        log_lines_dropped=logs.dropped,
        descriptor_shortages=shortages,
        write_loads=logs.write_loads,
        pump=pump,
    )


class Signals:
    """SIGINT and SIGTERM: the first one drains, a second one ends it at once. SIGHUP.

    Attributes:
        stop: Set by the first.
        now: Set by the second.
        on_signal: Called with each of them.
    """

    def __init__(self, on_hangup: Callable[[], None]) -> None:
        self.stop, self.now = asyncio.Event(), asyncio.Event()
        self.on_signal: Callable[[signal.Signals], None] = lambda number: None
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self.on_hangup(on_hangup)

    def on_hangup(self, call: Callable[[], None]) -> None:
        self._loop.add_signal_handler(signal.SIGHUP, call)

    def _on_signal(self, number: signal.Signals) -> None:
        self.on_signal(number)
        (self.now if self.stop.is_set() else self.stop).set()


async def serve_until_signal(proxy: Proxy, watch: DescriptorWatch, signals: Signals) -> None:
    """Serve until a signal, drain until all is over or another one, and close."""
    await until(signals.stop, (proxy.watch(), watch.run()))
    _log.info("draining")
    await until(signals.now, (proxy.drain(),))
    await proxy.close()
    _log.info("stopped")


async def until(event: asyncio.Event, works: tuple[Coroutine[None, None, None], ...]) -> None:
    """Work until something happens or a work is over; raise what made it fail.

    A proxy that no longer looks after its engines and listeners must not go on.
    """
    tasks = [asyncio.create_task(one) for one in (event.wait(), *works)]
    done, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)
    for task in done:
        task.result()


def equip(config: ProxyConfig) -> tuple[ProxyConfig, int, Pump | None]:
    """Get what a process needs of the machine.

    Returns:
        The settings with connections for its descriptors, the number of these, and what moves the ordinary
        events of streams: None without the library.

    Raises:
        ConfigError: The library is required, and cannot be used.
    """
    library = _native_library(config)
    config, descriptors = _with_descriptors(config, pumps=library is not None)
    return config, descriptors, None if library is None else _make_pump(config, library)


def _with_descriptors(config: ProxyConfig, *, pumps: bool) -> tuple[ProxyConfig, int]:
    """Get file descriptors; return the settings with connections for them, and their number."""
    descriptors = raise_limit(pumps=pumps)
    engines = 0
    for one in config.deployments:
        named = len(one.prefillers) + sum(max(1, len(server.ranks)) for server in one.decoders)
        engines += max(named, _FOUND) if one.discovery.discover else named
    enough = connections_for(descriptors, engines, pumps=pumps)
    limit = config.limits.connection_limit
    if limit is None:
        limits = replace(config.limits, connection_limit=enough)
        return replace(config, limits=limits), descriptors
    if limit > enough:
        fields = {"limit": limit, "descriptors": descriptors, "enough_for": enough}
        _log.warning(
            "the connection limit is beyond what the descriptors are enough for",
            extra={"fields": fields},
        )
    return config, descriptors


def _native_library(config: ProxyConfig) -> ctypes.CDLL | None:
    """Return the library that moves streams; None if it is not to be used, or not needed and not there.

    Raises:
        ConfigError: It is required, and cannot be used.
    """
    if config.listening.native == "off":
        return None
    try:
        return load_library()
    except LibraryError as error:
        if config.listening.native == "require":
            raise ConfigError(f"--native require: {error}") from None
        if find_library() is not None:  # Installed, so expected to work.
            _log.warning("streams are moved without the native library: %s", error)
        return None


def _make_pump(config: ProxyConfig, library: ctypes.CDLL) -> Pump | None:
    limit, listening = config.limits.connection_limit, config.listening
    assert limit is not None
    cores = len(os.sched_getaffinity(0))
    try:
        return Pump(
            library,
            threads=listening.native_threads or max(1, min(cores - 1, _MOST_THREADS)),
            slots=min(limit, _MOST_STREAMS),
            high=config.limits.write_buffer_bytes,
            bounds_s=TOKEN_GAP_BOUNDS_S,
        )
    except LibraryError as error:
        if listening.native == "require":
            raise ConfigError(f"--native require: {error}") from None
        _log.warning("streams are moved without the native library: %s", error)
        return None


def settle_memory() -> None:
    """Make memory cost less time, once everything is there that stays."""
    # Collections are rare and short, as requests leave few cycles.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    # GNU's malloc gives memory back as soon as there are 2 MiB at the end of the heap, and the first
    # touch of a page costs more than a copy of what is in it, in a virtual machine many times as much.
    # So what one large body leaves behind is kept for the next one. Other C libraries have no mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MOST_REUSED_BYTES)


def _make_writer(to: str) -> LineWriter | None:
    if to == "none":
        return None
    if to == "-":
        return LineWriter(sys.stderr.fileno())
    return LineWriter(Path(to), complain=_complain)


def _complain(message: str) -> None:
    """Say on standard error what the log cannot say."""
    with suppress(OSError):  # Standard error may be closed, and the log's thread must live on.
        print(f"balanceroute: {message}", file=sys.stderr, flush=True)  # noqa: T201 - not to the log.


def _discard(line: bytes) -> None:
    del line
