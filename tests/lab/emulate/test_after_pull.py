"""What goes wrong between the pull of a KV cache and the first token."""

import asyncio
from typing import Any

import pytest
from tests.lab.emulate.lab import COMPLETIONS, Exchanged, Lab, emulated

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate.faults import AfterPull, Faults
from balanceroute.proxy.wire.messages import WireFault

VALUES: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 5,
    "ignore_eos": True,
}
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])


async def pulled(lab: Lab, fault: AfterPull, *, streamed: bool, after_s: float = 0.0) -> Exchanged:
    """Return what came, some time after a leg that fails so was sent; the blocks are free by then."""
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    lab.fleet.faults.set("decode/0", after_pull=fault, after_pull_s=after_s)
    exchanged = lab.send("decode/0", COMPLETIONS, leg | {"stream": streamed})
    await asyncio.sleep(0.5)
    assert lab.leases() == {"pulled": 1}
    assert lab.fleet.stats()["held_blocks"] == [0]
    return exchanged


@STREAMED
@emulated()
async def test_a_reset_leaves_an_engine_that_takes_new_connections(
    lab: Lab, streamed: bool
) -> None:
    broken = await pulled(lab, AfterPull.RESET, streamed=streamed)
    assert broken.error is not None
    assert broken.error.kind is WireFault.RESET
    # A stream's head is out before anything is known; another answer has no byte until its end.
    assert (broken.status, broken.body) == (200 if streamed else 0, b"")
    assert lab.fleet.idle
    lab.fleet.faults.clear()
    assert (await lab.post("decode/0", COMPLETIONS, VALUES)).status == 200


@STREAMED
@pytest.mark.parametrize("after_s", [0.0, 30.0])
@emulated()
async def test_an_error_may_come_late(lab: Lab, streamed: bool, after_s: float) -> None:
    failed = await pulled(lab, AfterPull.ERROR, streamed=streamed, after_s=after_s)
    assert failed.done.is_set() == (after_s == 0.0)
    assert lab.fleet.stats()["arriving"][0] == (after_s > 0.0)
    await failed.end()
    if streamed:
        assert failed.status == 200
        assert failed.chunks[0]["error"]["code"] == 500
    else:
        assert failed.status == 500
    assert lab.fleet.idle


@STREAMED
@emulated()
async def test_the_engine_may_die(lab: Lab, streamed: bool) -> None:
    broken = await pulled(lab, AfterPull.DEATH, streamed=streamed)
    assert broken.error is not None
    refused = await lab.post("decode/0", COMPLETIONS, VALUES)
    assert refused.error is not None
    assert refused.error.kind is WireFault.CONNECT
    assert lab.fleet.idle


@STREAMED
@emulated()
async def test_it_may_be_silent_for_ever(lab: Lab, streamed: bool) -> None:
    silent = await pulled(lab, AfterPull.SILENCE, streamed=streamed)
    await asyncio.sleep(600.0)
    assert not silent.done.is_set()
    assert silent.body == b""
    silent.call.abort()
    await asyncio.sleep(0.1)
    assert lab.fleet.idle


@emulated()
async def test_what_is_not_pulled_is_not_harmed(lab: Lab) -> None:
    lab.fleet.faults.set("all", after_pull="reset")
    assert (await lab.post("decode/0", COMPLETIONS, VALUES)).status == 200


@pytest.mark.parametrize("value", ["later", 3, True])
def test_only_known_words_say_what_happens(value: object) -> None:
    with pytest.raises(ConfigError, match=r"after_pull is .* must be one of reset, error, death"):
        Faults().changed({"after_pull": value})


@STREAMED
@emulated(batch_limit=1)
async def test_a_full_batch_holds_requests_that_were_pulled(lab: Lab, streamed: bool) -> None:
    first = lab.send("decode/0", COMPLETIONS, VALUES | {"max_tokens": 900})
    leg = await lab.prefilled(COMPLETIONS, VALUES)
    held = lab.send("decode/0", COMPLETIONS, leg | {"stream": streamed})
    await asyncio.sleep(5.0)
    assert lab.leases() == {"pulled": 1}
    assert lab.fleet.stats()["waiting"][0] == 1
    assert (held.status, held.body) == (200 if streamed else 0, b"")
    await first.end()
    await held.end()
    assert held.status == 200


@emulated()
async def test_a_process_behind_the_url_dies_and_the_url_serves_on(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, VALUES | {"max_tokens": 500})
    exchanged = lab.send("decode/0", COMPLETIONS, leg)
    await asyncio.sleep(0.5)
    lab.fleet.engine("decode/0").lose_process()
    await exchanged.end()
    assert exchanged.error is not None
    assert exchanged.error.kind is WireFault.RESET
    assert lab.leases() == {"pulled": 1}
    assert lab.fleet.idle
    assert (await lab.post("decode/0", COMPLETIONS, VALUES)).status == 200
