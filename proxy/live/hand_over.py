"""An update without a lost request: on SIGUSR2 a new version takes the listening sockets.

The process starts the same command again, which reads the program and the settings as they are now on the
disk. The new process has the listening sockets from the start, and says when it serves. Then the old one
accepts nothing more, lets its connections end, and after that only waits for the new one and passes
signals on to it. So the parent of the first process sees one process with one number, and its end.

This file is also the program that waits: it is run alone, and so imports nothing of the package, and ends
above the imports of what begins a hand-over. They would hold most of its memory, once for each update.
"""

# ruff: noqa: E402

import os
import signal
import sys

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


def hold_signals() -> None:
    """Keep the signals of this process for `wait_in_place`, which acts on them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})


def _wait(pid: int) -> int:
    """Wait for a child and pass signals on to it; return its exit status."""
    hold_signals()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        number = signal.sigwait({*_PASSED_ON, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(pid, number)  # It is there until it is waited for.


if __name__ == "__main__":
    sys.exit(_wait(int(sys.argv[1])))

import asyncio
import json
import logging
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress

_log = logging.getLogger(__name__)
_GIVEN = "BALANCEROUTE_HAND_OVER"
_READY = b"ready\n"
# So long a new version may take to serve: it may have thousands of engines to ask.
_READY_S = 120.0


class Inherited:
    """The sockets, orders and leadership from the process that started this one; none without a hand-over.

    Args:
        environment: Of the process; its entry is removed, so that no other process inherits it.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self.public: list[socket.socket] = []  # Listening sockets for clients.
        self.admin: list[socket.socket] = []  # Those for administrators.
        self.orders = b""  # See `OrderStore`.
        self.led: Mapping[str, object] | None = (
            None  # See `Leadership.hand_over_state`; None if it is alone.
        )
        self._ready: int | None = None
        given = environment.pop(_GIVEN, None)
        if given is None:
            return
        parts = json.loads(given)
        self.public = [socket.socket(fileno=one) for one in parts["public"]]
        self.admin = [socket.socket(fileno=one) for one in parts["admin"]]
        with open(parts["orders"], "rb") as orders:
            self.orders = orders.read()
        self._ready, self.led = parts["ready"], parts["led"]
        for one in (*parts["public"], *parts["admin"], parts["ready"], *_descriptors(self.led)):
            os.set_inheritable(one, False)

    def serves(self) -> None:
        if self._ready is not None:
            with suppress(OSError):  # It may have died.
                os.write(self._ready, _READY)
            os.close(self._ready)
            self._ready = None


class Successor:
    """The process that takes over, once there is to be one.

    Args:
        stop_orders: Refuses orders from now on, and returns when none is being carried out.
        led: Returns `Leadership.hand_over_state`; None if this process is alone.
        failed: Called when it does not, after `stop_orders`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        public: Callable[[], Sequence[int]],
        admin: Callable[[], Sequence[int]],
        stop_orders: Callable[[], Awaitable[None]],
        orders: Callable[[], bytes],
        led: Callable[[], Mapping[str, object] | None],
        serves: Callable[[], object],
        failed: Callable[[], object],
    ) -> None:
        self._command = command
        self._public, self._admin = public, admin
        self._stop_orders, self._orders, self._led = stop_orders, orders, led
        self._serves, self._gives_up = serves, failed
        self._loop = asyncio.get_running_loop()
        self._beginning: asyncio.Task[None] | None = None
        self._sighup = False
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: int | None = None
        self._late: asyncio.TimerHandle | None = None

    @property
    def took_over(self) -> "subprocess.Popen[bytes] | None":
        """The process that serves in place of this one; None while none does."""
        return None if self._starting else self._process

    def begin(self) -> None:
        """Start it; if it has taken over already, have it do so itself."""
        if self._starting:
            _log.warning("a new version is starting already")
        elif self._process is not None:
            self.send(signal.SIGUSR2)
        elif not self._public():
            _log.warning("a new version cannot take over now: nothing is accepted at present")
        else:
            self._sighup = False
            self._beginning = self._loop.create_task(self._begin())

    @property
    def _starting(self) -> bool:
        """Whether there is to be one that does not serve yet."""
        return self._ready is not None or self._beginning is not None

    async def _begin(self) -> None:
        try:
            await self._stop_orders()
            self._ready, its_end = os.pipe()
            try:
                self._start(self._public(), self._admin(), its_end)
            finally:
                os.close(its_end)
        except Exception as error:
            self._failed(str(error))
        else:
            self._loop.add_reader(self._ready, self._read)
            self._late = self._loop.call_later(_READY_S, self._kill)
        finally:
            self._beginning = None

    def send(self, number: signal.Signals) -> None:
        """Pass a signal on to it, if it has taken over; SIGHUP as soon as it has."""
        self._sighup |= number == signal.SIGHUP and self._starting
        if self.took_over is not None:
            self.took_over.send_signal(number)

    def stop(self) -> None:
        """Kill it if it does not serve yet: the proxy ends."""
        if self._beginning is not None:
            self._beginning.cancel()
        if self._ready is not None:
            self._end()

    def _start(self, public: Sequence[int], admin: Sequence[int], its_end: int) -> None:
        if not public:
            raise OSError("nothing is accepted at present")
        with tempfile.TemporaryFile() as orders:
            orders.write(self._orders())
            orders.seek(0)
            led = self._led()
            given = {
                "public": public,
                "admin": admin,
                "ready": its_end,
                "orders": orders.fileno(),
                "led": led,
            }
            self._process = subprocess.Popen(  # noqa: S603 - this very command.
                self._command,
                env=os.environ | {_GIVEN: json.dumps(given)},
                pass_fds=[*public, *admin, its_end, orders.fileno(), *_descriptors(led)],
                # A terminal's signals would reach it twice: by itself, and passed on.
                process_group=0,
            )

    def _read(self) -> None:
        assert self._ready is not None
        if os.read(self._ready, len(_READY)) == _READY:
            self._over()
            _log.info("a new version serves: this one lets its connections end")
            if self._sighup:  # It may have read the files before they changed.
                self.send(signal.SIGHUP)
            self._serves()
        else:
            self._failed("it ended before it served")

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def _end(self) -> None:
        if self._ready is not None:
            self._over()
        if self._process is not None:
            self._process.kill()  # It may have done no more than close its end.
            self._process.wait()
            self._process = None

    def _failed(self, reason: str) -> None:
        self._end()
        fields = {"reason": reason}
        _log.error("the new version does not start: this one stays", extra={"fields": fields})
        self._gives_up()

    def _over(self) -> None:
        if self._late is not None:
            self._late.cancel()
        assert self._ready is not None
        self._loop.remove_reader(self._ready)
        os.close(self._ready)
        self._ready = None


def _descriptors(led: Mapping[str, object] | None) -> list[int]:
    """Return the descriptor of the lock by which a process leads, if it does so."""
    descriptor = None if led is None else led.get("descriptor")
    return [descriptor] if isinstance(descriptor, int) else []


def wait_in_place(process: "subprocess.Popen[bytes]") -> int:  # noqa: RET503 - else it is replaced.
    """Become a small process that waits for another one; return that one's exit status if it has ended.

    `hold_signals` before the loop ends, so that none of them ends this process meanwhile.
    """
    status = process.poll()
    if status is not None:
        return status if status >= 0 else 128 - status
    os.execv(  # noqa: S606 - this very file.
        sys.executable, [sys.executable, "-I", "-S", __file__, str(process.pid)]
    )
