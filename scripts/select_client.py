"""A router that asks the select service which engines take its requests, and moves all bytes itself.

    balanceroute serve --prefill .. --decode .. --select-key-file keys
    python scripts/select_client.py --service http://127.0.0.1:8092 --key-file keys --requests 8 "Why is the sky blue?"

Each request has four steps. The service names a prefiller, which computes the prompt. The client reports that
to the service, which names a rank once one is free. The rank takes the KV cache and streams the answer, and the
client reports every few tokens. It also reports the end, and any failure. The engines speak vLLM's NIXL
connector. It exits 1 if a request failed.
"""

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path
from typing import Any

import httpx

# What has a prefiller keep its KV cache for a rank.
FOR_A_RANK = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
REPORT_EVERY = 16  # Tokens of an answer between two reports to the service.
RETRIES = 3  # Of what the service asks to be sent again.


class RefusedError(Exception):
    """The service has no engine for a request."""


def refuse_late(after_s: float, prefiller: dict[str, Any]) -> None:
    """Raise RefusedError if a KV cache was kept too long: it may be another prompt's by now."""
    if after_s > prefiller.get("pull_within_s", inf):
        raise RefusedError("its KV cache was kept too long: send it again")


class Router:
    """Moves completions between clients and the engines that the service chooses."""

    def __init__(self, client: httpx.AsyncClient, service: str, key: str) -> None:
        self._client, self._service = client, service.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"}

    async def call(self, method: str, path: str, body: dict[str, Any], tries: int = 1) -> Any:
        """Return what the service says; with more `tries`, wait as long as it asks. Raises RefusedError."""
        answer = await self._client.request(
            method, self._service + path, json=body, headers=self._headers
        )
        if answer.status_code in (429, 503) and tries > 1:
            await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
            return await self.call(method, path, body, tries - 1)
        if answer.is_error:
            raise RefusedError(f"{answer.status_code}: {answer.json()['error']}")
        return answer.json()

    async def complete(self, prompt: str, max_tokens: int) -> AsyncIterator[str]:
        """Yield the pieces of an answer.

        Raises:
            RefusedError: There is no engine for it.
            httpx.HTTPError: An engine fails.
        """
        name = uuid.uuid4().hex
        here, ended = f"/reservations/{name}", {"output_tokens": 0}
        # A client without a tokenizer estimates; the prefiller counts.
        asked: dict[str, Any] = {"isl_tokens": max(1, len(prompt) // 4), "max_tokens": max_tokens}
        asked["selection_id"] = name
        found = await self.call("POST", "/select_and_reserve", asked, RETRIES)
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        failed: dict[str, str] = {}
        try:
            rank = found
            if found["role"] == "prefill":
                sent_s = time.monotonic()
                kept, tokens = await self._prefill(found["endpoint"], name, body)
                # This is the wait for a rank.
                rank = await self.call("POST", f"{here}/prefill_complete", {"isl_tokens": tokens})
                refuse_late(time.monotonic() - sent_s, found)
                body["kv_transfer_params"] = kept
            async for piece in self._decode(rank, name, body):
                ended["output_tokens"] += 1
                if ended["output_tokens"] % REPORT_EVERY == 0:
                    await self.call("POST", f"{here}/output_block", ended)
                yield piece
        except Exception as error:
            failed = {"failed": repr(error)[:200]}
            raise
        finally:
            await self.call("DELETE", here, ended | failed)

    async def _prefill(
        self, endpoint: str, name: str, body: dict[str, Any]
    ) -> tuple[dict[str, Any], int]:
        """Have a prompt computed; return the parameters for its rank, and its tokens."""
        asked = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": FOR_A_RANK}
        answer = await self._client.post(
            f"{endpoint}/v1/completions", json=asked, headers={"x-request-id": name}
        )
        answer.raise_for_status()
        return answer.json()["kv_transfer_params"], answer.json()["usage"]["prompt_tokens"]

    async def _decode(
        self, rank: dict[str, Any], name: str, body: dict[str, Any]
    ) -> AsyncIterator[str]:
        headers = {"x-request-id": name, "x-data-parallel-rank": str(rank["dp_rank"])}
        url, asked = f"{rank['endpoint']}/v1/completions", body | {"stream": True}
        async with self._client.stream("POST", url, json=asked, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data not in (line, "[DONE]"):
                    for choice in json.loads(data)["choices"]:
                        yield choice["text"]


async def run(given: argparse.Namespace) -> int:
    """Send a prompt some times at once and print the answers; return how many failed."""
    # An answer may wait for a rank, so nothing but the connection has a time limit here.
    timeout, limits = httpx.Timeout(None, connect=5.0), httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
        router = Router(client, given.service, given.key_file.read_text().split()[0])
        if given.loads:
            tokens = {"isl_tokens": max(1, len(given.prompt) // 4)}
            for row in await router.call("POST", "/potential_loads", tokens):
                print(json.dumps(row), file=sys.stderr)

        async def answer() -> str:
            return "".join([one async for one in router.complete(given.prompt, given.max_tokens)])

        asked = (answer() for _ in range(given.requests))
        answers = await asyncio.gather(*asked, return_exceptions=True)
    failed = [one for one in answers if isinstance(one, BaseException)]
    for one in answers:
        print(repr(one), file=sys.stderr if one in failed else sys.stdout)
    return len(failed)


def main() -> int:
    """Send a prompt some times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt")
    parser.add_argument("--service", default="http://127.0.0.1:8092")
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--loads", action="store_true", help="tell what each engine would have")
    return 1 if asyncio.run(run(parser.parse_args())) else 0


if __name__ == "__main__":
    sys.exit(main())
