"""The facts that running engines report, for `topology check --online`, `doctor` and `serve`.

They come from each engine's pages: /version, /v1/models, /metrics, and /server_info where vLLM's developer
mode shows it. No request reaches a model.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.connectors import BootstrapIdentity
from balanceroute.proxy.live.engines.engine_facts import (
    EngineFacts,
    facts_of,
    misfits,
    read_identity,
)
from balanceroute.proxy.live.engines.engine_gauges import (
    MAX_PAGE_BYTES,
    KvSigns,
    MetricsPageError,
    cache_configs,
    kv_signs,
    kv_tokens_of,
)
from balanceroute.proxy.live.engines.engine_url import EngineUrl, FetchError
from balanceroute.proxy.live.engines.model_list import ModelsPageError, ServedModel, parse_models
from balanceroute.proxy.live.engines.pairing import VersionPage
from balanceroute.proxy.live.security import engine_context
from balanceroute.proxy.live.settings.engines import BOOTSTRAP_PORT
from balanceroute.proxy.page_client import PageClient, UnansweredError
from balanceroute.topologies import CONNECTORS, Finding
from balanceroute.topologies.tables import Level

if TYPE_CHECKING:
    from balanceroute.proxy.live.settings.config import ProxyConfig

PAGE_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
_AT_ONCE = 16
# vLLM looks at its machine for /server_info, and keeps what it found.
_CONFIG_S = 20.0
# Of each role, where a start waits for them: how long for one page, and for all.
_MOST_ASKED, _ASK_S, _ALL_S = 16, 1.0, 4.0
# vLLM refuses more choices than it has slots, before it computes anything, from this version on.
_SLOTS_FROM, _CHOICES = (0, 32), 16_384
_SLOTS = re.compile(r"max_num_seqs \(([0-9]{1,9})\)")
_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\b")
CONNECTOR_OF_CLASS = {facts.vllm_class: name for name, facts in CONNECTORS.items()}
"""By the name of `--kv-transfer-config`, that of the proxy's setting."""

# Signs of other servers at an engine's address, in their metrics.
_STRANGERS = (
    (b"balanceroute_", "a BalanceRoute proxy"),
    (b"vllm_router_", "a vllm-router"),
    (b"smg_", "an SMG gateway"),
    (b"sglang_router_", "an SGLang router"),
    (b"vllm:num_prefill_requests", "a router of vLLM's production stack"),
    (b"sglang:", "an SGLang engine"),
)
# Or on another page, by a member of it.
_STRANGERS_PAGES = (
    ("/get_server_info", "disaggregation_mode", "an SGLang engine"),
    ("/list_workers", "urls", "a router before other engines"),
    ("/workers", "workers", "a router before other engines"),
)
# Faults of an engine's answer, in words of `PageClient`, with their cures.
_CURES = (
    ("status 40[13]", "it wants a key: --engine-key-file FILE, or BALANCEROUTE_ENGINE_KEY"),
    ("redirect", "give the engine's own address, not that of a gateway in front of it"),
    ("refused", "start it, or correct the address"),
    ("no complete answer", "it hangs or is loading still: its log tells"),
    ("speaks no TLS", "write http://"),
    ("certificate", "give the authority's certificates, or correct the host's name"),
    ("status 404", "give the address of a vLLM API server"),
    ("status 5", "its log tells why"),
    ("isconnected|eset", "if it serves TLS, write https://; else its log tells"),
    ("[Nn]ame|resolve|address", "correct the host"),
)
_NO_ENGINE = "give the address of a vLLM API server: what answers there is none"


@dataclass(frozen=True, slots=True)
class Seen:
    role: str
    url: str
    # The data-parallel ranks that the topology expects behind the address; None if it leaves that
    # to the engine.
    ranks: int | None = 1
    named: tuple[int, ...] = ()  # Those that the proxy names with requests.
    version: str = ""
    models: tuple[ServedModel, ...] = ()
    # The labels of the KV cache's configuration, one set for each rank.
    caches: tuple[dict[str, str], ...] = field(default=())
    signs: KvSigns = KvSigns()  # From its metrics.
    fault: str = ""  # Why it did not answer; "" if it did.

    @property
    def facts(self) -> EngineFacts:
        """The facts to compare with other engines."""
        return facts_of(self.version, self.models, self.caches)

    @property
    def kv_tokens(self) -> int | None:
        """KV tokens that a rank holds, the least of its ranks; None if it does not say."""
        sizes = [kv_tokens_of(cache) for cache in self.caches]
        return min((size for size in sizes if size is not None), default=None)


