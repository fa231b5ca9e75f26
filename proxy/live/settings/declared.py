"""Every setting of the live proxy: its name, default, range and what it means.

Each class is a part of `balanceroute serve --help`. Times are in seconds. `none` asks for no limit,
`auto` for what a rule gives, `inf` for never.
"""

import re
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path

from balanceroute.proxy.core.admission import ADMISSIONS, AimdOptions
from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import ConfigError, shown
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.core.prefill import ScoreSettings
from balanceroute.proxy.core.queueing import FAIR_COSTS, QUEUE_ORDERS
from balanceroute.proxy.core.setting import (
    choice,
    file,
    file_or_word,
    integer,
    number,
    seconds,
    switch,
    text,
    texts,
    words,
)
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.health import HealthSettings
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.engines.scrape import ScrapeSettings
from balanceroute.proxy.live.request.leg_settings import (
    AnswerLimit,
    LegRetries,
    LegRules,
    LegTimes,
)
from balanceroute.proxy.live.security import Secret
from balanceroute.proxy.live.settings.checks import (
    api_key,
    base_address,
    decode_address,
    event_address,
    host_name,
    model_name,
    own_address,
    picker_metrics,
    web_origin,
)
from balanceroute.proxy.live.settings.scheduling import SchedulingSettings
from balanceroute.proxy.live.settings.tracing import TracingSettings
from balanceroute.proxy.live.telemetry.process_log import LEVELS
from balanceroute.proxy.wire.messages import ServerLimits
from balanceroute.proxy.wire.quic.stream_orders import STREAM_ORDERS
from balanceroute.topologies import CONNECTORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Http3Settings:
    """HTTP/3 beside HTTP/1.1, for clients that ask for it; needs the extra h3."""

    http3: bool = switch(
        False,
        "serve HTTP/3 too, on the same port over UDP, and say so to clients of https (Alt-Svc)",
    )
    http3_order: str = choice(
        "rr",
        "which answers of one HTTP/3 connection are sent first: in turns, first come, by deadline, "
        "by level, or levels above the usual one by deadline and the others in turns",
        words(STREAM_ORDERS),
    )
    http3_hard_deadlines: bool = switch(
        False,
        "break off an answer over HTTP/3 that was not sent within its X-Answer-Deadline-Ms",
    )
    http3_streams: int = integer(
        100, "requests that one HTTP/3 connection may have at a time", 1, 10_000
    )
    http3_handshakes: int = integer(
        32,
        "open handshakes of HTTP/3 from which on a newcomer must first show that it receives at "
        "its address; at 8 times as many newcomers are dropped",
        0,
        10_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """Admission of requests, and the order in which they wait."""

    admission: str = choice("bounded", "who is let in", words(ADMISSIONS))
    queue_limit: int = integer(
        4096, "requests that wait before prefill; further ones are refused", 1, 10**6
    )
    tenants: Path | None = file(
        "holds the tenants, their keys and limits as TOML; then a request needs a tenant"
    )
    queue_order: str = choice(
        "fcfs",
        "in what order requests wait, for a prefiller and for a rank",
        words(QUEUE_ORDERS),
    )
    fair_queue: str = choice(
        "none",
        "what tenants share by weight before prefill, or API keys evenly where there are no tenants; "
        "--queue-order then holds within each",
        words(("none", *FAIR_COSTS)),
    )
    client_priority: bool = switch(
        False,
        "let requests set their level by `priority` or by the header `Priority: u=` (RFC 9218)",
    )
    client_deadline: bool = switch(
        False, "let requests say by X-Request-Deadline-Ms when their first token is due"
    )


# Where engines that come and go are found.

_SOURCE = re.compile(r"(?:(prefill|decode)=)?(file|dns|kubernetes):(.+)", re.DOTALL)
# A selector of labels, and a namespace behind an @, which no selector has.
_SELECTOR = re.compile(r"[A-Za-z0-9_.,/=! ()-]{1,1024}(?:@[a-z0-9-]{1,63})?")


@dataclass(frozen=True, slots=True)
class EngineSource:
    """One place where engines are found."""

    kind: str  # "file", "dns" or "kubernetes".
    place: str  # A path, `HOST:PORT`, or `SELECTOR[@NAMESPACE]`.
    role: Role | None = None  # What the engines do; None if the source says it.


def engine_source(word: str) -> EngineSource:
    """Read `file:PATH`, `ROLE=dns:HOST:PORT` or `[ROLE=]kubernetes:SELECTOR[@NAMESPACE]`.

    Raises:
        ConfigError: It is none of them.
    """
    match = _SOURCE.fullmatch(word)
    if match is None:
        raise ConfigError(
            f"is {shown(word)}, must be file:PATH, ROLE=dns:HOST:PORT or "
            "[ROLE=]kubernetes:SELECTOR[@NAMESPACE], with prefill or decode for ROLE"
        )
    role = None if match[1] is None else Role(match[1])
    kind, place = match[2], match[3]
    if kind == "file" and role is not None:
        raise ConfigError(f"is {shown(word)}: the file itself names the role of each engine")
    if kind == "dns":
        if role is None:
            raise ConfigError(f"is {shown(word)}: needs the role, as in decode=dns:HOST:PORT")
        EngineUrl.parse(f"http://{place}")
    if kind == "kubernetes" and not _SELECTOR.fullmatch(place):
        raise ConfigError(f"is {shown(word)}: no selector of labels")
    return EngineSource(kind, place, role)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """Engines that come and go while the proxy serves."""

    discover: tuple[EngineSource, ...] = texts(
        "where engines that come and go are found: file:PATH, a TOML file with [[prefill]] and "
        "[[decode]] tables; ROLE=dns:HOST:PORT, the addresses of a name; "
        "[ROLE=]kubernetes:SELECTOR[@NAMESPACE], the EndpointSlices with these labels",
        engine_source,
        metavar="SOURCE",
        at_top=False,
    )
    discover_interval_s: float = seconds(2.0, "between two readings of a file or a name")
    discover_hold_s: float = seconds(
        5.0, "that an engine may be missing where it was found before it is drained", 0
    )
    discover_limit: int = integer(
        4096, "engines that are found and count; of more, some are left out", 1, 100_000
    )
    kubernetes_api: str = text(
        "",
        "the Kubernetes API server (default: the one of the cluster that this pod is in)",
        base_address,
        metavar="URL",
    )
    kubernetes_account: Path | None = file(
        "the folder with token, ca.crt and namespace of the service account "
        "(default: /var/run/secrets/kubernetes.io/serviceaccount)",
        metavar="FOLDER",
    )
    roster_state: Path | None = file(
        "keeps the engines and the policy over a restart, as they were ordered and found"
    )

    def covers(self, role: Role) -> bool:
        """Return whether engines of a role may be found."""
        return any(one.role in (role, None) for one in self.discover)


# Which of several replicas leads.

# A name of Kubernetes, behind a namespace perhaps.
_LEASE = re.compile(r"(?:[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?/)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def lease_name(word: str) -> str:
    """Check the name of a Lease: NAME or NAMESPACE/NAME. Raises ConfigError."""
    if not _LEASE.fullmatch(word):
        raise ConfigError(f"is {shown(word)}, must be NAME or NAMESPACE/NAME of a Lease")
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSettings:
    """Which of several replicas before one decode group decides; all other ones follow it."""

    leader_lease: str = text(
        "",
        "the Lease of Kubernetes by which replicas agree on who leads, as NAME or NAMESPACE/NAME (default: "
        "this process is alone)",
        lease_name,
        metavar="LEASE",
    )
    leader_lock: Path | None = file(
        "outside Kubernetes, the file on shared storage that who leads has locked (default: this process is "
        "alone)"
    )
    leader_lease_s: int = integer(
        3,
        "seconds without a renewal after which another one takes over; a leader that cannot renew admits "
        "nothing after two thirds of it",
        2,
        60,
        metavar="S",
    )

    @property
    def has_replicas(self) -> bool:
        """Whether another replica may lead."""
        return bool(self.leader_lease) or self.leader_lock is not None


LOG_WORDS = ("-", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddresses:
    """The engines that flags name, in place of a topology's."""

    prefill: tuple[EngineUrl, ...] = texts("the prefillers", own_address, metavar="URL")
    decode: tuple[tuple[EngineUrl, bool], ...] = texts(
        "the decode ranks: a URL each, or URL@RANK for one of the data-parallel ranks behind a "
        "URL, or URL@discover for all of them",
        decode_address,
        metavar="URL[@RANK]",
    )
    bootstrap: tuple[EngineUrl, ...] = texts(
        "with mooncake, each prefiller's bootstrap server, in the order of --prefill",
        own_address,
        metavar="URL",
        shown_default="port 8998 of its host",
    )
    kv_events: tuple[str, ...] = texts(
        "where each prefiller publishes its KV cache events, in the order of --prefill; with "
        "--prefill-choice prefix-aware, and the extra kv-events",
        event_address,
        metavar="tcp://HOST:PORT",
    )
    kv_replay: tuple[str, ...] = texts(
        "where each sends them again (replay_endpoint), in the same order",
        event_address,
        metavar="tcp://HOST:PORT",
    )


# Ranks have numbers below 10,000, which are added.
_MOST_RANK_PORT = 55_535


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How to talk to the engines."""

    metaserver_url: str = text(
        "",
        "with mooncake-layerwise, where the decode engines reach this proxy, http://HOST:PORT "
        "(default: the address it listens on)",
        base_address,
        metavar="URL",
    )
    connector: str = choice(
        "nixl",
        "how the engines move KV caches; where it is not given, as they tell",
        words(CONNECTORS),
        at_top=True,
        aliases=("--kv-connector",),
        also={facts.vllm_class: name for name, facts in CONNECTORS.items()},
    )
    kv_events_port: int | None = integer(
        None,
        "the port at which a prefiller publishes its KV cache events, of each that names no address for "
        "them, as those that are found do not",
        1,
        65_535,
        metavar="PORT",
    )
    kv_replay_port: int | None = integer(
        None, "the port at which it sends them again", 1, 65_535, metavar="PORT"
    )
    rank_kv_events_port: int | None = integer(
        None,
        "the port at which the decode rank 0 of each server publishes its KV cache events; those of rank R are "
        "R above; with --prefix-affinity or --local-prefill-tokens, and the extra kv-events",
        1,
        _MOST_RANK_PORT,
        metavar="PORT",
    )
    rank_kv_replay_port: int | None = integer(
        None, "the port at which it sends them again", 1, _MOST_RANK_PORT, metavar="PORT"
    )
    kv_block_tokens: int = integer(
        16, "with KV cache events, tokens of the engines' KV blocks (--block-size)", 1, 4_096
    )
    model: tuple[str, ...] = texts(
        "the model names to serve",
        model_name,
        metavar="NAME",
        shown_default="those that the engines serve",
        aliases=("--served-model-name",),
    )
    engine_key_file: Path | None = file(
        "holds the key to send to the engines; else BALANCEROUTE_ENGINE_KEY is the key"
    )
    engine_ca_file: Path | None = file("certificates to trust from https engines")
    insecure_engines: bool = switch(False, "do not verify the certificates of https engines")
    check_pairs: bool = switch(
        True, "never pair prefill and decode engines whose versions or KV caches do not fit"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningSettings:
    """Where clients and administrators come in, and what they may do."""

    host: str = text(
        "127.0.0.1",
        "address to serve clients on; :: for every interface, 0.0.0.0 for IPv4 alone",
        host_name,
        metavar="ADDRESS",
    )
    port: int = integer(8000, "port to serve clients on; 0 for a free one", 0, 65_535)
    tls_cert: Path | None = file("serve https with this certificate chain (PEM)")
    tls_key: Path | None = file("the certificate's private key (PEM)")
    api_key_file: Path | None = file(
        "holds the keys that clients may present, one a line; without it all may come"
    )
    api_key: tuple[Secret, ...] = texts(
        "keys that clients may present, as in vLLM; who else is on the machine sees them here. The key of "
        "the engines is --engine-key-file",
        api_key,
        metavar="KEY",
        at_top=False,
    )
    cors_origin: tuple[str, ...] = texts(
        "sites whose pages may use the API from a browser, such as https://chat.example; * for all",
        web_origin,
        metavar="ORIGIN",
        at_top=False,
    )
    native: str = choice(
        "auto",
        "whether the native library moves the ordinary events of streams, over http on both sides, and reads "
        "bodies of more than 128 KiB: require refuses to start without it, auto uses it where it is installed",
        words(("auto", "off", "require")),
    )
    native_threads: int | None = integer(
        None,
        "its threads; auto for one on each core but one, at most 8",
        1,
        64,
        word="auto",
    )
    public_metrics: bool = switch(
        True, "serve /metrics to clients too, with an API key if they need one"
    )
    admin: bool = switch(True, "serve health, metrics and administration")
    admin_host: str = text("127.0.0.1", "address to serve them on", host_name, metavar="ADDRESS")
    admin_port: int = integer(
        9000, "port of health, metrics and administration; 0 for a free one", 0, 65_535
    )
    admin_token_file: Path | None = file(
        "holds the token that administrators present; required unless --admin-host is loopback"
    )
    control_on_api_port: bool = switch(
        False,
        "serve orders of training frameworks (/workers, /pause, /update_weights ..) on --port too, to who "
        "presents the token of --admin-token-file",
    )
    admin_name: tuple[str, ...] = texts(
        "names, beside its addresses and localhost, under which the admin listener is called "
        "without a token",
        host_name,
        metavar="NAME",
        at_top=False,
    )

    @property
    def certificate(self) -> tuple[Path, Path] | None:
        """The files of the certificate and of its key; None to serve http."""
        cert, key = self.tls_cert, self.tls_key
        return None if cert is None or key is None else (cert, key)

    @property
    def takes_orders(self) -> bool:
        """Whether administrators come in anywhere."""
        return self.admin or self.control_on_api_port


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Services for a gateway above several such proxies."""

    picker_metrics: tuple[tuple[tuple[str, str], ...], ...] = texts(
        "on the clients' port /metrics begins with the whole unit as one model server, for endpoint pickers, "
        "and that part of it needs no API key: vllm for vLLM's names, WHAT=NAME for another name of waiting, "
        "running, kv-usage, cache or lora",
        picker_metrics,
        metavar="vllm|WHAT=NAME",
        at_top=False,
    )

    scaling_signals: bool = switch(
        False,
        "export what bounds the fleet, and how many prefillers and ranks its load needs, for autoscalers",
    )
    http2: bool = switch(
        False,
        "serve HTTP/2 too, on the same port, to clients that begin with it (h2c) or, over https, agree on it; "
        "needs the extra h2",
    )
    http2_streams: int = integer(
        100, "requests that one HTTP/2 connection may have at a time", 1, 10_000
    )

    pick: str = choice(
        "off",
        "also say where a gateway's requests go, as its endpoint picker (ext_proc): by llm-d's Coordinator, "
        "whose prefill and decode are calls of their own, or by its sidecar; needs the extra gateway",
        words(("off", "coordinator", "sidecar")),
    )
    pick_host: str = text("127.0.0.1", "address on which gateways ask the picker", metavar="HOST")
    pick_port: int = integer(9002, "its port; 0 for a free one", 0, 65_535)
    pick_fallbacks: int = integer(
        1, "engines that a gateway is told beside the chosen one, to try if that refuses", 0, 8
    )
    pick_test_header: bool = switch(
        False,
        "obey the header test-epp-endpoint-selection, for conformance tests of a gateway; whoever sends it "
        "chooses the engine",
    )
    select_key_file: Path | None = file(
        "also say over HTTP which engine takes a request, to routers that move its bytes themselves; holds "
        "the keys that they present, one a line"
    )
    select_host: str = text("127.0.0.1", "address on which they ask", host_name, metavar="ADDRESS")
    select_port: int = integer(8092, "port on which they ask; 0 for a free one", 0, 65_535)

    @property
    def picker_names(self) -> dict[str, str]:
        """The name of each of `PICKER_METRICS` that is exported."""
        return {what: name for items in self.picker_metrics for what, name in items}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """How long things may take, from the queue to the end."""

    queue_ttl_s: float | None = number(
        None,
        "wait before prefill after which a request expires",
        0.001,
        1e6,
        shown_default="600; with --aimd half of --aimd-ttft-s, or 30 with post4",
        word="auto",
        metavar="S",
    )
    pool_ttl_s: float = number(
        600.0,
        "wait after prefill after which a request expires; inf for never",
        0.001,
        inf,
        metavar="S",
    )
    pool_deadline_s: float | None = number(
        None,
        "wait after prefill after which a request goes first; inf for never",
        0.001,
        inf,
        shown_default="three quarters of lease minus margin, unless a repeated prefill costs less",
        word="auto",
        metavar="S",
    )
    # Long enough for the second SYN, and short enough for the margin of a lease.
    connect_timeout_s: float = seconds(
        2.5, "for a connection to an engine; less than --lease-margin-s where KV caches have leases"
    )
    tcp_timeout_s: float = seconds(
        30.0,
        "silence of an engine's host, to TCP's own probes too, after which its connections end",
        2,
        10_000,
    )
    drain_timeout_s: float = seconds(120.0, "for running requests to end after SIGTERM", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Where and what to log."""

    log: str = file_or_word("-", "where to log: a file, - for standard error, or none", LOG_WORDS)
    log_level: str = choice("info", "the least level to log", words(LEVELS))
    load_log: Path | None = file(
        "takes samples of every rank's load as mirrored here, for `balanceroute validate`"
    )
    load_log_interval_s: float = seconds(0.1, "between two such samples", 0.01)


# By heading, as `balanceroute serve --help` shows them.
HEADINGS: dict[str, tuple[type, ...]] = {
    "engines": (EngineAddresses, EngineSettings),
    "discovery": (DiscoverySettings,),
    "replicas": (LeaderSettings,),
    "listening": (ListeningSettings, Http3Settings, GatewaySettings),
    "admission": (AdmissionSettings, AimdOptions),
    "scheduling": (SchedulingSettings, SchedulerConfig, LegRules, ScoreSettings),
    "policies": (PolicySettings,),
    "time limits": (TimeLimits, LegTimes),
    "failures": (LegRetries, HealthSettings, ScrapeSettings),
    "limits of an exchange": (ServerLimits, AnswerLimit),
    "log": (LogSettings,),
    "tracing": (TracingSettings,),
}
SECTIONS: tuple[type, ...] = tuple(chain.from_iterable(HEADINGS.values()))
