"""An asyncio event loop whose clock jumps from timer to timer.

Rules:
- Nothing ever sleeps. While a callback is ready the clock stands still; when none is, it jumps to
  the next timer.
- Order is total: ready callbacks run first in, first out; timers become ready by (time, sequence
  number). Nothing depends on a hash, an address or the wall clock.
- What only a real machine has (sockets, threads, signals, processes) raises NotImplementedError.
"""

import asyncio
import gc
import heapq
import ipaddress
import math
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple

from tests.support.virtual.addresses import VirtualServer, infos, resolve
from tests.support.virtual.datagrams import DatagramNetwork, VirtualDatagrams
from tests.support.virtual.network import Network

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
P = TypeVar("P", bound=asyncio.BaseProtocol)
D = TypeVar("D", bound=asyncio.DatagramProtocol)

START_S = 1000.0  # Not zero, so that a clock read before it is set, or a falsy time, shows.
LIMIT_S = 7 * 86_400.0
CALLBACKS_PER_INSTANT = 5_000_000
# Cycles are collected at a count of callbacks, see runner.py, and only the young ones: cheap.
CALLBACKS_PER_COLLECTION = 250_000
# Cancelled timers are swept once there are this many and they are half of all (as asyncio does).
SWEEP_AT = 100


class VirtualTimeError(RuntimeError):
    """The loop cannot go on. The message lists the pending tasks and where each one waits."""


class VirtualDeadlock(VirtualTimeError):  # noqa: N818 (it is the name of a state, as in trio)
    """Nothing is ready and no timer is left, yet the awaited future is not done."""


class VirtualLivelock(VirtualTimeError):  # noqa: N818
    """Callbacks keep scheduling callbacks for one instant: the clock would never move again."""


class VirtualTimeLimit(VirtualTimeError):  # noqa: N818
    """The next timer lies past the end of the run: periodic timers hide a deadlock."""


@dataclass(frozen=True, slots=True)
class UnhandledError:
    """What the loop's exception handler was given."""

    time_s: float
    message: str
    exception: BaseException | None


class VirtualTask(asyncio.Task[T]):
    """A task that hashes by its number, so that sets of tasks have a reproducible order.

    asyncio keeps tasks in sets (TaskGroup, wait, all_tasks) and cancels or wakes them in the order
    of the set; by default that is the order of their addresses.
    """

    def __init__(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        number: int,
        loop: asyncio.AbstractEventLoop,
        name: str,
        context: Context | None,
    ) -> None:
        self.number = number  # First: the base class already adds the task to a set.
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number

    __eq__ = object.__eq__


class VirtualTimer(asyncio.TimerHandle):
    """A timer that may be marked as being in the heap, for asyncio's cancel() to report."""

    __slots__ = ()

    _scheduled: bool


def _nothing(_: Context) -> bool:
    return False


def _reads(handle: asyncio.Handle) -> bool:
    """Return whether a handle is a pipe's, and gives a protocol what has arrived."""
    return getattr(getattr(handle, "_callback", None), "__name__", "") == "_arrive"


