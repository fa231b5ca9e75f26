"""A router that asks the select service which engines take its requests, and moves all bytes itself.

    balanceroute serve --prefill .. --decode .. --select-key-file keys
    python scripts/select_client.py --service http://127.0.0.1:8092 --key-file keys --requests 8 "Why is the sky blue?"

Each request goes four ways: the service names a prefiller, which computes the prompt; the service is told,
and names a rank once one is free; the rank takes the KV cache and streams the answer, of which the service
hears every few tokens; at the end, and when anything fails, the service is told too. The engines speak
vLLM's NIXL connector. It exits 1 if a request failed.
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
FOR_A_RANK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TOLD_EVERY = 16  # Tokens of an answer between two words to the service.
RETRIES = 3  # Of what the service asks to be sent again.


class RefusedError(Exception):
    """The service has no engine for a request."""


class Selecting:
    """Speaks to the select service."""

    def __init__(self, client: httpx.AsyncClient, service: str, key: str) -> None:
        self._client, self._service = client, service.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"}

    async def loads(self, prompt_tokens: int) -> list[dict[str, Any]]:
        """Return what each engine would have with a request; nothing is reserved. Raises RefusedError."""
        answer = await self._call("POST", "/potential_loads", {"isl_tokens": prompt_tokens})
        rows: list[dict[str, Any]] = _told(answer)
        return rows

    async def reserve(self, name: str, prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
        """Return the prefiller of a request; wait as long as the service says while there is none.

        Raises:
            RefusedError: There is none.
        """
        asked = {"selection_id": name, "isl_tokens": prompt_tokens, "max_tokens": max_tokens}
        for _ in range(RETRIES):
            answer = await self._call("POST", "/select_and_reserve", asked)
            if answer.status_code not in (429, 503):
                place: dict[str, Any] = _told(answer)
                return place
            await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
        raise RefusedError(f"there was none {RETRIES} times in a row")

    async def rank(self, name: str, prompt_tokens: int | None) -> dict[str, Any]:
        """Say that the prefill has ended; return the rank, which may take a while. Raises RefusedError."""
        told = {} if prompt_tokens is None else {"isl_tokens": prompt_tokens}
        answer = await self._call("POST", f"/reservations/{name}/prefill_complete", told)
        place: dict[str, Any] = _told(answer)
        return place

    async def emitted(self, name: str, tokens: int) -> None:
        await self._call("POST", f"/reservations/{name}/output_block", {"output_tokens": tokens})

    async def end(self, name: str, tokens: int, failed: str | None = None) -> None:
        """Say that a request is over, and why if it failed."""
        told: dict[str, Any] = {"output_tokens": tokens}
        if failed is not None:
            told["failed"] = failed[:200]
        await self._call("DELETE", f"/reservations/{name}", told)

    async def _call(self, method: str, path: str, told: dict[str, Any]) -> httpx.Response:
        return await self._client.request(
            method, self._service + path, json=told, headers=self._headers
        )


def _told(answer: httpx.Response) -> Any:
    told = answer.json()
    if answer.is_error:
        raise RefusedError(f"{answer.status_code}: {told['error']}")
    return told


def refuse_late(after_s: float, prefiller: dict[str, Any]) -> None:
    """Raise RefusedError if a KV cache was kept too long: it may be another prompt's by now."""
    if after_s > prefiller.get("pull_within_s", inf):
        raise RefusedError("its KV cache was kept too long: send it again")


class Router:
    """Moves completions between clients and the engines that are chosen."""

    def __init__(self, client: httpx.AsyncClient, selecting: Selecting) -> None:
        self._client, self._selecting = client, selecting

    async def complete(self, prompt: str, max_tokens: int) -> AsyncIterator[str]:
        """Yield the pieces of an answer.

        Raises:
            RefusedError: There is no engine for it.
            httpx.HTTPError: An engine fails.
        """
        name = uuid.uuid4().hex
        # Who has no tokenizer estimates; the prefiller counts.
        found = await self._selecting.reserve(name, max(1, len(prompt) // 4), max_tokens)
        tokens, failed = 0, None
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        try:
            kept: dict[str, Any] = {}
            rank, sent_s = found, time.monotonic()
            if found["role"] == "prefill":
                kept, prompt_tokens = await self._prefill(found["endpoint"], name, body)
                rank = await self._selecting.rank(name, prompt_tokens)
                refuse_late(time.monotonic() - sent_s, found)
            async for piece in self._decode(rank, name, body | kept):
                tokens += 1
                if tokens % TOLD_EVERY == 0:
                    await self._selecting.emitted(name, tokens)
                yield piece
        except Exception as error:
            failed = repr(error)
            raise
        finally:
            await self._selecting.end(name, tokens, failed)

    async def _prefill(
        self, endpoint: str, name: str, body: dict[str, Any]
    ) -> tuple[dict[str, Any], int]:
        """Have a prompt computed; return what its rank is to be told, and its tokens."""
        asked = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": FOR_A_RANK}
        answer = await self._client.post(
            f"{endpoint}/v1/completions", json=asked, headers={"x-request-id": name}
        )
        answer.raise_for_status()
        told = answer.json()
        return {"kv_transfer_params": told["kv_transfer_params"]}, told["usage"]["prompt_tokens"]

    async def _decode(
        self, rank: dict[str, Any], name: str, body: dict[str, Any]
    ) -> AsyncIterator[str]:
        headers = {"x-request-id": name, "x-data-parallel-rank": str(rank["dp_rank"])}
        url = f"{rank['endpoint']}/v1/completions"
        asked = body | {"stream": True}
        async with self._client.stream("POST", url, json=asked, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data in (line, "[DONE]"):
                    continue
                for choice in json.loads(data)["choices"]:
                    yield choice["text"]


async def run(
    service: str, key: str, prompts: list[str], max_tokens: int, *, loads: bool = False
) -> int:
    """Send prompts all at once and print their answers; return how many failed.

    With `loads`, first print what each engine would have with one of them.
    """
    # An answer may wait for a rank, so nothing but the connection has a time limit here.
    timeout = httpx.Timeout(None, connect=5.0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
        selecting = Selecting(client, service, key)
        router = Router(client, selecting)
        if loads:
            for row in await selecting.loads(max(1, len(prompts[0]) // 4)):
                print(json.dumps(row), file=sys.stderr)

        async def answer(prompt: str) -> str:
            return "".join([piece async for piece in router.complete(prompt, max_tokens)])

        answers = await asyncio.gather(*map(answer, prompts), return_exceptions=True)
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
    parser.add_argument("--loads", action="store_true")
    given = parser.parse_args()
    key = given.key_file.read_text().split()[0]
    prompts = [given.prompt] * given.requests
    work = run(given.service, key, prompts, given.max_tokens, loads=given.loads)
    return 1 if asyncio.run(work) else 0


if __name__ == "__main__":
    sys.exit(main())
