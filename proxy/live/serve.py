"""Running the proxy as a process: uvloop, signals, logs."""

import asyncio
import gc
import logging
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from balanceroute.proxy.live.descriptors import DescriptorWatch, connections_for, raise_limit
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.proxy import Proxy
from balanceroute.proxy.live.renewal import renew
from balanceroute.proxy.live.telemetry.line_writer import LineWriter
from balanceroute.proxy.live.telemetry.process_log import set_up_process_log
from balanceroute.proxy.live.telemetry.request_log import RequestLog

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from balanceroute.proxy.live.security.credentials import Credentials
    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.proxy.live.telemetry.record import RequestRecord

_log = logging.getLogger(__name__)
_FLUSH_S = 2.0


class _NoLog:
    def request_ended(self, record: "RequestRecord") -> None:
        del record


def serve(config: "ProxyConfig", read_credentials: "Callable[[], Credentials]") -> int:
    """Serve until SIGINT or SIGTERM; return the exit status.

    The first signal drains: nothing new is taken, what runs may end. A second one ends it at once.
    SIGHUP opens the logs again, and reads keys and certificates again.

    Args:
        config: All settings.
        read_credentials: Reads its files of keys and certificates again. Raises ConfigError.
    """
    return uvloop.run(_serve(config, read_credentials))


async def _serve(config: "ProxyConfig", read_credentials: "Callable[[], Credentials]") -> int:
    loop = asyncio.get_running_loop()
    stop, now = _await_signals(loop)
    log = config.log
    writer = _make_writer(log.log)
    # Without a sink too: Python itself would write warnings to standard error.
    write = _discard if writer is None else writer.write
    set_up_process_log(write, level=log.log_level, secrets=config.credentials.secrets)
    config, descriptors = _with_descriptors(config)
    loads = None if log.load_log is None else LineWriter(log.load_log, complain=_complain)
    writers = [one for one in (writer, loads) if one is not None]

    def reopen() -> None:
        for one in writers:
            one.reopen()

    loop.add_signal_handler(signal.SIGHUP, reopen)
    environment = Environment(
        log=_NoLog() if writer is None else RequestLog(writer.write),
        rng=random.SystemRandom(),
        unix_s=time.time,  # noqa: TID251 - this is the edge that owns the clock.
        stopwatch=time.perf_counter,
        log_lines_dropped=lambda: sum(one.dropped for one in writers),
        descriptor_shortages=lambda: watch.shortages,
        write_loads=None if loads is None else loads.write,
    )
    proxy = Proxy(config, environment)

    def on_hangup() -> None:
        reopen()
        renew(proxy, read_credentials)

    watch = DescriptorWatch(proxy.listening)
    try:
        await proxy.start()
        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        _settle_garbage_collector()
        _announce(proxy, descriptors)
        await _until(stop, (proxy.watch(), watch.run()))
        _log.info("draining")
        await _until(now, (proxy.drain(),))
        await proxy.close()
    finally:
        for one in writers:
            one.close(timeout_s=_FLUSH_S)
    return 0


def _await_signals(loop: asyncio.AbstractEventLoop) -> tuple[asyncio.Event, asyncio.Event]:
    """Return what the first and the second signal set."""
    stop, now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stop, now


async def _until(event: asyncio.Event, works: "tuple[Coroutine[None, None, None], ...]") -> None:
    """Work until something happens or a work is over; raise what made it fail.

    A proxy that no longer looks after its engines and listeners must not go on.
    """
    tasks = [asyncio.create_task(one) for one in (event.wait(), *works)]
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for task in done:
        task.result()


def _with_descriptors(config: "ProxyConfig") -> "tuple[ProxyConfig, int]":
    """Get file descriptors; return the settings with connections for them, and their number."""
    descriptors = raise_limit()
    engines = len(config.prefillers) + sum(max(1, len(one.ranks)) for one in config.decoders)
    enough = connections_for(descriptors, engines)
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


def _announce(proxy: Proxy, descriptors: int) -> None:
    config, listening = proxy.config, proxy.config.listening
    scheme = "http" if listening.tls_cert is None else "https"
    line = f"listening on {scheme}://{listening.host}:{proxy.server.port}"
    if proxy.admin is not None:
        line += f", admin on http://{listening.admin_host}:{proxy.admin.port}"
    print(line, flush=True)  # noqa: T201 - the command's answer, which scripts wait for.
    _log.info(
        "serving",
        extra={
            "fields": {
                "port": proxy.server.port,
                "prefillers": len(proxy.deployment.instances.prefillers),
                "ranks": len(proxy.deployment.instances.ranks),
                "policy": config.scheduling.policy,
                "descriptors": descriptors,
                "connection_limit": config.limits.connection_limit,
            }
        },
    )


def _settle_garbage_collector() -> None:
    """Keep collections rare and short: what is there now stays, and requests leave few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


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
    """Write nothing."""
    del line
