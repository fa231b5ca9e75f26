"""The supervisor, with small programs in place of the scheduler process and the relays."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.processes.part import Part

# Serves with two relays whatever program it is given, in which PART is what the process is, and
# `note` tells the test. It writes what a process says of itself to its own standard output.
SUPERVISOR = """
import socket, sys, uvloop
from balanceroute.proxy.live.processes.kept_process import StartError
from balanceroute.proxy.live.processes.listening import listen
from balanceroute.proxy.live.processes.supervisor import Supervisor

def commands(path):
    return lambda part: [sys.executable, "-I", "-S", "-c", sys.argv[1], part.word(), sys.argv[2]]

async def main():
    relays = listen("127.0.0.1", 0, copies=2)
    port = relays[0][0].getsockname()[1]
    supervisor = Supervisor(commands, relays, [], drain_s=20.0, hang_s=HANG_S)
    await supervisor.run(lambda: print(port, flush=True))

try:
    uvloop.run(main())
except StartError as error:
    print(error, flush=True)
    sys.exit(error.status)
"""
HEAD = """
import contextlib, json, os, select, signal, socket, sys
part = json.loads(sys.argv[1])
name = part["role"] + str(part.get("relay", 0))
def note(what):
    with open(sys.argv[2], "a") as file:
        file.write(f"{name} {os.getpid()} {what}\\n")
"""
# Says that it is alive, and answers each connection with its number, until it is told to end or its supervisor dies. A relay ends
# also if it is told that another one serves in its place.
SERVES = (
    HEAD
    + """
ends = []
def on_signal(number, _):
    note(signal.Signals(number).name)
    if number == signal.SIGTERM or (number == signal.SIGUSR2 and part["role"] == "relay"):
        ends.append(number)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
    signal.signal(number, on_signal)
woken, wake = socket.socketpair()
wake.setblocking(False)
signal.set_wakeup_fd(wake.fileno())
listeners = [socket.socket(fileno=number) for number in part["listeners"]]
note("begins")
os.write(1, b"ready\\n")
while not ends:
    with contextlib.suppress(OSError):
        os.write(1, b".")
    for one in select.select([0, woken, *listeners], [], [], 0.2)[0]:
        if one == 0:
            told = os.read(0, 1024).decode()
            for line in told.split():
                note("gone:" + line)
            if not told:
                note("orphan")
                ends.append(0)
        elif one is woken:
            woken.recv(100)
        else:
            try:
                client = one.accept()[0]
            except BlockingIOError:  # A process of the other generation was quicker.
                continue
            with client:
                client.sendall(str(os.getpid()).encode())
"""
)
PATIENCE_S = 30.0  # Only ever waited for by a test that fails.


class Supervised:
    """A running supervisor.

    Attributes:
        process: The supervisor's own.
        notes: The file in which its processes note what happens to them.
    """

    def __init__(self, process: asyncio.subprocess.Process, notes: Path) -> None:
        self.process = process
        self.notes = notes
        self.port = 0

    def noted(self, what: str) -> list[tuple[str, int]]:
        """Return the name and number of each process that noted something."""
        if not self.notes.exists():
            return []
        lines = [line.split() for line in self.notes.read_text().splitlines()]
        return [(name, int(pid)) for name, pid, said in lines if said == what]

    async def until_noted(self, what: str, count: int) -> list[tuple[str, int]]:
        while len(found := self.noted(what)) < count:  # noqa: ASYNC110 - other processes write it.
            await asyncio.sleep(0.005)
        return found

    async def ask(self) -> int:
        """Connect; return the number of the process that answers."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = await reader.read()
        writer.close()
        return int(answer)

    async def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()


# Ends as soon as it begins while there is a file NOTES.bad.
FAILS_WHILE_BAD = SERVES.replace(
    'note("begins")',
    'note("begins")\nif os.path.exists(sys.argv[2] + ".bad"): note("fails"); sys.exit(2)',
)


