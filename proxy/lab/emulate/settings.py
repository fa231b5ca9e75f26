"""The settings of an emulated fleet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import (
    check_ranges,
    choice,
    flag,
    integer,
    named,
    number,
    seconds,
    text,
    words,
)
from balanceroute.proxy.lab.sim.engines import PrefillModel, SimulatedEngineOptions
from balanceroute.topologies import CONNECTORS

_YEAR_NS = 365 * 86_400 * 10**9


class DpMode(Enum):
    """How a proxy addresses a decode rank."""

    PORTS = "ports"  # Each rank is a server of its own.
    HEADER = "header"  # One server; `X-data-parallel-rank` names the rank.


class Preemption(Enum):
    """The fate of a request when a rank's KV cache has no room for it any more."""

    INTERNAL = "internal"  # vLLM: the rank computes it again.
    STOP = "stop"  # vllm-ascend's recompute scheduler: it ends with stop_reason "recomputed".


class Frontend(Enum):
    """Which of vLLM's API servers writes the answers."""

    PYTHON = "python"
    RUST = "rust"  # `VLLM_USE_RUST_FRONTEND=1`


@dataclass(frozen=True, slots=True)
class EmulationSettings:
    """Sizes, speeds and protocol of the engines. All times are emulated times.

    Raises:
        ConfigError: A value is invalid; the message begins with its name.
    """

    prefillers: int = integer(2, "prefill engines", 0, 1_000, metavar="P")
    ranks: int = integer(8, "decode ranks", 0, 10_000, metavar="G")
    batch_limit: int = integer(16, "batch limit of a rank", 1, 10**9, metavar="B", name="batch")
    step_base_ns: int = 30_000_000  # a of T = a + b x max load.
    step_ns_per_token: float = 200.0  # b.
    prefill_base_ns: int = 20_000_000  # c of the service time c + d x prompt tokens.
    prefill_ns_per_token: float = 50_000.0  # d.
    transfer_base_ns: int = 2_000_000  # e of the KV transfer's time e + f x prompt tokens.
    transfer_ns_per_token: float = 1_000.0  # f.
    rank_kv_tokens: int | None = integer(
        None,
        "KV tokens per rank",
        1,
        10**12,
        shown_default="no limit",
        metavar="TOKENS",
        name="kv_capacity",
    )
    prefiller_kv_tokens: int | None = integer(
        None,
        "the same, per prefiller",
        1,
        10**12,
        shown_default="no limit",
        metavar="TOKENS",
        name="prefill_kv_capacity",
    )
    block_tokens: int = 32  # Tokens of a KV block.
    prefix_cache_tokens: int | None = integer(
        None,
        "tokens in the prefix cache of each engine and rank",
        0,
        10**12,
        shown_default="no cache",
        metavar="TOKENS",
        name="prefix_cache",
    )
    kv_events: bool = flag(
        "let prefillers publish the events of their prefix caches (ZeroMQ; the extra kv-events)"
    )
    kv_event_faults: float = number(
        0.0,
        "probability that a batch of them is lost, repeated, late, misnumbered or wrong",
        0,
        1,
        metavar="P",
    )
    # How long a prefiller keeps blocks that no decode rank pulls.
    lease_s: float = seconds(30.0, "lease of prefilled KV", 1e-6, 1e9)
    connector: str = choice("nixl", "how KV caches travel", words(CONNECTORS), at_top=True)
    dp_mode: DpMode = choice(
        DpMode.PORTS, "a port for each rank, or one port and X-data-parallel-rank", named(DpMode)
    )
    # In the order of the ranks: the engines of a group end so many seconds after one of them.
    dp_size: int = integer(
        1, "ranks of a data-parallel group, of which all end once one is killed", 1, 10_000
    )
    dp_death_s: float = 1.0
    preemption: Preemption = choice(
        Preemption.INTERNAL,
        'what a full KV cache does: compute again, or stop with "recomputed"',
        named(Preemption),
    )
    time_scale: float = number(1.0, "emulated seconds in a real one", 1e-3, 1e6)
    model: str = text("emulated", "name of the served model", metavar="MODEL", at_top=True)
    adapters: tuple[str, ...] = ()
    # The names of the model and its adapters, for engines that serve another model, by the engine's
    # name ("decode/3").
    engine_models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The versions of engines that report another one than the rest, likewise.
    engine_versions: Mapping[str, str] = field(default_factory=dict)
    # Of a request's prompt and output tokens together.
    max_model_len: int = integer(131_072, "context", 2, 10**9, metavar="TOKENS")
    mean_output_tokens: float = number(
        256.0,
        "mean length of answers that end by themselves",
        1,
        inf,
        metavar="TOKENS",
        name="mean_output",
    )
    prompt_tokens_details: bool = flag("tell cached_tokens in usage")
    reasoning_parser: bool = flag("chats begin with reasoning; tell reasoning_tokens in usage")
    # Its text is sent with the next one's. The text determines which tokens, so every engine agrees;
    # likewise for the next setting.
    partial_utf8: float = number(
        0.0, "probability that a token ends within a character", 0, 1, metavar="P"
    )
    # As by an API server that lags behind its engine.
    merged_outputs: float = number(
        0.0, "probability that a token shows in one event with the next", 0, 1, metavar="P"
    )
    # Of the chat, completions and token APIs.
    frontend: Frontend = choice(
        Frontend.PYTHON, "which of vLLM's API servers writes the answers", named(Frontend)
    )
    # Idle time after which a server closes a connection (uvicorn's is 5 s).
    keep_alive_s: float = 5.0
    # How the decode ranks differ from plain ones.
    engines: SimulatedEngineOptions = field(default_factory=SimulatedEngineOptions)

    def __post_init__(self) -> None:
        check_ranges(self)
        for name, least, most in (
            ("dp_death_s", 0, 1e9),
            ("step_base_ns", 1, _YEAR_NS),  # With a step of no time the clock would not advance.
            ("step_ns_per_token", 0, 1e9),
            ("prefill_base_ns", 0, _YEAR_NS),
            ("prefill_ns_per_token", 0, 1e9),
            ("transfer_base_ns", 0, _YEAR_NS),
            ("transfer_ns_per_token", 0, 1e9),
            ("block_tokens", 1, 10**6),
            ("keep_alive_s", 1e-3, 1e9),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}, must be from {least:g} to {most:g}")
        if self.kv_events and self.prefix_cache_tokens is None:
            raise ConfigError("kv_events needs a prefix cache")
        if not self.model:
            raise ConfigError("model is empty")
        if self.prefillers + self.ranks == 0:
            raise ConfigError("ranks is 0, and there is no prefiller either")

    @property
    def prefill(self) -> PrefillModel:
        return PrefillModel(self.prefillers, self.prefill_base_ns, self.prefill_ns_per_token)

    def compute_ns(self, tokens: int) -> int:
        """Return by how much a step is longer in which a rank computes `tokens` of a prompt."""
        return round(self.prefill_ns_per_token * tokens)

    def transfer_ns(self, tokens: int) -> int:
        """Return the duration of a prompt's KV transfer."""
        return self.transfer_base_ns + round(self.transfer_ns_per_token * tokens)

    def seconds(self, emulated_ns: float) -> float:
        """Return an emulated duration in seconds of the event loop's clock."""
        return emulated_ns / 1e9 / self.time_scale

    def blocks(self, tokens: int) -> int:
        """Return the KV blocks that so many tokens fill."""
        return -(-tokens // self.block_tokens)