def judge_pairs(
    connector: str, prefill: Iterable[Seen], decode: Iterable[Seen]
) -> Iterator[Finding]:
    """Yield where two engines differ. One pair stands for all pairs of the same two values."""
    reported: set[str] = set()
    for one, other in product(prefill, decode):
        for level, words, what in _differences(connector, one, other):
            if what not in reported:
                reported.add(what)
                yield Finding(level, f"decode {other.url} and prefill {one.url}", words)


def _differences(connector: str, prefill: Seen, decode: Seen) -> Iterator[tuple[Level, str, str]]:
    for one in misfits(connector, prefill.facts, decode.facts):
        yield "error" if one.refused else "note", str(one), one.what
    lengths = {model.name: model.max_model_len for model in prefill.models}
    for model in decode.models:
        ours, theirs = model.max_model_len, lengths.get(model.name, model.max_model_len)
        if ours != theirs:
            what = f"have max_model_len {ours} and {theirs} of {model.name!r}"
            yield "note", what, what


async def look_at(pages: PageClient, one: Seen) -> Seen:
    """Return an engine with the facts of its pages, or with the fault."""
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


@dataclass(slots=True)
class EngineLook:
    url: EngineUrl
    seen: Seen
    connector: str = ""  # Its name here; empty if the engine does not report it.
    foreign: str = ""  # The class of a connector that this proxy does not serve.
    kv_role: str = ""  # As in `--kv-transfer-config`; empty if it does not report it.
    slots: int | None = None  # Its max_num_seqs.
    lease_s: float | None = None
    identity: BootstrapIdentity | None = None  # Of its bootstrap server.
    role: str = ""  # "prefill" or "decode"; empty until it is known.
    by: str = ""  # How that is known; "order" if it is taken by its place alone.

    @property
    def name(self) -> str:
        return self.url.base

    @property
    def ranks(self) -> list[str]:
        """The numbers of its data-parallel ranks, in their order."""
        return sorted(self.seen.signs.engines, key=lambda one: (len(one), one))

    def models(self) -> list[str]:
        return [model.name for model in self.seen.models if model.parent is None]

    def row(self) -> dict[str, object]:
        cache = self.seen.caches[0] if self.seen.caches else {}
        lengths = [model.max_model_len for model in self.seen.models if model.max_model_len]
        return {
            "url": self.name,
            "role": self.role or None,
            "role_by": self.by or None,
            "version": self.seen.version or None,
            "models": [model.name for model in self.seen.models],
            "max_model_len": max(lengths, default=None),
            "connector": self.connector or self.foreign or None,
            "ranks": len(self.ranks),
            "max_num_seqs": self.slots,
            "block_size": cache.get("block_size"),
            "blocks": cache.get("num_gpu_blocks"),
            "kv_tokens": self.seen.kv_tokens,
            "prefix_caching": cache.get("enable_prefix_caching"),
            "lease_s": self.lease_s,
            "fault": self.seen.fault or None,
        }

    def line(self) -> str:
        row = self.row()
        if self.seen.fault:
            return f"{self.name}: {self.seen.fault}"
        words = [f"vLLM {self.seen.version}", ", ".join(map(str, self.models())) or "no model"]
        named = (
            ("max_model_len", "max_model_len {:,}"),
            ("connector", "{}"),
            ("max_num_seqs", "max_num_seqs {:,}"),
            ("kv_tokens", "{:,} KV tokens a rank"),
            ("block_size", "blocks of {}"),
            ("lease_s", "lease {:g} s"),
        )
        words += [text.format(row[key]) for key, text in named if row[key] is not None]
        if len(self.ranks) > 1:
            words.append(f"{len(self.ranks)} ranks")
        if row["prefix_caching"] is not None:
            words.append(f"prefix caching {'on' if row['prefix_caching'] == 'True' else 'off'}")
        return f"{self.name}: {self.role or 'role unknown'}: {', '.join(words)}"