def _not_emulated(name: str) -> Any:
    def refuse(_loop: "VirtualLoop", *_args: object, **_options: object) -> Any:
        msg = (
            f"VirtualLoop.{name}: a virtual loop has no real sockets, threads, signals or processes"
        )
        raise NotImplementedError(msg)

    return refuse


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module's rules."""

    def __init__(
        self,
        *,
        start_s: float = START_S,
        limit_s: float = LIMIT_S,
        callbacks_per_instant: int = CALLBACKS_PER_INSTANT,
    ) -> None:
        """Make a loop.

        Args:
            start_s: What time() says at first.
            limit_s: A run that goes on longer, in virtual seconds, raises VirtualTimeLimit.
            callbacks_per_instant: More callbacks without the clock moving raise VirtualLivelock.
        """
        super().__init__()
        self._now = start_s
        self._end_s = start_s + limit_s
        # asyncio's own queue, to which its call_soon appends.
        self._ready: deque[asyncio.Handle] = deque()
        self._stopping: bool = False
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._timers_cancelled = 0
        self._sequence = 0
        self._tasks_made = 0
        self._callbacks_per_instant = callbacks_per_instant
        self._instant_began_at = 0
        self._collect_at = CALLBACKS_PER_COLLECTION
        self.callbacks_run = 0  # Callbacks run so far.
        # Every unhandled exception and misuse reported to the loop, in order.
        self.errors: list[UnhandledError] = []
        self._network: Network | None = None
        # What create_datagram_endpoint works on; None for no datagrams.
        self.datagrams: DatagramNetwork | None = None
        # Returns the addresses of each name that there is, or raises socket.gaierror.
        self.names: dict[str, Callable[[], Awaitable[Sequence[str]]]] = {}
        self.held_until_s = -math.inf  # When what stood still last ran again.
        self._holds: Callable[[Context], bool] = _nothing
        self._parked: list[asyncio.Handle] = []

    # Time and callbacks

    def time(self) -> float:
        return self._now

    @property
    def timers(self) -> list[VirtualTimer]:
        return [handle for _, _, handle in self._timers if not handle._cancelled]

    @property
    def pending_timers(self) -> int:
        return len(self._timers) - self._timers_cancelled

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule `callback` in `delay` virtual seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule `callback` at a virtual time; equal times run in the order of the calls."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        if math.isnan(when):
            raise ValueError("a timer at NaN has no place in any order")
        handle = VirtualTimer(when, callback, args, self, context)
        handle._scheduled = True
        heapq.heappush(self._timers, (when, self._sequence, handle))
        self._sequence += 1
        return handle

    def _timer_handle_cancelled(self, handle: VirtualTimer) -> None:
        """Count a cancelled timer; asyncio.TimerHandle.cancel calls this."""
        if handle._scheduled:
            self._timers_cancelled += 1

    def _run_once(self) -> None:
        """Run what is ready now; with nothing ready, jump to the next timer first.

        asyncio's run_forever calls this until stop() was called.
        """
        ready = self._ready
        timers = self._timers
        if not ready and not self._stopping:
            self._jump()
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[2]
            handle._scheduled = False
            if handle._cancelled:
                self._timers_cancelled -= 1
            else:
                ready.append(handle)
        # Callbacks scheduled by these run next time, after timers that they made due.
        batch = len(ready)
        self.callbacks_run += batch
        if self.callbacks_run - self._instant_began_at > self._callbacks_per_instant:
            self._instant_began_at = self.callbacks_run  # Cancelled tasks may still end.
            raise VirtualLivelock(
                f"over {self._callbacks_per_instant} callbacks at virtual time {self._now!r}"
                f"{self._pending()}"
            )
        for _ in range(batch):
            handle_now = ready.popleft()
            if self._holds(getattr(handle_now, "_context")):  # noqa: B009 - typeshed hides it.
                self._parked.append(handle_now)
            elif not handle_now._cancelled:
                handle_now._run()

    def _jump(self) -> None:
        timers = self._timers
        if self._timers_cancelled >= SWEEP_AT and self._timers_cancelled * 2 > len(timers):
            # In place: _run_once holds the list. The keys are unique, so a heap of what is left
            # pops it in the order it had.
            timers[:] = [timer for timer in timers if not timer[2]._cancelled]
            heapq.heapify(timers)
            self._timers_cancelled = 0
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)[2]._scheduled = False
            self._timers_cancelled -= 1
        if not timers:
            raise VirtualDeadlock(
                f"nothing is ready and no timer is set at virtual time {self._now!r}"
                f"{self._pending()}"
            )
        when = timers[0][0]
        if when > self._end_s:
            raise VirtualTimeLimit(
                f"the next timer, at {when!r}, is past the end of the run at {self._end_s!r}"
                f"{self._pending()}"
            )
        if when > self._now:
            self._now = when
            self._instant_began_at = self.callbacks_run
        if self.callbacks_run >= self._collect_at:
            self._collect_at = self.callbacks_run + CALLBACKS_PER_COLLECTION
            gc.collect(1)

    def hold(self, holds: Callable[[Context], bool], seconds: float) -> None:
        """Let nothing run in some contexts for so long, while the rest goes on and time passes.

        Then what came due runs in its order, and behind it what has arrived meanwhile, as in a process
        that was stopped.
        """
        self._holds, self.held_until_s = holds, max(self.held_until_s, self._now + seconds)
        self.call_at(self.held_until_s, self._release, context=Context())

    def _release(self) -> None:
        if self._now >= self.held_until_s:
            self._holds = _nothing
            # As uvloop does: timers, and then what there is to read.
            parked = sorted(self._parked, key=_reads)
            self._ready.extendleft(reversed(parked))
            self._parked.clear()

    def close(self) -> None:
        super().close()
        self._timers.clear()
        self._timers_cancelled = 0

    def extend_limit(self, seconds: float) -> None:
        """Let the run go on until `seconds` from now, if its limit is earlier."""
        self._end_s = max(self._end_s, self._now + seconds)

    # Tasks

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """Make a task, numbered and, without a name, named by this loop alone."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        self._tasks_made += 1
        number = self._tasks_made
        label = f"task-{number}" if name is None else str(name)
        return VirtualTask(coro, number=number, loop=self, name=label, context=context)

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that are not done, in the order of their creation."""
        tasks: list[VirtualTask[Any]] = [
            task for task in asyncio.all_tasks(self) if isinstance(task, VirtualTask)
        ]
        return [*sorted(tasks, key=lambda task: task.number)]

    def _pending(self) -> str:
        tasks = self.pending_tasks()
        if not tasks:
            return "; no task is pending"
        lines = [f"  {task.get_name()}: {_where(task)}" for task in tasks]
        return "; pending tasks:\n" + "\n".join(lines)

    # Errors

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Record what asyncio would log."""
        subject = next(
            (context[key] for key in ("task", "handle", "protocol") if key in context), None
        )
        message = context.get("message") or "unhandled exception"
        if subject is not None:
            message = f"{message}: {subject!r}"
        self.errors.append(UnhandledError(self._now, message, context.get("exception")))

    def set_debug(self, enabled: bool) -> None:
        """Set asyncio's debug mode; from within the loop too, since there is only one thread."""
        self._debug = enabled

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        # asyncio's own goes through call_soon_threadsafe.
        if not self.is_closed():
            self.call_soon(self.create_task, agen.aclose())

    # Network

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 (asyncio's name)
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        """Answer for literal addresses, localhost and `names`.

        Raises:
            socket.gaierror: Any other name.
        """
        del proto, flags
        name = host.decode() if isinstance(host, bytes) else host
        if name in self.names:
            return infos(await self.names[name](), int(port or 0))
        address = ipaddress.ip_address(resolve(name))
        if address.version == 6:
            sockaddr: tuple[Any, ...] = (str(address), int(port or 0), 0, 0)
            found = socket.AF_INET6
        else:
            sockaddr = (str(address), int(port or 0))
            found = socket.AF_INET
        if family not in {0, found}:
            raise socket.gaierror(socket.EAI_FAMILY, f"{name!r} has no address of that family")
        return [(found, type or socket.SOCK_STREAM, socket.IPPROTO_TCP, "", sockaddr)]

    @property
    def network(self) -> Network:
        """What create_server and create_connection work on."""
        if self._network is None:
            raise RuntimeError("this virtual loop has no network: attach(Network(loop, ...))")
        return self._network

    def attach(self, network: Network) -> None:
        """Take a network, which works on this loop."""
        assert self._network is None, "the loop has a network"
        assert network.loop is self, "the network is on another loop"
        self._network = network

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], P],
        host: str | None = None,
        port: int | None = None,
        *,
        ssl: object = None,
        sock: None = None,
        local_addr: tuple[str, int] | None = None,
        **ignored: object,
    ) -> tuple[asyncio.Transport, P]:
        """Connect over the in-memory network; see Network.connect for its faults.

        Raises:
            ConnectionRefusedError: No listener is there, or a rule refuses.
            TimeoutError: Nothing answered for as long as Linux would try.
            NotImplementedError: TLS, or a real socket.
        """
        del ignored
        _refuse_real(ssl, sock)
        if host is None or port is None:
            raise ValueError("a virtual connection needs a host and a port")
        return await self.network.connect(protocol_factory, host, port, local_addr=local_addr)

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: Any = None,
        port: int | None = None,
        *,
        sock: None = None,
        ssl: object = None,
        start_serving: bool = True,
        **ignored: object,
    ) -> VirtualServer:
        """Listen on the in-memory network; port 0 takes the next free port from 20000 on.

        Raises:
            OSError: The address is in use.
            NotImplementedError: TLS, or a real socket.
        """
        del ignored
        _refuse_real(ssl, sock)
        hosts = [host] if host is None or isinstance(host, str) else list(host)
        server = self.network.listen(protocol_factory, hosts, port or 0)
        if start_serving:
            await server.start_serving()
        return server

    async def create_datagram_endpoint(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], D],
        local_addr: tuple[str, int] | None = None,
        remote_addr: tuple[str, int] | None = None,
        **ignored: object,
    ) -> tuple[VirtualDatagrams, D]:
        """Open a socket for datagrams over the links of `datagrams`.

        Raises:
            OSError: The address is in use.
        """
        del ignored
        if self.datagrams is None:
            raise RuntimeError("this virtual loop has no datagrams: set its `datagrams`")
        return self.datagrams.bind(protocol_factory(), local_addr, remote_addr)


# What only a real machine has.
_REAL = """
    call_soon_threadsafe run_in_executor set_default_executor add_reader remove_reader
    add_writer remove_writer add_signal_handler remove_signal_handler getnameinfo
    sock_accept sock_connect sock_recv sock_recv_into sock_recvfrom sock_recvfrom_into
    sock_sendall sock_sendfile sock_sendto sendfile start_tls connect_accepted_socket
    connect_read_pipe connect_write_pipe create_unix_connection
    create_unix_server subprocess_exec subprocess_shell
"""
for _name in _REAL.split():
    setattr(VirtualLoop, _name, _not_emulated(_name))


def _refuse_real(ssl: object, sock: object) -> None:
    if ssl:
        raise NotImplementedError("the virtual network does not emulate TLS")
    if sock is not None:
        raise NotImplementedError("the virtual network does not take real sockets")


def _where(task: asyncio.Task[Any]) -> str:
    """Return the chain of coroutines of a task and the line at which the innermost one waits."""
    inner: Any = task.get_coro()
    names: list[str] = []
    place = ""
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
        if frame is None:
            break
        names.append(frame.f_code.co_qualname)
        place = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    return " > ".join(names) + place
