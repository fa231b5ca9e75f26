"""A proxy that is started before any engine is found."""

import asyncio
import json
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.live.served import ENGINES, Client, Served, command, plain_environment, play

from balanceroute.proxy.lab.emulate import EmulatedFleet


def test_it_says_that_there_are_none_and_that_it_waits(tmp_path: Path) -> None:
    listed, log = tmp_path / "engines.toml", tmp_path / "log"
    listed.write_text("")
    discovery = ["--discover", f"file:{listed}", "--discover-interval-s", "0.1"]

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            *command("--port", "0", "--admin-port", "0", "--log", str(log), *discovery),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=plain_environment(),
        )
        assert process.stdout is not None
        served = Served(process, (await process.stdout.readline()).decode())
        client = Client(served.ports()[0])
        assert (await client.get("/ready")).status == 503
        fleet = EmulatedFleet(ENGINES, rng=random.Random(5))
        await fleet.start()
        urls = [("prefill", *fleet.prefill_urls), ("decode", *fleet.decode_urls)]
        told = [f'[[{role}]]\nurl = "{url}"\n' for role, *each in urls for url in each]
        listed.write_text("".join(told))
        while "the fleet is ready" not in log.read_text():  # noqa: ASYNC110 - of a process.
            await asyncio.sleep(0.01)
        assert (await client.get("/ready")).status == 200
        client.close()
        process.send_signal(signal.SIGTERM)
        assert await served.exit() == (0, "")
        await fleet.close()

    play(main())
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    (serving,) = [line for line in lines if line.get("message") == "serving"]
    assert (serving["prefillers"], serving["ranks"]) == (0, 0)
    waits = [
        line["role"] for line in lines if line.get("message") == "waiting for engines of a role"
    ]
    assert waits == ["decode", "prefill"]
