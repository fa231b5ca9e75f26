"""Streams that are long enough for engines to come and go meanwhile, and what the admin page shows."""

from typing import Any

from tests.support.site import Exchanged, Site

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 60,
    "ignore_eos": True,
    "stream": True,
}


def body(i: int, **more: Any) -> dict[str, Any]:
    return BODY | {"prompt": f"t{i} u"} | more


def order(site: Site, engine: str) -> dict[str, object]:
    """Return what names an engine to the admin listener."""
    return {"role": engine.partition("/")[0], "url": site.fleet.engine(engine).url}


async def rows(site: Site) -> dict[str, Any]:
    """Return what the admin page says of each engine, by its URL."""
    page = (await site.admin("/admin/instances")).json["instances"]
    return {row["url"]: row for row in page}


async def streaming(site: Site, count: int, **more: Any) -> list[Exchanged]:
    """Begin streams, and wait until each of them has some tokens."""
    exchanges = [site.send(COMPLETIONS, body(i, **more)) for i in range(count)]
    for exchange in exchanges:
        await exchange.until_events(3)
    return exchanges


async def right(site: Site, exchanges: list[Exchanged], **more: Any) -> None:
    """Check that streams end with just what one engine would have said."""
    for i, exchange in enumerate(exchanges):
        await exchange.end()
        assert exchange.done, exchange.body
        alone = await site.ask("decode/0", COMPLETIONS, body(i, **more))
        assert exchange.text == alone.text
