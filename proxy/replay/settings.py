"""The settings of a replay."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from balanceroute.proxy.replay.body import Api
from balanceroute.proxy.service_levels import Targets


class Lengths(Enum):
    """How the engines get the length of an answer.

    HIDDEN: Emulated engines get it separately from the requests, so that a proxy between them and
        the replay learns a length only when the answer ends. `max_tokens` is the client's limit.
    MAX_TOKENS: As `max_tokens`, with `ignore_eos`. Any vLLM supports that, but the target knows the
        length of every answer in advance.
    """

    HIDDEN = "hidden"
    MAX_TOKENS = "max-tokens"


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How to replay; times and rates are the target's.

    Attributes:
        target: URL of the OpenAI-compatible endpoint.
        model: Its name; None for the first that the target lists.
        rate: Open loop: the trace's times are divided by this.
        concurrency: Closed loop: this many requests are always outstanding; None for open loop.
        time_scale: Seconds of the target's time that pass in one real second: more than 1 for an
            emulated fleet that runs faster than real time.
        timeout_s: Seconds until the answer must be complete.
        api_key: Sent as a bearer token; None for none.
        tenant_keys: The key of each tenant, sent instead; empty if all requests have one key.
        seed: Of the prompts' words.
        request_ids: The prefix of the requests' ids; clients that run at the same time need different
            ones.
        emulation: URL of an emulated fleet whose own figures are read; None for none.
        lengths: How the engines get the answers' lengths; HIDDEN needs `emulation`.
        drain: Whether to wait for every answer. Otherwise the replay ends when its last request is
            sent, which closes the window of the figures, and cancels what still runs.
        http3: Whether to send over HTTP/3.
        targets: What a good request gets, for figures by tenant and class; None for none of these.
    """

    target: str
    model: str | None = None
    api: Api = Api.COMPLETIONS
    rate: float = 1.0
    concurrency: int | None = None
    time_scale: float = 1.0
    timeout_s: float = 3600.0
    api_key: str | None = None
    tenant_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    seed: int = 0
    request_ids: str = "replay"
    emulation: str | None = None
    lengths: Lengths = Lengths.MAX_TOKENS
    drain: bool = True
    http3: bool = False
    targets: Targets | None = None
