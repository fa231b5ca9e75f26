"""The settings of an emulated fleet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.sim.engines import PrefillModel, SimulatedEngineOptions

_YEAR_NS = 365 * 86_400 * 10**9


class DpMode(Enum):
    """How a proxy addresses a decode rank."""

    PORTS = "ports"  # Each rank is a server of its own.
    HEADER = "header"  # One server; `X-data-parallel-rank` names the rank.


class Preemption(Enum):
    """What happens to a request when a rank's KV cache has no room for it any more."""

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

    prefillers: int = 2  # P.
    ranks: int = 8  # G.
    batch_limit: int = 16  # B.
    step_base_ns: int = 30_000_000  # a of T = a + b x max load.
    step_ns_per_token: float = 200.0  # b.
    prefill_base_ns: int = 20_000_000  # c of the service time c + d x prompt tokens.
    prefill_ns_per_token: float = 50_000.0  # d.
    transfer_base_ns: int = 2_000_000  # e of the KV transfer's time e + f x prompt tokens.
    transfer_ns_per_token: float = 1_000.0  # f.
    rank_kv_tokens: int | None = None  # KV tokens that fit on a decode rank; None for no limit.
    prefiller_kv_tokens: int | None = None  # KV tokens that fit on a prefiller; None for no limit.
    block_tokens: int = 32  # Tokens of a KV block.
    # Size of each engine's prefix cache (of each rank's); None for none.
    prefix_cache_tokens: int | None = None
    kv_events: bool = False  # Whether prefillers publish the events of their prefix caches.
    # Probability that a batch of them is lost, repeated, late, misnumbered or wrong.
    kv_event_faults: float = 0.0
    lease_s: float = 30.0  # How long a prefiller keeps blocks that no decode rank pulls.
    connector: str = "nixl"
    dp_mode: DpMode = DpMode.PORTS
    # Ranks of a data-parallel group, in their order: if the engine of one is killed, the others end too,
    # so many seconds later.
    dp_size: int = 1
    dp_death_s: float = 1.0
    preemption: Preemption = Preemption.INTERNAL
    time_scale: float = 1.0  # How many emulated seconds pass in one second of the event loop.
    model: str = "emulated"
    adapters: tuple[str, ...] = ()
    # The names of the model and its adapters, for engines that serve another model, by the engine's
    # name ("decode/3").
    engine_models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # The versions of engines that tell another one than the rest, likewise.
    engine_versions: Mapping[str, str] = field(default_factory=dict)
    max_model_len: int = 131_072  # Limit of a request's prompt and output tokens together.
    mean_output_tokens: float = 256.0  # Mean length of an answer that ends by itself.
    # Whether usage has `cached_tokens` (`--enable-prompt-tokens-details`).
    prompt_tokens_details: bool = False
    # Whether chats begin with reasoning and usage has `reasoning_tokens` (`--reasoning-parser`).
    reasoning_parser: bool = False
    # Probability that a token ends within a character, so that its text is sent with the next
    # one's. The text determines which tokens, so every engine agrees; likewise for the next
    # setting.
    partial_utf8: float = 0.0
    # Probability that the API server lags behind the engine, so that a token is sent in one event
    # with the next.
    merged_outputs: float = 0.0
    # Who writes the answers of the chat, completions and token APIs.
    frontend: Frontend = Frontend.PYTHON
    # Idle time after which a server closes a connection (uvicorn's is 5 s).
    keep_alive_s: float = 5.0
    # How the decode ranks differ from plain ones.
    engines: SimulatedEngineOptions = field(default_factory=SimulatedEngineOptions)

    def __post_init__(self) -> None:
        for name, least, most in (
            ("prefillers", 0, 1_000),
            ("ranks", 0, 10_000),
            ("batch_limit", 1, 10**9),
            ("dp_size", 1, 10_000),
            ("dp_death_s", 0, 1e9),
            ("step_base_ns", 1, _YEAR_NS),  # With a step of no time the clock would not advance.
            ("step_ns_per_token", 0, 1e9),
            ("prefill_base_ns", 0, _YEAR_NS),
            ("prefill_ns_per_token", 0, 1e9),
            ("transfer_base_ns", 0, _YEAR_NS),
            ("transfer_ns_per_token", 0, 1e9),
            ("rank_kv_tokens", 1, 10**12),
            ("prefiller_kv_tokens", 1, 10**12),
            ("block_tokens", 1, 10**6),
            ("prefix_cache_tokens", 0, 10**12),
            ("kv_event_faults", 0, 1),
            ("lease_s", 1e-6, 1e9),
            ("time_scale", 1e-3, 1e6),
            ("max_model_len", 2, 10**9),
            ("mean_output_tokens", 1, inf),
            ("partial_utf8", 0, 1),
            ("merged_outputs", 0, 1),
            ("keep_alive_s", 1e-3, 1e9),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
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