@asynccontextmanager
async def supervised(
    program: str, folder: Path, *, hang_s: float = 60.0, listens: bool = False
) -> AsyncIterator[Supervised]:
    """Run a supervisor; `listens` is whether its log is read."""
    supervisor = SUPERVISOR.replace("HANG_S", str(hang_s))
    notes = folder / "notes"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", supervisor, program, str(notes)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if listens else None,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield Supervised(process, notes)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def serving(
    folder: Path, program: str = SERVES, *, hang_s: float = 60.0, listens: bool = False
) -> AsyncIterator[Supervised]:
    async with supervised(program, folder, hang_s=hang_s, listens=listens) as one:
        assert one.process.stdout is not None
        one.port = int(await one.process.stdout.readline())
        yield one


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until_gone(pids: list[int]) -> None:
    while any(map(exists, pids)):  # noqa: ASYNC110 - they are not our children.
        await asyncio.sleep(0.005)


def test_it_starts_all_passes_signals_on_and_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as one:
            begun = one.noted("begins")
            assert sorted(name for name, _ in begun) == ["relay0", "relay1", "scheduler0"]
            assert await one.ask() in dict(begun).values()
            one.process.send_signal(signal.SIGHUP)
            assert sorted(await one.until_noted("SIGHUP", 3)) == sorted(begun)
            assert await one.end() == 0
            assert sorted(one.noted("SIGTERM")) == sorted(begun)
            await until_gone([pid for _, pid in begun])
            # Nothing is left of the socket between them.
            assert os.listdir(tmp_path) == ["notes"]

    asyncio.run(main())


def test_a_process_that_is_killed_is_replaced_and_nobody_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as one:
            before = dict(one.noted("begins"))
            for name in ("relay0", "scheduler0"):
                os.kill(before[name], signal.SIGKILL)
            answers = await asyncio.gather(*(one.ask() for _ in range(64)))
            after = dict(await one.until_noted("begins", 5))
            assert set(answers) == {after["relay0"], after["relay1"]}
            assert after["relay1"] == before["relay1"]
            assert after["relay0"] != before["relay0"]
            assert after["scheduler0"] != before["scheduler0"]
            assert await one.end() == 0

    asyncio.run(main())


def test_a_process_is_replaced_once_there_are_descriptors_for_it(tmp_path: Path) -> None:
    """All processes ended."""

    async def main() -> None:
        async with serving(tmp_path, listens=True) as one:
            before = dict(one.noted("begins"))
            limits = resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE, (4, limits[1]))
            os.kill(before["relay0"], signal.SIGKILL)
            assert one.process.stderr is not None
            while b"cannot be started again" not in (line := await one.process.stderr.readline()):
                assert line, "the supervisor has ended"
            resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE, limits)
            after = dict(await one.until_noted("begins", 4))
            assert after["relay0"] != before["relay0"]
            assert after["relay1"] == before["relay1"]
            assert one.noted("orphan") == []
            assert await one.end() == 0

    asyncio.run(main())


def test_relays_are_told_which_of_the_others_are_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FAILS_WHILE_BAD) as one:
            before = dict(one.noted("begins"))
            bad = tmp_path / "notes.bad"
            bad.touch()
            os.kill(before["relay0"], signal.SIGKILL)
            told = await one.until_noted("gone:[0]", 1)
            assert set(told) == {("relay1", before["relay1"])}
            nobody = len(one.noted("gone:[]"))
            bad.unlink()
            # The new one is told too: another one may be gone.
            back = await one.until_noted("gone:[]", nobody + 2)
            assert {name for name, _ in back[nobody:]} == {"relay0", "relay1"}
            assert await one.end() == 0

    asyncio.run(main())


def test_a_process_that_stands_still_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, hang_s=1.0) as one:
            before = dict(one.noted("begins"))
            for name in ("relay0", "scheduler0"):
                os.kill(before[name], signal.SIGSTOP)
            await until_gone([before["relay0"], before["scheduler0"]])
            after = dict(await one.until_noted("begins", 5))
            assert after["relay0"] != before["relay0"]
            assert after["scheduler0"] != before["scheduler0"]
            assert await one.ask()
            assert await one.end() == 0

    asyncio.run(main())


def test_a_process_that_served_is_started_until_it_serves_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FAILS_WHILE_BAD) as one:
            bad = tmp_path / "notes.bad"
            bad.touch()
            os.kill(dict(one.noted("begins"))["scheduler0"], signal.SIGKILL)
            await one.until_noted("fails", 2)
            assert await one.ask()
            bad.unlink()
            await one.until_noted("begins", 6)
            assert await one.end() == 0

    asyncio.run(main())


