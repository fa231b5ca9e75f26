"""The folder of several processes, of which others remove parts or all: nothing ends, and who dies comes back."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

import pytest
from tests.live.processes.test_workers import WORKERS, exists, finish, long_streams, processes
from tests.live.served import COMPLETIONS, STREAM, Served, engines, serving

from balanceroute.proxy.live.control.standing import KeepingFile, make_private

if TYPE_CHECKING:
    from tests.live.conftest import MakeExchanged


PATIENCE_S = 55.0  # Only ever waited for by a test that fails.


def all_files(folder: Path) -> None:
    """Remove the socket, the copy of the topology and the orders."""
    names = [one.name for one in folder.iterdir()]
    assert sorted(names) == ["0", "0.orders", "0.toml"]
    for name in names:
        (folder / name).unlink()


async def killed(served: Served, *names: str) -> None:
    """Kill processes, and wait until others are there in their place and the proxy is ready."""
    before = processes(served)
    for name in names:
        os.kill(before[name], signal.SIGKILL)
    while True:
        now = processes(served)
        if len(now) == 3 and not any(now[name] == before[name] for name in names):
            break
        await asyncio.sleep(0.01)
    while (await served.admin.get("/ready")).status != 200:  # noqa: ASYNC110 - none tells.
        await asyncio.sleep(0.01)


@asynccontextmanager
async def ordered(
    make_exchanged: "MakeExchanged", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Served, Path]]:
    """Serve with a topology and an order of an administrator; yield the folder, too."""
    topology, place = tmp_path / "fleet.toml", tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    async with asyncio.timeout(PATIENCE_S), engines() as fleet:
        prefill, decode = fleet.prefill_urls, fleet.decode_urls
        listed = [f'[[prefill]]\nurl = "{url}"\n' for url in prefill]
        listed += [f'[[decode]]\nurl = "{url}"\n' for url in decode]
        topology.write_text("".join(listed))
        flags = [*WORKERS, "--topology", str(topology)]
        async with serving(make_exchanged, prefill, decode, *flags) as served:
            (folder,) = place.iterdir()
            assert (await served.admin.post("/admin/policy", {"policy": "jsq"})).status == 200
            yield served, folder
            for _ in range(4):
                assert (await served.client.post(COMPLETIONS, STREAM)).done
            state = (await served.admin.get("/admin/state")).json["state"]
            assert state["policy"] == "jsq"
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("remove", [all_files, rmtree])
def test_who_dies_after_a_clean_up_comes_back(
    make_exchanged: "MakeExchanged",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    remove: Callable[[Path], None],
) -> None:
    async def main() -> None:
        async with ordered(make_exchanged, tmp_path, monkeypatch) as (served, folder):
            streams = await long_streams(served, 4)
            remove(folder)
            await finish(streams)
            while not (folder / "0.orders").exists():  # noqa: ASYNC110 - none tells.
                await asyncio.sleep(0.01)
            await killed(served, "relay0", "scheduler0")

    asyncio.run(main())


def test_a_new_version_takes_over_after_a_clean_up(
    make_exchanged: "MakeExchanged", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with ordered(make_exchanged, tmp_path, monkeypatch) as (served, folder):
            rmtree(folder)
            while not (folder / "0.orders").exists():  # noqa: ASYNC110 - none tells.
                await asyncio.sleep(0.01)
            old = set(processes(served).values())
            served.process.send_signal(signal.SIGUSR2)
            while any(map(exists, old)):  # noqa: ASYNC110 - they are not our children.
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    make_private(folder)
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="is not a folder of this user alone"):
        make_private(folder)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        make_private(link)
    with pytest.raises(FileNotFoundError):
        make_private(tmp_path / "absent" / "private")


def test_only_a_temporary_file_is_written_again(tmp_path: Path) -> None:
    for is_temporary in (False, True):
        folder = tmp_path / str(is_temporary)
        folder.mkdir()
        keeper = KeepingFile(folder / "orders", is_temporary=is_temporary)
        assert not keeper.retry()
        keeper.write(b"one")
        rmtree(folder)
        # Where a user names a file and removes it, he wants to begin anew.
        assert keeper.read() == (b"one" if is_temporary else b"")
        assert keeper.retry() is is_temporary
        assert folder.exists() is is_temporary
        if is_temporary:
            folder.chmod(0o700)
            assert KeepingFile(folder / "orders").read() == b"one"
