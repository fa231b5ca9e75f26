"""Every setting of the live proxy: its flag, its default, its range and what it means.

Times are in seconds. `none` asks for no limit, `auto` for what a rule gives, `inf` for never.
"""

import re
from math import inf

from balanceroute.proxy.core.errors import ConfigError, shown
from balanceroute.proxy.core.policies import (
    BETA_PER_RANK,
    PATIENCE_PER_SLOT,
    POLICIES,
    PolicySettings,
)
from balanceroute.proxy.core.projection import Form
from balanceroute.proxy.live.connectors import CONNECTORS
from balanceroute.proxy.live.engines.engine_url import EngineUrl, valid_host
from balanceroute.proxy.live.prediction.names import PREDICTORS
from balanceroute.proxy.live.request.direct import Direct
from balanceroute.proxy.live.settings.options import (
    Option,
    Values,
    choice,
    file,
    file_or_word,
    files_or_words,
    integer,
    number,
    optional_integer,
    optional_number,
    seconds,
    switch,
    text,
    texts,
)

LOG_LEVELS = ("debug", "info", "warning", "error")
DISCOVER = "discover"
_KNOBS = PolicySettings()
_ORIGIN = re.compile(r"https?://[a-z0-9.\-_\[\]:]{1,256}")  # As browsers write it.
_MODEL = re.compile(r"[!-~]{1,256}")
_KIB = 1 << 10
_MIB = 1 << 20


def decode_address(word: str) -> tuple[EngineUrl, bool]:
    """Read `URL`, `URL@RANK` or `URL@discover`: the address, and whether to ask it for its ranks.

    Raises:
        ConfigError: It is none of them.
    """
    if word.endswith(f"@{DISCOVER}"):
        return EngineUrl.parse(word.removesuffix(f"@{DISCOVER}")), True
    return EngineUrl.parse(word), False


def _own_address(word: str) -> EngineUrl:
    url = EngineUrl.parse(word)
    if url.rank is not None:
        raise ConfigError(f"is {url.name!r}: only decode engines are addressed by rank")
    return url


def _base(word: str) -> str:
    return _own_address(word).base


def _model(word: str) -> str:
    if not _MODEL.fullmatch(word):
        raise ConfigError(f"is {shown(word)}, must be 1 to 256 visible ASCII characters")
    return word


def _origin(word: str) -> str:
    if word != "*" and not _ORIGIN.fullmatch(word):
        raise ConfigError(f"is {shown(word)}, must be *, or http:// or https:// and a host")
    return word


def _host(word: str) -> str:
    try:
        return valid_host(word)
    except ConfigError as error:
        raise ConfigError(f"is {shown(word)}: it {error}") from None


PREFILL = texts("prefill", "the prefillers", check=_own_address, metavar="URL")
DECODE = texts(
    "decode",
    "the decode ranks: a URL each, or URL@RANK for one of the data-parallel ranks behind a URL, "
    "or URL@discover for all of them",
    check=decode_address,
    metavar="URL[@RANK]",
)
BOOTSTRAP = texts(
    "bootstrap",
    "with mooncake, each prefiller's bootstrap server, in the order of --prefill",
    check=_own_address,
    metavar="URL",
    shown_default="port 8998 of its host",
)
CONNECTOR = choice("connector", "nixl", "how the engines move KV caches", CONNECTORS, at_top=True)
METASERVER_URL = text(
    "metaserver_url",
    "",
    "with mooncake-layerwise, where the decode engines reach this proxy, http://HOST:PORT "
    "(default: the address it listens on)",
    check=_base,
    metavar="URL",
)
MODEL = texts(
    "model",
    "the model names to serve",
    check=_model,
    metavar="NAME",
    shown_default="those that the engines serve",
)
ENGINE_KEY_FILE = file(
    "engine_key_file",
    "holds the key to send to the engines; else BALANCEROUTE_ENGINE_KEY is the key",
)
ENGINE_CA_FILE = file("engine_ca_file", "certificates to trust from https engines")
INSECURE_ENGINES = switch(
    "insecure_engines", default=False, text="do not verify the certificates of https engines"
)