def test_its_processes_do_not_outlive_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as one:
            begun = one.noted("begins")
            one.process.kill()
            assert sorted(await one.until_noted("orphan", 3)) == sorted(begun)
            await until_gone([pid for _, pid in begun])

    asyncio.run(main())


def test_a_new_version_takes_over_without_a_refused_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as one:
            begun = dict(one.noted("begins"))
            old = set(begun.values())
            answers = set()
            one.process.send_signal(signal.SIGUSR2)
            while not one.noted("SIGTERM"):
                answers.add(await one.ask())
            await until_gone(sorted(old))
            new = {pid for _, pid in one.noted("begins")} - old
            assert len(new) == 3
            assert {pid for _, pid in one.noted("SIGUSR2")} == old
            # It has served the old relays until they were gone.
            assert [pid for _, pid in one.noted("SIGTERM")] == [begun["scheduler0"]]
            assert await one.ask() in new
            assert answers <= old | new
            assert await one.end() == 0

    asyncio.run(main())


# Notes what was ordered of it before it began, and has an order after that.
ORDERED = SERVES.replace(
    'note("begins")',
    """
if part["role"] == "scheduler":
    orders = part["path"] + ".orders"
    note("knows:" + open(orders).read() if os.path.exists(orders) else "anew")
    open(orders, "a").write("x")
note("begins")
""",
)


def test_a_new_version_is_told_what_was_ordered_of_the_old_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, ORDERED) as one:
            for known in ("anew", "knows:x", "knows:xx"):
                await one.until_noted(known, 1)
                old = [pid for name, pid in one.noted("begins") if name != "scheduler0"]
                if known != "knows:xx":
                    one.process.send_signal(signal.SIGUSR2)
                    await until_gone(old)
            assert await one.end() == 0

    asyncio.run(main())


def test_a_new_version_that_does_not_start_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, FAILS_WHILE_BAD) as one:
            old = {pid for _, pid in one.noted("begins")}
            bad = tmp_path / "notes.bad"
            bad.touch()
            one.process.send_signal(signal.SIGUSR2)
            failed = await one.until_noted("fails", 1)
            await until_gone([pid for _, pid in failed])
            bad.unlink()
            # The next one does, if the failed one is over; before that the signal is passed over.
            while len({pid for _, pid in one.noted("SIGUSR2")} & old) < 3:
                assert await one.ask()
                one.process.send_signal(signal.SIGUSR2)
            assert await one.end() == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("ends", "status", "line", "starts"),
    [
        # A fault of the user's input is final.
        ("sys.exit(2)", 2, "ended with status 2 before it was ready", 1),
        ("sys.exit(3)", 1, "ended with status 3 before it was ready", 5),
        ("print('what?', flush=True); signal.pause()", 1, "ended by signal 9 before", 5),
    ],
)
def test_a_process_that_does_not_start_ends_all(
    ends: str, status: int, line: str, starts: int, tmp_path: Path
) -> None:
    program = SERVES.replace(
        'note("begins")', f'note("begins")\nif part["role"] == "scheduler": {ends}'
    )

    async def main() -> None:
        async with supervised(program, tmp_path) as one:
            assert one.process.stdout is not None
            said = (await one.process.stdout.readline()).decode()
            assert said.startswith("the process scheduler ")
            assert line in said
            assert await one.process.wait() == status
            begun = one.noted("begins")
            assert len([pid for name, pid in begun if name == "scheduler0"]) == starts
            await until_gone([pid for _, pid in begun])

    asyncio.run(main())


def test_a_part_is_one_word_of_a_command() -> None:
    part = Part(
        "relay", "at", (3, 4), 2, relay=1, others={0: (7,)}, engines={"prefill": ["http://p"]}
    )
    assert Part.read(part.word()) == part
    assert json.loads(part.word())["role"] == "relay"
    assert part.name == "relay-1"
    assert part.inherited == (3, 4, 7)
    assert Part("scheduler", "x", (5,), 2).inherited == (5,)
    with pytest.raises(ConfigError, match=r"--process: .*role"):
        Part.read("{}")
