"""The settings of a replay."""

from dataclasses import dataclass
from enum import Enum

from balanceroute.proxy.replay.body import Api


class Lengths(Enum):
    """How the engines learn how long an answer is to be.

    HIDDEN: Emulated engines are told apart from the requests, so that whatever is between them and
        the replay learns a length when the answer ends. `max_tokens` is the request's own limit.
    MAX_TOKENS: As `max_tokens`, with `ignore_eos`. Any vLLM can do that; the target is told the
        length of every answer in advance.
    """

    HIDDEN = "hidden"
    MAX_TOKENS = "max-tokens"


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How to replay; times and rates are the target's.

    Attributes:
        target: URL of the OpenAI-compatible endpoint.
        model: The model's name; None for the first that the target lists.
        api: Which endpoint.
        rate: Open loop: the trace's times are divided by this.
        concurrency: Closed loop: this many requests are always outstanding; None for open loop.
        time_scale: Seconds of the target's time that pass in one real second: more than 1 for an
            emulated fleet that runs faster than real time.
        timeout_s: Seconds until the whole answer must be there.
        api_key: Sent as a bearer token; None for none.
        seed: Of the prompts' words.
        request_ids: What the ids of the requests begin with; clients at work at the same time need
            different ones.
        emulation: URL of an emulated fleet whose own figures are read; None for none.
        lengths: How the engines learn the answers' lengths; HIDDEN needs `emulation`.
        drain: Whether to wait for every answer. Else the replay ends when its last request is sent,
            which is when the window of the figures closes, and gives up what runs then.
    """

    target: str
    model: str | None = None
    api: Api = Api.COMPLETIONS
    rate: float = 1.0
    concurrency: int | None = None
    time_scale: float = 1.0
    timeout_s: float = 3600.0
    api_key: str | None = None
    seed: int = 0
    request_ids: str = "replay"
    emulation: str | None = None
    lengths: Lengths = Lengths.MAX_TOKENS
    drain: bool = True
