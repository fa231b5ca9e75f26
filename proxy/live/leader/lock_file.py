"""A file on shared storage as the place where replicas agree on who leads: the process that has locked it.

The lock is that of flock(2), which the kernel, or the server of an NFS, takes from a process that ended.
Rules:

- The leader writes its name through the lock again and again. A lock that a server has taken away
  (NFSv4, after a partition) makes the write fail, and one that takes too long does not count.
- A lock on a file that is no longer the one at its path is none: other processes see another file.
- A file that was at its path for less than a term, as seen here, may have replaced one that another
  process has still locked and not looked at since. Its lock counts once a term has passed.
"""

import fcntl
import os
import threading
from collections.abc import Callable
from math import inf
from pathlib import Path

from balanceroute.proxy.live.leader.leadership import LeaderError
from balanceroute.proxy.live.prediction import InThread

_MOST_BYTES = 256


class LockFile:
    """One file; see `LeaderStore`.

    Args:
        path: The file; it need not be there, but its folder.
        duration_s: How long a term is.
        clock: Seconds, of one's own.
        in_thread: Runs what may wait for a disk.
        descriptor: Has the lock already, from the process that this one takes over from; None for none.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        duration_s: int,
        clock: Callable[[], float],
        in_thread: InThread,
        descriptor: int | None = None,
    ) -> None:
        self.name, self.handed_over, self.due_s = name, False, inf
        self._path, self._duration_s = path, duration_s
        self._clock, self._in_thread = clock, in_thread
        self._locked = descriptor
        self._file: tuple[int, int] | None = None  # Which one is at the path,
        self._since_s = -inf if descriptor is not None else inf  # and since when, as seen here.
        if descriptor is not None:
            self._file = _which(os.fstat(descriptor))
        self._guard = threading.Lock()
        self._busy = self._closes = False  # Whether a thread uses it, which is to close it.
        self._leads = False
        self._writes = 0
        self._result: str | OSError = ""

    @property
    def place(self) -> str:
        return f"lock {self._path}"

    async def claim(self, *, leads: bool) -> str:
        """Lead, or go on leading, if that may be; return who leads. See `LeaderStore.claim`."""
        self._leads = leads
        return await self._run(self._attempt)

    async def look(self) -> str:
        """Return what the leader wrote last if that is this process; see `LeaderStore.look`."""
        words = await self._run(self._read)
        return words if words.split(" ")[0] == self.name else ""

    async def release(self) -> None:
        """Give it up, for all that have it from one another."""
        await self._run(self._unlock)

    def hand_over_state(self) -> dict[str, object]:
        self.handed_over = True
        return {"name": self.name, "descriptor": self._locked}

    def close(self) -> None:
        """Close the file. The lock is a process's that took over, if one did."""
        with self._guard:
            self._closes = self._busy  # Then the thread does, which uses it.
            if not self._busy:
                self._close()

    def _close(self) -> None:
        locked, self._locked = self._locked, None
        if locked is not None:
            os.close(locked)

    def _unlock(self) -> str:
        if self._locked is not None:
            fcntl.flock(self._locked, fcntl.LOCK_UN)
        self._close()
        return ""

    async def _run(self, work: Callable[[], str]) -> str:
        """Return the result of work that may wait for a disk. Raises LeaderError."""
        if self._busy:
            # An NFS may wait for its server for hours; the thread is there until then.
            raise LeaderError("the file system has not answered yet")
        self._busy = True
        await self._in_thread(lambda: self._do(work))
        if isinstance(self._result, OSError):
            raise LeaderError(str(self._result)) from None
        return self._result

    def _do(self, work: Callable[[], str]) -> None:
        try:
            self._result = work()
        except OSError as error:
            if not self._leads:  # Else it may be free before the term ends.
                self._close()
            self._result = error
        finally:
            with self._guard:
                self._busy = False
                if self._closes:
                    self._close()

    def _read(self) -> str:
        opened = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _words(os.pread(opened, _MOST_BYTES, 0))
        finally:
            os.close(opened)

    def _attempt(self) -> str:
        """Lock the file, or look after the lock; return who leads. Raises OSError."""
        if self._locked is None:
            opened = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._note(_which(os.fstat(opened)))
                words = _words(os.pread(opened, _MOST_BYTES, 0))
                os.close(opened)
                return words.split(" ")[0] or "another process"
            except OSError:
                os.close(opened)
                raise
            self._locked = opened
        if _which(os.fstat(self._locked)) != _which(os.stat(self._path)):
            self._close()  # Other processes see another file: it was replaced.
            return ""
        self._note(_which(os.fstat(self._locked)))
        # In this order: a process that reads meanwhile finds a name.
        self._writes += 1
        renewal = f"{self.name} {os.getpid()} {self._writes}\n".encode()
        os.ftruncate(self._locked, os.pwrite(self._locked, renewal, 0))
        os.fsync(self._locked)
        self.due_s = self._since_s + self._duration_s
        return self.name if self._clock() >= self.due_s else ""

    def _note(self, file: tuple[int, int]) -> None:
        if file != self._file:
            self._file, self._since_s = file, self._clock()


def _which(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _words(data: bytes) -> str:
    """Return what a file says, as answers and the log may have it."""
    line = data.split(b"\n")[0].decode("ascii", "replace")
    return "".join(one if one.isprintable() else "?" for one in line)