HOST = text(
    "host",
    "127.0.0.1",
    "address to serve clients on; 0.0.0.0 or :: for every interface",
    check=_host,
    metavar="ADDRESS",
)
PORT = integer("port", 8000, "port to serve clients on; 0 for a free one", least=0, most=65_535)
TLS_CERT = file("tls_cert", "serve https with this certificate chain (PEM)")
TLS_KEY = file("tls_key", "the certificate's private key (PEM)")
API_KEY_FILE = file(
    "api_key_file", "holds the keys that clients may present, one a line; without it all may come"
)
CORS_ORIGIN = texts(
    "cors_origin",
    "sites whose pages may use the API from a browser, such as https://chat.example; * for all",
    check=_origin,
    metavar="ORIGIN",
    at_top=False,
)
PUBLIC_METRICS = switch(
    "public_metrics",
    default=True,
    text="serve /metrics to clients too, with an API key if they need one",
)
ADMIN = switch("admin", default=True, text="serve health, metrics and administration")
ADMIN_HOST = text(
    "admin_host", "127.0.0.1", "address to serve them on", check=_host, metavar="ADDRESS"
)
ADMIN_PORT = integer(
    "admin_port", 9000, "port to serve them on; 0 for a free one", least=0, most=65_535
)
ADMIN_TOKEN_FILE = file(
    "admin_token_file",
    "holds the token that administrators present; required unless --admin-host is loopback",
)

ADMIN_NAME = texts(
    "admin_name",
    "names, beside its addresses and localhost, under which the admin listener is called without a "
    "token",
    check=_host,
    metavar="NAME",
    at_top=False,
)

POLICY = choice("policy", "br-h", "which rank takes a request, and when", POLICIES)
PREDICTOR = file_or_word(
    "predictor",
    "survival",
    "for br-h: none, survival, exact-match, or a file made by `balanceroute train`",
    PREDICTORS,
)
PREDICTOR_STATE = file(
    "predictor_state",
    "keeps what the predictor learns: read at start if it is there, saved every minute and at the "
    "end",
)
SHADOW_PREDICTOR = files_or_words(
    "shadow_predictor",
    "predictors, as for --predictor, that are scored on the traffic and decide nothing",
    PREDICTORS,
)
SEED = integer("seed", 0, "of random policies", least=0, most=(1 << 63) - 1)
# vLLM's own default of --max-num-seqs on most devices.
BATCH = integer(
    "batch",
    256,
    "batch limit of a rank: the engines' --max-num-seqs",
    least=1,
    most=10**9,
    metavar="B",
)
RANK_KV_TOKENS = optional_integer(
    "rank_kv_tokens", "none", "KV tokens that fit on a rank", word="none", least=1, most=10**9
)
PROBE_LIMIT = optional_integer(
    "probe_limit", "none", "prefills at a time on one prefiller", word="none", least=1, most=10**6
)
PREFILLER_KV_TOKENS = optional_integer(
    "prefiller_kv_tokens",
    "none",
    "KV tokens that one prefiller may hold for the pool",
    word="none",
    least=1,
    most=10**9,
)
PREFILLER_UTILISATION_LIMIT = number(
    "prefiller_utilisation_limit",
    0.95,
    "KV cache use of a prefiller above which it gets no further prefill",
    least=0.01,
    most=1,
)
POOL_LIMIT = optional_integer(
    "pool_limit",
    "4 K, G or 2 P, whichever is most, for window K, G ranks and P prefillers",
    "requests in prefill or prefilled; the others wait before prefill, where they hold no KV cache",
    word="auto",
    least=1,
    most=10**6,
)
QUEUE_LIMIT = integer(
    "queue_limit",
    4096,
    "requests that wait before prefill; further ones are refused",
    least=1,
    most=10**6,
)
SINGLE_ENGINE_LIMIT = integer(
    "single_engine_limit",
    64,
    "requests that one prefiller answers alone at a time (embeddings, scores, tokens, lists of models); "
    "further ones wait, up to the queue limit",
    least=1,
    most=10**6,
)
LEASE_S = optional_number(
    "lease_s",
    "the connector's",
    "how long a prefiller keeps a KV cache that no decoder has asked for; inf for ever",
    least=0.1,
    most=inf,
    metavar="S",
)
LEASE_MARGIN_S = seconds(
    "lease_margin_s", 5.0, "how long before the end of its lease a KV cache counts as lost", least=0
)
DIRECT = choice(
    "direct",
    "auto",
    "which engines serve what cannot be split between the roles (n > 1, several prompts, echo, "
    "prompt_logprobs, /v1/responses, ..), or whether it is rejected with status 400",
    ("auto", *(direct.value for direct in Direct)),
    shown_default="prefill with the connectors of vllm-ascend, else decode",
)
# A good part of what a prefiller's batch holds, where `max_num_seqs` is as small as in our topologies.
DIRECT_LIMIT = integer(
    "direct_limit",
    4,
    "with --direct prefill, sequences at a time of such requests on one prefiller; a request of more "
    "waits for one that has none",
    least=1,
    most=10**6,
)
ON_MISSING_KV = choice(
    "on_missing_kv",
    "recompute",
    "when a prefill answer has no usable KV parameters: serve the request as --direct says, or "
    "count it as a failed try",
    ("recompute", "fail"),
)
PASS_PRIORITY = switch(
    "pass_priority",
    default=False,
    text="let engines have the `priority` of requests, for --scheduling-policy priority; vLLM's "
    "default policy answers 400 to any but 0",
)
COUNT_TOKENS = choice(
    "count_tokens",
    "usage",
    "how the tokens of a stream are counted: by the usage that engines are asked for in every event "
    "(and that clients do not see unless they ask), or an event is one token",
    ("usage", "events"),
)

