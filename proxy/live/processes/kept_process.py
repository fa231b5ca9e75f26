"""A process that is started again whenever it ends."""

import asyncio
import logging
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.processes.part import BEAT_S, READY

_log = logging.getLogger(__name__)

# A process that ends so often before it was ever ready will never be.
_STARTS = 5
_READY_S = 60.0
_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 5.0
# One that served for so long is started again at once.
_STEADY_S = 1.0
INPUT_FAULT = 2
"""Exit status for a fault of the user's input, which the process has printed."""


class StartError(BalanceRouteError):
    """A process does not start.

    Attributes:
        status: The exit status of the whole command.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class KeptProcess:
    """Starts a process, and starts it again until it is told to end.

    Args:
        name: For logs.
        command: Returns what to run. Raises OSError: it cannot be run now.
        descriptors: Those that it inherits.
        on_change: Called each time it is ready, or has ended after that.
        hang_s: One that stands still for so long is killed.

    Attributes:
        ready: Whether it serves now.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        descriptors: Sequence[int],
        on_change: Callable[[], None],
        *,
        hang_s: float,
    ) -> None:
        self.name = name
        self.ready = False
        self._command = command
        self._descriptors = descriptors
        self._on_change = on_change
        self._hang_s = hang_s
        self._process: Process | None = None
        self._served = False  # Ever.
        self._hung = False  # Or said something else than that it serves.
        self._ending: signal.Signals | None = None

    @property
    def pid(self) -> int | None:
        """The process's number; None while it does not run."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Keep it running until it ends after `end`.

        Raises:
            StartError: It never served, and ends before it is ready: with a fault of the user's input,
                or several times in a row.
            OSError: It cannot be run at all. If it served before, it is tried again: the machine may lack
                file descriptors, memory or processes for a while.
        """
        failed, pause_s = 0, _BACKOFF_S
        while not self._is_ending():
            began_s = time.monotonic()
            try:
                status, served = await self._once()
            except OSError as error:
                if not self._served:
                    raise
                reason = error.strerror or str(error)
                lack = {"process": self.name, "reason": reason}
                _log.error("a process cannot be started again now", extra={"fields": lack})
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _BACKOFF_MAX_S)
                continue
            if self._is_ending():
                return
            fields = {"ended": self.name, "status": status}
            _log.error("a process ended", extra={"fields": fields})
            # If it served once, others may serve meanwhile: it is started until it does again.
            if not self._served:
                if status != -signal.SIGKILL or self._hung:  # Else somebody else's doing.
                    failed += 1
                if status == INPUT_FAULT or failed == _STARTS:
                    raise StartError(
                        f"the process {self.name} ended {_how(status)} before it was ready",
                        INPUT_FAULT if status == INPUT_FAULT else 1,
                    )
            if served and time.monotonic() - began_s > _STEADY_S:
                pause_s = _BACKOFF_S
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    def end(self) -> None:
        """Tell it to end, and to start no more. A second time, tell it to end at once."""
        self._ending = signal.SIGTERM
        self.send(signal.SIGTERM)

    def hand_over(self) -> None:
        """Tell it that another process serves in its place, and to start no more."""
        self._ending = signal.SIGTERM
        self.send(signal.SIGUSR2 if self.ready else signal.SIGTERM)

    def kill(self) -> None:
        """End it, whatever it does."""
        self._ending = signal.SIGKILL
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def tell(self, word: bytes) -> None:
        """Write to its standard input, if it is ready."""
        if self.ready and self._process is not None:
            pipe = self._process.stdin
            assert pipe is not None
            if not pipe.is_closing():  # It may have ended just now.
                pipe.write(word)

    def _is_ending(self) -> bool:
        return self._ending is not None

    async def _once(self) -> tuple[int, bool]:
        """Run it once; return its exit status, and whether it was ready."""
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command(), stdin=PIPE, stdout=PIPE, pass_fds=self._descriptors
        )
        if self._ending is not None:
            self.send(self._ending)
        try:
            line = await _first_line(process)
            served = line == READY
            self._hung = not served and line != b""
            if served:
                self.ready = self._served = True
                self._on_change()
                await self._until_silent(process)
            elif self._hung:
                self.send(signal.SIGKILL)
            return await process.wait(), served
        finally:
            self.send(signal.SIGKILL)  # If this was cancelled.
            self._process = None
            if self.ready:
                self.ready = False
                self._on_change()

    async def _until_silent(self, process: Process) -> None:
        """Wait until it ends, and kill it if it stands still."""
        assert process.stdout is not None
        silent_s = 0.0
        while silent_s < self._hang_s:
            try:
                async with asyncio.timeout(BEAT_S):
                    said = await process.stdout.read(1024)
            except TimeoutError:
                # Not by the clock: the whole machine may have stood still.
                silent_s += BEAT_S
            else:
                silent_s = 0.0
                if not said:
                    return
        fields = {"hung": self.name, "seconds": silent_s}
        _log.error("a process stands still: it is killed", extra={"fields": fields})
        self.send(signal.SIGKILL)


async def _first_line(process: Process) -> bytes | None:
    """Return the first line that a process writes; None if there is none in time."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_READY_S):
            return await process.stdout.readline()
    except (TimeoutError, ValueError):  # A ValueError is a line without an end.
        return None


def _how(status: int) -> str:
    return f"with status {status}" if status >= 0 else f"by signal {-status}"
