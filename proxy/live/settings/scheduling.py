"""The settings of the scheduler, and of how requests go to engines."""

from dataclasses import dataclass
from math import inf
from pathlib import Path

from balanceroute.proxy.core.config import outside_name
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import POLICIES
from balanceroute.proxy.core.prefill import PREFILL_CHOICES
from balanceroute.proxy.core.setting import (
    choice,
    file,
    file_or_word,
    files_or_words,
    integer,
    named,
    number,
    numbers,
    seconds,
    switch,
    text,
    words,
)
from balanceroute.proxy.live.prediction import PREDICTORS
from balanceroute.proxy.live.request.leg_settings import Direct
from balanceroute.topologies import did_you_mean

OTHER_CHOICES = {
    "cache_aware": "cache-aware",
    "consistent_hash": "sticky",
    "kv_aware": "prefix-aware",
    "power_of_two": "power-of-two",
    "round_robin": "round-robin",
}
"""vllm-router's names of prefill choices."""


def policy_name(name: str) -> str:
    """Return the name of a policy; of one from outside its `module:function`.

    Raises:
        ConfigError: There is none of that name.
    """
    word = name.replace("_", "-")  # As vllm-router writes it.
    known = word if word in POLICIES else outside_name("policies", name)
    if known is not None:
        return known
    if OTHER_CHOICES.get(name, name) in PREFILL_CHOICES:
        reason = f"chooses prefillers: --prefill-choice {OTHER_CHOICES.get(name, name)}"
        raise ConfigError(f"is {name!r}, which {reason}")
    raise ConfigError(f"is {name!r}, which is no policy{did_you_mean(name, POLICIES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingSettings:
    """The choice of engines for requests, and its limits. None is no limit, or that of a rule."""

    policy: str = text(
        "br-h",
        "which rank takes a request, and when: "
        f"{', '.join(POLICIES)}, or module:function of your own",
        policy_name,
        metavar="NAME",
        aliases=("--decode-policy",),
    )
    prefill_choice: str = choice(
        "fewest-tokens",
        "which prefiller with room takes a request",
        words(PREFILL_CHOICES),
        aliases=("--prefill-policy",),
        also=OTHER_CHOICES,
    )
    local_prefill_tokens: int | None = integer(
        None,
        "a decode rank computes prompts of at most so many tokens itself, where that delays all "
        "requests less than a prefiller and the transfer; not with the connectors of vllm-ascend",
        1,
        10**9,
        shown_default="prefillers compute all",
        word="none",
    )
    predictor: str = file_or_word(
        "survival",
        f"for br-h: {', '.join(PREDICTORS)}, a file made by `balanceroute train`, or "
        "module:function of your own",
        tuple(PREDICTORS),
    )
    predictor_state: Path | None = file(
        "keeps what the predictor learns: read at start if it is there, saved every minute and at "
        "the end"
    )
    shadow_predictor: tuple[str, ...] = files_or_words(
        "predictors, as for --predictor, that are scored on the traffic and decide nothing",
        tuple(PREDICTORS),
    )
    seed: int = integer(0, "of random policies", 0, (1 << 63) - 1)
    # vLLM's own default of --max-num-seqs on most devices.
    batch: int = integer(
        256,
        "batch limit of a rank: the engines' --max-num-seqs; where it is not given, as they tell",
        1,
        10**9,
        metavar="B",
    )
    rank_speeds: tuple[float, ...] = numbers(
        "how fast each rank reads its KV cache, relative to the others, in the order of the ranks; "
        "repeated if they are more",
        1e-3,
        1e3,
        metavar="X[,X..]",
    )
    progress_veto: bool = switch(
        True,
        "leave a decode rank out that makes no tokens for two seconds and four of its own gaps while "
        "others do; what it has goes on elsewhere as far as it can",
    )
    dp_size: int | None = integer(
        None,
        "decode ranks of a data-parallel group, in their order, of which all end if one does; 1 if each "
        "stands alone",
        1,
        1024,
        shown_default="what their metrics tell",
        word="auto",
    )
    group_return_s: float = seconds(
        0.0,
        "how long requests wait for a data-parallel group that has ended, where no other rank is up",
        0,
        3600,
    )
    warm_up: bool = switch(
        True,
        "let an engine that begins or comes back beside others have one request, and one more at a "
        "time for each first token that it gives",
    )
    prefiller_utilisation_limit: float = number(
        0.95, "KV cache use of a prefiller above which it gets no further prefill", 0.01, 1
    )
    single_engine_limit: int = integer(
        64,
        "requests that one prefiller answers alone at a time (embeddings, scores, tokens, lists of "
        "models); further ones wait, up to the queue limit",
        1,
        10**6,
    )
    # What an engine says of a single request goes first.
    lease_s: float | None = number(
        None,
        "how long a prefiller keeps a KV cache that no decoder has asked for; inf for ever",
        0.1,
        inf,
        shown_default="the connector's",
        word="auto",
        metavar="S",
    )
    direct: Direct | None = choice(
        None,
        "which engines serve what cannot be split between the roles (n > 1, several prompts, echo, "
        "prompt_logprobs, ..), or whether it is rejected with status 400",
        {"auto": None, **named(Direct)},
        shown_default="prefill with the connectors of vllm-ascend, else decode",
    )
