"""Running engines compared with a topology and with each other: `balanceroute topology check --online`.

Of each engine three pages are read: /version, /v1/models and /metrics. No request reaches a model.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.engines.engine_facts import EngineFacts, doubts, facts_of, misfits
from balanceroute.proxy.live.engines.engine_gauges import (
    MAX_PAGE_BYTES,
    KvSigns,
    MetricsPageError,
    cache_configs,
    kv_signs,
    kv_tokens_of,
)
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.engines.model_list import ServedModel
from balanceroute.proxy.live.engines.pairing import VersionPage
from balanceroute.proxy.live.engines.served_models import ModelsPageError, parse_models
from balanceroute.proxy.live.security.tls import engine_context
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.page_client import PageClient, UnansweredError
from balanceroute.topologies import Finding

if TYPE_CHECKING:
    from pathlib import Path

    from balanceroute.proxy.live.engines.engine_url import EngineUrl
    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.topologies import Topology

_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Seen:
    """What one engine says of itself.

    Attributes:
        ranks: The data-parallel ranks that the topology expects behind the address; None if it
            leaves that to the engine.
        named: Those that the proxy names with requests.
        caches: The labels of the KV cache's configuration, one set for each rank.
        signs: What else its metrics tell.
        fault: Why it could not be asked; "" if it was.
    """

    role: str
    url: str
    ranks: int | None = 1
    named: tuple[int, ...] = ()
    version: str = ""
    models: tuple[ServedModel, ...] = ()
    caches: tuple[dict[str, str], ...] = field(default=())
    signs: KvSigns = KvSigns()
    fault: str = ""

    @property
    def facts(self) -> EngineFacts:
        """What is compared with other engines."""
        return facts_of(self.version, self.models, self.caches)

    @property
    def kv_tokens(self) -> int | None:
        """KV tokens that a rank holds, the least of its ranks; None if it does not say."""
        sizes = [kv_tokens_of(cache) for cache in self.caches]
        return min((size for size in sizes if size is not None), default=None)


def check_online(topology: "Topology", ca_file: "Path | None" = None) -> tuple[list[Finding], str]:
    """Ask all engines of a topology; return the findings, and the KV memory of the ranks in words.

    Args:
        topology: Of one group.
        ca_file: Verifies their certificates in place of what the topology says.

    Raises:
        ConfigError: Its proxy cannot be configured, or its engines are emulated.
    """
    if topology.emulation is not None:
        raise ConfigError(f"{topology.path}: --online: its engines are emulated")
    config = make_config(topology, {}, environment=os.environ)
    seen = asyncio.run(_look_at_all(config, _client(config, ca_file)))
    return [*judge(topology, config.engines.connector, seen)], _memory(config, seen)


def judge(topology: "Topology", connector: str, seen: Sequence[Seen]) -> Iterator[Finding]:
    """Yield what does not fit: an engine and the topology, or a prefiller and a decode engine."""
    answered = []
    for one in seen:
        if one.fault:
            yield Finding("error", f"{one.role} {one.url}", one.fault)
        else:
            answered.append(one)
            yield from _judge_one(topology, connector, one)
    prefillers = [one for one in answered if one.role == "prefill"]
    decoders = [one for one in answered if one.role == "decode"]
    reported: set[str] = set()
    for prefill in prefillers:
        for decode in decoders:
            for finding, what in _judge_pair(connector, prefill, decode):
                # One pair stands for all others of the same two values.
                if what not in reported:
                    reported.add(what)
                    yield finding


def _judge_one(topology: "Topology", connector: str, one: Seen) -> Iterator[Finding]:
    key = f"{one.role} {one.url}"
    if topology.models and not one.models:
        yield Finding("error", key, "serves no model")
    told = one.version, one.models, one.signs
    for doubt in doubts(Role(one.role), connector, *told, wanted=topology.models, ranks=one.named):
        yield Finding("note" if doubt.endswith("?") else "error", key, doubt)
    engines = topology.engines
    # vllm-ascend's version is not vLLM's.
    wanted = None if engines is None or engines.device == "npu" else engines.version
    if wanted not in (None, one.version.partition("+")[0]):
        yield Finding("note", key, f"has vLLM {one.version}, the topology is for {wanted}")
    if one.ranks is not None and one.caches and len(one.caches) != one.ranks:
        reason = f"has {len(one.caches)} data-parallel ranks, the topology {one.ranks}"
        yield Finding("error", key, reason)
    longest = max((model.max_model_len or 0 for model in one.models), default=0)
    if one.kv_tokens is not None and one.kv_tokens < longest:
        reason = f"holds {one.kv_tokens:,} KV tokens, less than its max_model_len ({longest:,})"
        yield Finding("note", key, reason)


def _judge_pair(connector: str, prefill: Seen, decode: Seen) -> Iterator[tuple[Finding, str]]:
    key = f"decode {decode.url} and prefill {prefill.url}"
    for one in misfits(connector, prefill.facts, decode.facts):
        yield Finding("error" if one.refused else "note", key, str(one)), one.what
    lengths = {model.name: model.max_model_len for model in prefill.models}
    for model in decode.models:
        ours, theirs = model.max_model_len, lengths.get(model.name, model.max_model_len)
        if ours != theirs:
            what = f"have max_model_len {ours} and {theirs} of {model.name!r}"
            yield Finding("note", key, what), what


def _memory(config: "ProxyConfig", seen: Sequence[Seen]) -> str:
    sizes = [one.kv_tokens for one in seen if one.role == "decode" and one.kv_tokens is not None]
    if not sizes:
        return ""
    least, batch = min(sizes), config.scheduling.batch
    return f"; a decode rank holds {least:,} KV tokens, {least // batch:,} for each of {batch}"


def _client(config: "ProxyConfig", ca_file: "Path | None") -> PageClient:
    key, engines = config.credentials.engine_key, config.engines
    try:
        tls = engine_context(
            ca_file or engines.engine_ca_file, insecure=engines.insecure_engines and not ca_file
        )
    except ConfigError as error:
        raise ConfigError(f"--ca-file {error}") from None
    return PageClient(
        tls,
        timeout_s=2 * config.times.connect_timeout_s,
        bearer=None if key is None else key.value,
    )


async def _look_at_all(config: "ProxyConfig", client: PageClient) -> list[Seen]:
    seen: dict[tuple[str, EngineUrl], Seen] = {}
    for prefill in config.prefillers:
        seen["prefill", prefill.url] = Seen("prefill", prefill.url.base, None)
    for server in config.decoders:
        named = () if server.discover else server.rank_ids or ()
        ranks = None if server.discover else len(server.rank_ids or (0,))
        seen["decode", server.url] = Seen("decode", server.url.base, ranks, named)
    turns = asyncio.Semaphore(_AT_ONCE)

    async def look(one: Seen) -> Seen:
        async with turns:
            return await _look_at(pages, one)

    async with client as pages:
        return await asyncio.gather(*map(look, seen.values()))


async def _look_at(pages: PageClient, one: Seen) -> Seen:
    page = "/version"
    try:
        version = msgspec.json.decode(
            await pages.page(one.url + page, max_bytes=1 << 16), type=VersionPage
        ).version
        page = "/v1/models"
        models = parse_models(await pages.page(one.url + page, max_bytes=1 << 20))
        page = "/metrics"
        metrics = await pages.page(one.url + page, max_bytes=MAX_PAGE_BYTES)
        caches, signs = tuple(cache_configs(metrics)), kv_signs(metrics)
    except (
        UnansweredError,
        ModelsPageError,
        MetricsPageError,
        ValueError,
        RecursionError,
    ) as error:
        return replace(one, fault=f"{page}: {error}")
    return replace(one, version=version, models=models, caches=caches, signs=signs)