PROJECTION = choice(
    "projection",
    "auto",
    "how br-h uses a prediction",
    ("auto", *(form.value for form in Form)),
    shown_default="expected; point with --paper",
)
HORIZON = integer(
    "horizon",
    _KNOBS.horizon_steps,
    "steps that br-h looks ahead",
    least=0,
    most=10_000,
    metavar="H",
)
GAMMA = number(
    "gamma",
    _KNOBS.gamma,
    "br-h's discount of each step ahead, at most",
    least=1e-9,
    most=1,
    metavar="γ",
)
ALPHA = number(
    "alpha",
    _KNOBS.alpha,
    "br-h's reward per token that fills a margin",
    least=1e-9,
    most=1e9,
    metavar="α",
)
BETA = optional_number(
    "beta",
    f"{BETA_PER_RANK:g} G",
    "br-h's penalty per token beyond a margin",
    least=1e-9,
    most=1e9,
    metavar="β",
)
THETA = optional_integer(
    "theta", "G", "free slots left to stage 2", word="auto", least=0, most=10**9, metavar="θ"
)
WINDOW = integer(
    "window",
    _KNOBS.window,
    "candidates that stage 2 chooses from",
    least=1,
    most=10**9,
    metavar="K",
)
PATIENCE = optional_number(
    "patience",
    f"{PATIENCE_PER_SLOT:g} G B",
    "overtakings that forgive a request one mean prompt of overflow; inf for never",
    least=1e-9,
    most=inf,
)
REFRESH_TOKENS = integer(
    "refresh_tokens",
    _KNOBS.refresh_tokens,
    "tokens between two predictions of a request",
    least=1,
    most=10**9,
    metavar="M",
)
BYPASS_SLOTS = integer(
    "bypass_slots",
    _KNOBS.bypass_slots,
    "requests beyond its batch that br-0-bypass may send to a rank",
    least=0,
    most=10**9,
)
PAPER = switch("paper", default=False, text="the paper's exact two-stage rule")

QUEUE_TTL_S = seconds("queue_ttl_s", 600.0, "wait before prefill after which a request gets 503")
POOL_TTL_S = number(
    "pool_ttl_s",
    600.0,
    "wait after prefill after which a request gets 503; inf for never",
    least=0.001,
    most=inf,
    metavar="S",
)
POOL_DEADLINE_S = optional_number(
    "pool_deadline_s",
    "three quarters of lease minus margin",
    "wait after prefill after which a request goes first; inf for never",
    least=0.001,
    most=inf,
    metavar="S",
)
CONNECT_TIMEOUT_S = seconds("connect_timeout_s", 5.0, "for a connection to an engine")
TCP_TIMEOUT_S = seconds(
    "tcp_timeout_s",
    30.0,
    "silence of an engine's host, to TCP's own probes too, after which its connections end",
    least=2,
    most=10_000,
)
PREFILL_TIMEOUT_S = seconds("prefill_timeout_s", 300.0, "for a prefill's whole answer")
FIRST_TOKEN_TIMEOUT_S = seconds(
    "first_token_timeout_s", 60.0, "from dispatch to a decode rank to its first token"
)
IDLE_STREAM_TIMEOUT_S = seconds(
    "idle_stream_timeout_s", 300.0, "between two pieces of a decode rank's answer"
)
ANSWER_TIMEOUT_S = seconds(
    "answer_timeout_s", 1800.0, "for a decode rank's whole answer, if it is not streamed"
)
DRAIN_TIMEOUT_S = seconds(
    "drain_timeout_s", 120.0, "for running requests to end after SIGTERM", least=0
)