class _KvTransfer(msgspec.Struct):
    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: dict[str, Any] = {}


class _Scheduler(msgspec.Struct):
    max_num_seqs: int | None = None


class _VllmConfig(msgspec.Struct):
    kv_transfer_config: _KvTransfer | None = None
    scheduler_config: _Scheduler | None = None


class _ServerInfo(msgspec.Struct):
    vllm_config: _VllmConfig
    vllm_env: dict[str, Any] = {}


async def look_at_all(
    pages: PageClient,
    urls: Iterable[EngineUrl],
    bootstraps: Mapping[EngineUrl, EngineUrl],
    *,
    config_s: float = _CONFIG_S,
) -> list[EngineLook]:
    """Look at engines, some at a time.

    Args:
        bootstraps: Their bootstrap servers, of those that have them not at the usual port.
        config_s: How long each may take to show its configuration.
    """
    turns = asyncio.Semaphore(_AT_ONCE)

    async def look(url: EngineUrl) -> EngineLook:
        async with turns:
            seen = await look_at(pages, Seen("", url.base, None))
            if seen.fault or not seen.signs.engines:
                return EngineLook(url, replace(seen, fault=await _stranger(pages, url, seen.fault)))
            one = EngineLook(url, seen, connector="nixl" if seen.signs.nixl else "")
            await _ask_config(pages, one, config_s)
            if one.slots is None:
                await _ask_slots(pages, one)
            if one.connector in ("", "mooncake"):
                usual = EngineUrl("http", url.host, BOOTSTRAP_PORT)
                await _ask_bootstrap(pages, one, bootstraps.get(url, usual).base)
            # Beside another connector it keeps prefixes.
            if seen.signs.lmcache and not (one.connector or one.foreign or one.identity):
                one.foreign = "LMCache"
            return one

    return [*await asyncio.gather(*map(look, urls))]


async def _stranger(pages: PageClient, url: EngineUrl, fault: str) -> str:
    """Return in words the server or the fault where no engine of vLLM answers."""
    if fault and "status" not in fault and "JSON" not in fault and "models" not in fault:
        return fault  # No server answered.
    try:
        metrics = await pages.page(f"{url.base}/metrics", max_bytes=MAX_PAGE_BYTES)
    except UnansweredError:
        metrics = b""
    for sign, name in _STRANGERS:
        if sign in metrics:
            return f"is {name}, no engine of vLLM"
    for path, member, name in _STRANGERS_PAGES:
        try:
            page = (await pages.ask("GET", f"{url.base}{path}", max_bytes=MAX_ANSWER_BYTES)).json()
        except (UnansweredError, ValueError):
            continue
        if isinstance(page, dict) and member in page:
            return f"is {name}, no engine of vLLM"
    return fault or "/metrics: has no metrics of an engine of vLLM: is it a proxy or a router?"


def fault_of(fault: str) -> tuple[str, str]:
    """Return the fault of an engine's pages, and its cure."""
    if "no engine of vLLM" in fault or "a router" in fault:
        return fault, "give the addresses of vLLM's engines themselves"
    cures = (cure for sign, cure in _CURES if re.search(sign, fault))
    return fault, next(cures, _NO_ENGINE)


async def _ask_config(pages: PageClient, look: EngineLook, limit_s: float) -> None:
    """Note the configuration that an engine in vLLM's developer mode shows."""
    try:
        answer = await pages.ask(
            "GET",
            f"{look.name}/server_info?config_format=json",
            timeout_s=limit_s,
            max_bytes=MAX_ANSWER_BYTES,
        )
        info = msgspec.json.decode(answer.body, type=_ServerInfo)
    except (UnansweredError, ValueError, RecursionError):
        return
    scheduler, transfer = info.vllm_config.scheduler_config, info.vllm_config.kv_transfer_config
    look.slots = None if scheduler is None else scheduler.max_num_seqs
    if transfer is None or transfer.kv_connector is None:
        look.foreign = "no KV connector"
        return
    extra = transfer.kv_connector_extra_config
    names = [transfer.kv_connector]
    several = extra.get("connectors")
    if isinstance(several, list):  # MultiConnector.
        names += [str(one.get("kv_connector")) for one in several if isinstance(one, dict)]
    look.connector = next(
        (CONNECTOR_OF_CLASS[name] for name in names if name in CONNECTOR_OF_CLASS), ""
    )
    look.foreign = "" if look.connector else names[0][:80]
    look.kv_role = transfer.kv_role or ""
    if look.connector:
        facts = CONNECTORS[look.connector]
        lease = extra.get(facts.lease_key) or info.vllm_env.get(facts.lease_variable)
        look.lease_s = float(lease) if isinstance(lease, int | float) and lease > 0 else None


