"""`balanceroute serve --http2` as a process: the same answers as over HTTP/1.1, in cleartext and over TLS; drain."""

import asyncio
import signal
import ssl
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.extended import usually
from tests.live.served import COMPLETIONS, STREAM, engines, play, serving
from tests.support.certificate import make_certificate

pytest.importorskip("h2", reason="needs the extra h2")
# Of each answer its own, or of one protocol alone.
ADMIN = {"authorization": "Bearer secret"}
OWN = {"x-request-id", "transfer-encoding", "date", "connection"}


def test_nothing_of_http2_is_loaded_where_it_is_off() -> None:
    program = """
import sys
import balanceroute.proxy.live.serve, balanceroute.proxy.live.settings.configure, balanceroute.proxy.lab.replay.driver
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("h2", "hpack") or "http2" in name))
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == []


def steady(answer: httpx.Response) -> tuple[int, set[str], str]:
    """Return what is the same of two answers."""
    fields = set(answer.headers) - OWN
    lines = [line for line in answer.text.split("\n") if '"created"' not in line]
    return answer.status_code, fields, "\n".join(lines)


@pytest.mark.parametrize("tls", usually([True], [False, True]))
def test_http2_gives_the_answers_of_http1(tmp_path: Path, tls: bool) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("secret")
    flags, trusting = ["--http2", "--admin-token-file", str(token), "--control-on-api-port"], None
    if tls:
        cert, key = make_certificate(tmp_path)
        flags += ["--tls-cert", str(cert), "--tls-key", str(key)]
        trusting = ssl.create_default_context(cafile=str(cert))
    asked: list[dict[str, Any]] = [
        *(STREAM | {"stream": False, "prompt": f"t{n}", "seed": n} for n in range(8)),
        *(STREAM | {"prompt": f"t{n}", "seed": n, "max_tokens": 9} for n in range(8)),
        *({"model": "other"}, {"model": "tiny", "prompt": 7}),
        STREAM | {"prompt": "t1 " * 200_000, "max_tokens": 3},  # Larger than the windows.
    ]

    async def main() -> None:
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(engines())
            served = await stack.enter_async_context(
                serving(fleet.prefill_urls, fleet.decode_urls, *flags, context=trusting)
            )
            public, _ = served.ports()
            url = f"http{'s' if tls else ''}://localhost:{public}"
            verify = True if trusting is None else trusting
            old, new = [
                await stack.enter_async_context(
                    httpx.AsyncClient(
                        base_url=url, http1=not http2 or tls, http2=http2, verify=verify, timeout=60
                    )
                )
                for http2 in (False, True)
            ]
            answers = await asyncio.gather(*(new.post(COMPLETIONS, json=one) for one in asked))
            assert {answer.http_version for answer in answers} == {"HTTP/2"}
            for values, answer in zip(asked, answers, strict=True):
                one = await old.post(COMPLETIONS, json=values)
                assert one.http_version == "HTTP/1.1"
                assert len(answer.text) == len(one.text)
                assert steady(answer) == steady(one)
            for path in ("/pause?engines=false", "/is_paused", "/resume?engines=false"):
                method = "GET" if path == "/is_paused" else "POST"
                for client in (old, new):
                    told = await client.request(method, path, headers=ADMIN)
                    assert told.status_code == 200
                    assert (await client.request(method, path)).status_code == 401
            served.process.send_signal(signal.SIGTERM)
            await new.aclose()
            await old.aclose()
            assert (await served.exit())[0] == 0

    play(main())


def test_where_it_is_off_who_begins_with_it_is_refused() -> None:
    async def main() -> None:
        async with (
            engines() as fleet,
            serving(fleet.prefill_urls, fleet.decode_urls) as served,
        ):
            public, _ = served.ports()
            url = f"http://localhost:{public}"
            async with httpx.AsyncClient(base_url=url, http1=False, http2=True) as client:
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.get("/health")

    play(main())