RETRY_ATTEMPTS = integer(
    "retry_attempts", 3, "tries of each leg (prefill, decode), the first one too", least=1, most=100
)
RETRY_BACKOFF_S = seconds(
    "retry_backoff_s", 0.05, "wait before the first retry; doubles with each one", least=0
)
RETRY_BACKOFF_LIMIT_S = seconds(
    "retry_backoff_limit_s", 1.0, "longest wait before a retry", least=0
)
HEALTH_INTERVAL_S = seconds("health_interval_s", 2.0, "between two health checks of an engine")
HEALTH_TIMEOUT_S = seconds("health_timeout_s", 2.0, "for such a check")
SCRAPE_INTERVAL_S = seconds("scrape_interval_s", 1.0, "between two readings of an engine's metrics")
SCRAPE_TIMEOUT_S = seconds("scrape_timeout_s", 1.0, "for such a reading")
QUARANTINE_FAILURES = integer(
    "quarantine_failures",
    3,
    "failures in a row after which an engine gets nothing until it is healthy",
    least=1,
    most=10**6,
)

CONNECTION_LIMIT = optional_integer(
    "connection_limit",
    "a third of the file descriptors left",
    "connections of clients; beyond it idle ones are closed for newcomers, and then newcomers get 503",
    word="auto",
    least=1,
    most=10**6,
)
PEER_CONNECTION_LIMIT = optional_integer(
    "peer_connection_limit",
    "none",
    "connections of one client address; beyond it newcomers get 429",
    word="none",
    least=1,
    most=10**6,
)
BODY_LIMIT_BYTES = integer(
    "body_limit_bytes", 16 * _MIB, "size of a request's body", least=1, most=1 << 40
)
BODY_BUDGET_BYTES = integer(
    "body_budget_bytes",
    512 * _MIB,
    "all bodies of requests that are being received or wait; beyond it newcomers get 503",
    least=1,
    most=1 << 40,
)
HEADER_LIMIT_BYTES = integer(
    "header_limit_bytes", 32 * _KIB, "size of a request's header", least=256, most=_MIB
)
HEADER_LIMIT = integer("header_limit", 100, "fields in a request's header", least=1, most=10_000)
TARGET_LIMIT_BYTES = integer(
    "target_limit_bytes", 8 * _KIB, "size of a request's target", least=64, most=_MIB
)
HEADER_TIMEOUT_S = seconds("header_timeout_s", 10.0, "for a client to send a whole header")
BODY_TIMEOUT_S = seconds("body_timeout_s", 60.0, "for a client to send a whole body")
KEEP_ALIVE_TIMEOUT_S = seconds(
    "keep_alive_timeout_s", 75.0, "that a client's connection may stay open without a request"
)
WRITE_TIMEOUT_S = seconds(
    "write_timeout_s", 60.0, "that a client may leave its answer unread before it is cut off"
)
WRITE_BUFFER_BYTES = integer(
    "write_buffer_bytes",
    64 * _KIB,
    "unread answer kept for a client before its engine is paused",
    least=1,
    most=1 << 30,
)
ANSWER_LIMIT_BYTES = integer(
    "answer_limit_bytes",
    256 * _MIB,
    "size of an answer that is not streamed",
    least=_KIB,
    most=1 << 40,
)
LOG = file_or_word("log", "-", "where to log: a file, - for standard error, or none", ("-", "none"))
LOG_LEVEL = choice("log_level", "info", "the least level to log", LOG_LEVELS)
LOAD_LOG = file(
    "load_log", "takes samples of every rank's load as mirrored here, for `balanceroute validate`"
)
LOAD_LOG_INTERVAL_S = seconds("load_log_interval_s", 0.1, "between two such samples", least=0.01)