async def _ask_slots(pages: PageClient, look: EngineLook) -> None:
    """Ask an engine how many requests it runs at a time, by a request that it refuses for that."""
    version = _VERSION.match(look.seen.version)
    models = look.models()
    if version is None or (int(version[1]), int(version[2])) < _SLOTS_FROM or not models:
        return
    sampling = {"n": _CHOICES, "max_tokens": 1}
    body = {"model": models[0], "token_ids": [1], "sampling_params": sampling}
    try:
        url = f"{look.name}/inference/v1/generate"
        answer = await pages.ask("POST", url, json=body, max_bytes=MAX_ANSWER_BYTES)
    except UnansweredError:
        return
    match = _SLOTS.search(answer.body.decode(errors="replace")) if answer.status == 400 else None
    look.slots = None if match is None else int(match[1])


async def _ask_bootstrap(pages: PageClient, look: EngineLook, bootstrap: str) -> None:
    """Note the identity that a bootstrap server of Mooncake reports, if there is one."""
    try:
        page = await pages.page(f"{bootstrap}/query", max_bytes=1 << 16)
        look.identity = read_identity(page, bootstrap)
    except (UnansweredError, FetchError):
        return


def reported_connectors(looks: Iterable[EngineLook]) -> dict[str, str]:
    """Return the connectors that engines report, each with the address of one that does."""
    found: dict[str, str] = {}
    for look in looks:
        name = look.connector or ("mooncake" if look.identity is not None else "")
        if name:
            found.setdefault(name, look.name)
    return found


def reported_slots(looks: Iterable[EngineLook]) -> dict[int, str]:
    """Return the numbers of slots that engines report, likewise."""
    found: dict[int, str] = {}
    for look in looks:
        if look.slots is not None:
            found.setdefault(look.slots, look.name)
    return found


def several(found: Mapping[str, str] | Mapping[int, str]) -> str:
    return ", ".join(f"{value} at {where}" for value, where in found.items())


def client_of(
    config: "ProxyConfig", ca_file: Path | None = None, *, timeout_s: float | None = None
) -> PageClient:
    """Return a client for the pages of a configuration's engines.

    Raises:
        ConfigError: The certificates cannot be used.
    """
    key, engines = config.credentials.engine_key, config.engines
    try:
        tls = engine_context(
            ca_file or engines.engine_ca_file, insecure=engines.insecure_engines and not ca_file
        )
    except ConfigError as error:
        raise ConfigError(f"--ca-file {error}") from None
    return PageClient(
        tls,
        timeout_s=2 * config.times.connect_timeout_s if timeout_s is None else timeout_s,
        bearer=None if key is None else key.value,
    )


async def reported_settings(config: "ProxyConfig") -> dict[str, object]:
    """Return the connector and the batch limit that engines report, unless the configuration has them.

    Absent and slow engines report nothing.

    Raises:
        ConfigError: They contradict each other.
    """
    prefillers = [one.url for one in config.prefillers[:_MOST_ASKED]]
    decoders = [one.url for one in config.decoders[:_MOST_ASKED]]
    try:
        async with asyncio.timeout(_ALL_S), client_of(config, timeout_s=_ASK_S) as pages:
            looks = await look_at_all(pages, [*prefillers, *decoders], {}, config_s=_ASK_S)
    except TimeoutError:
        return {}
    found: dict[str, object] = {}
    for name, values in (
        ("connector", reported_connectors(looks)),
        ("batch", reported_slots(look for look in looks if look.url in decoders)),
    ):
        if name in config.given or not values:
            continue
        if len(values) > 1:
            what = "connectors" if name == "connector" else "max_num_seqs"
            reason = (
                f"the engines have several {what} ({several(values)}): start all alike, or name one"
            )
            raise ConfigError(f"--{name}: {reason}")
        found[name] = next(iter(values))
    return found
