"""`balanceroute serve` as a process whose disk is full for a while."""

import asyncio
import json
import resource
import signal
from pathlib import Path

from tests.live.served import COMPLETIONS, STREAM, engines, play, serving
from tests.support.played import in_real_time


def test_it_serves_on_and_its_log_has_whole_lines_when_there_is_room_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ["--log", str(log)]

    async def main() -> None:
        async with (
            engines() as fleet,
            serving(fleet.prefill_urls, fleet.decode_urls, *flags) as served,
        ):

            async def logged(count: int) -> None:
                while log.read_bytes().count(b'"request ended"') < count:  # noqa: ASYNC110
                    await asyncio.sleep(0)

            async def dropped() -> int:
                page = (await served.admin.get("/metrics")).body.decode()
                (line,) = [one for one in page.splitlines() if one.startswith(DROPPED)]
                return int(float(line.split()[1]))

            assert (await served.client.post(COMPLETIONS, STREAM)).done
            await logged(1)
            process = served.process.pid
            limits = resource.prlimit(process, resource.RLIMIT_FSIZE)
            # No file may be longer: that of the log has room for a part of a line.
            size = log.stat().st_size + 100
            resource.prlimit(process, resource.RLIMIT_FSIZE, (size, limits[1]))
            while not await dropped():
                assert (await served.client.post(COMPLETIONS, STREAM)).done
            assert log.stat().st_size == size
            resource.prlimit(process, resource.RLIMIT_FSIZE, limits)
            assert (await served.client.post(COMPLETIONS, STREAM)).done
            served.process.send_signal(signal.SIGTERM)
            status, said = await served.exit()
            assert status == 0
            told = said.splitlines()
            assert 1 <= len(told) <= 2  # At first, and at the end.
            for line in told:
                assert line.endswith(f"of the log {log} were dropped: File too large")

    play(main())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    # The first, the one that was cut, and the last at least.
    outcomes = [one["outcome"] for one in lines if "outcome" in one]
    assert len(outcomes) >= 3
    assert set(outcomes) == {"ok"}


DROPPED = "balanceroute_log_lines_dropped_total"


@in_real_time()
async def test_a_log_that_takes_nothing_costs_its_lines_alone() -> None:
    async with (
        engines() as fleet,
        serving(fleet.prefill_urls, fleet.decode_urls, "--log", "/dev/full") as served,
    ):
        for _ in range(3):
            assert (await served.client.post(COMPLETIONS, STREAM)).done
        served.process.send_signal(signal.SIGTERM)
        status, said = await served.exit()
        assert status == 0
        assert "lines of the log /dev/full were dropped: No space left on device" in said