POLICY_KNOBS: tuple[Option[object], ...] = (
    PROJECTION,
    HORIZON,
    GAMMA,
    ALPHA,
    BETA,
    THETA,
    WINDOW,
    PATIENCE,
    REFRESH_TOKENS,
    BYPASS_SLOTS,
    PAPER,
)
# By heading, as `balanceroute serve --help` shows them.
GROUPS: dict[str, tuple[Option[object], ...]] = {
    "engines": (
        PREFILL,
        DECODE,
        BOOTSTRAP,
        METASERVER_URL,
        CONNECTOR,
        MODEL,
        ENGINE_KEY_FILE,
        ENGINE_CA_FILE,
        INSECURE_ENGINES,
    ),
    "listening": (
        HOST,
        PORT,
        TLS_CERT,
        TLS_KEY,
        API_KEY_FILE,
        CORS_ORIGIN,
        PUBLIC_METRICS,
        ADMIN,
        ADMIN_HOST,
        ADMIN_PORT,
        ADMIN_TOKEN_FILE,
        ADMIN_NAME,
    ),
    "scheduling": (
        POLICY,
        PREDICTOR,
        PREDICTOR_STATE,
        SHADOW_PREDICTOR,
        SEED,
        BATCH,
        RANK_KV_TOKENS,
        PROBE_LIMIT,
        PREFILLER_KV_TOKENS,
        PREFILLER_UTILISATION_LIMIT,
        POOL_LIMIT,
        QUEUE_LIMIT,
        SINGLE_ENGINE_LIMIT,
        LEASE_S,
        LEASE_MARGIN_S,
        DIRECT,
        DIRECT_LIMIT,
        ON_MISSING_KV,
        PASS_PRIORITY,
        COUNT_TOKENS,
    ),
    "policies": POLICY_KNOBS,
    "time limits": (
        QUEUE_TTL_S,
        POOL_TTL_S,
        POOL_DEADLINE_S,
        CONNECT_TIMEOUT_S,
        TCP_TIMEOUT_S,
        PREFILL_TIMEOUT_S,
        FIRST_TOKEN_TIMEOUT_S,
        IDLE_STREAM_TIMEOUT_S,
        ANSWER_TIMEOUT_S,
        DRAIN_TIMEOUT_S,
    ),
    "failures": (
        RETRY_ATTEMPTS,
        RETRY_BACKOFF_S,
        RETRY_BACKOFF_LIMIT_S,
        HEALTH_INTERVAL_S,
        HEALTH_TIMEOUT_S,
        SCRAPE_INTERVAL_S,
        SCRAPE_TIMEOUT_S,
        QUARANTINE_FAILURES,
    ),
    "limits of an exchange": (
        CONNECTION_LIMIT,
        PEER_CONNECTION_LIMIT,
        BODY_LIMIT_BYTES,
        BODY_BUDGET_BYTES,
        HEADER_LIMIT_BYTES,
        HEADER_LIMIT,
        TARGET_LIMIT_BYTES,
        HEADER_TIMEOUT_S,
        BODY_TIMEOUT_S,
        KEEP_ALIVE_TIMEOUT_S,
        WRITE_TIMEOUT_S,
        WRITE_BUFFER_BYTES,
        ANSWER_LIMIT_BYTES,
    ),
    "log": (LOG, LOG_LEVEL, LOAD_LOG, LOAD_LOG_INTERVAL_S),
}
OPTIONS: tuple[Option[object], ...] = tuple(
    option for options in GROUPS.values() for option in options
)


def policy_settings(values: Values) -> PolicySettings:
    """Return the policies' knobs."""
    projection = values.get(PROJECTION)
    return PolicySettings(
        horizon_steps=values.get(HORIZON),
        gamma=values.get(GAMMA),
        alpha=values.get(ALPHA),
        beta=values.get(BETA),
        theta=values.get(THETA),
        window=values.get(WINDOW),
        patience=values.get(PATIENCE),
        form=None if projection == "auto" else Form(projection),
        refresh_tokens=values.get(REFRESH_TOKENS),
        bypass_slots=values.get(BYPASS_SLOTS),
        paper=values.get(PAPER),
    )
