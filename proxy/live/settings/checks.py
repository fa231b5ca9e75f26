"""Checks of the text of a setting. Messages read on from the setting's name."""

import re

from balanceroute.proxy.core.errors import ConfigError, shown
from balanceroute.proxy.live.engines.engine_url import EngineUrl, valid_host
from balanceroute.proxy.live.security import Secret, as_secret

_ORIGIN = re.compile(r"https?://[a-z0-9.\-_\[\]:]{1,256}")  # As browsers write it.
_MODEL = re.compile(r"[!-~]{1,256}")
_METRIC = re.compile(r"(?!balanceroute_|process_)[a-zA-Z_:][a-zA-Z0-9_:]{0,127}")
PICKER_METRICS = {
    "waiting": "vllm:num_requests_waiting",
    "running": "vllm:num_requests_running",
    "kv-usage": "vllm:kv_cache_usage_perc",
    "cache": "vllm:cache_config_info",
    "lora": "vllm:lora_requests_info",
}
"""The metrics of a model server that endpoint pickers read, with vLLM's names."""


def decode_address(word: str) -> tuple[EngineUrl, bool]:
    """Read `URL`, `URL@RANK` or `URL@discover`: the address, and whether to ask it for its ranks.

    Raises:
        ConfigError: It is none of them.
    """
    if word.endswith("@discover"):
        return EngineUrl.parse(word.removesuffix("@discover")), True
    return EngineUrl.parse(word), False


def own_address(word: str) -> EngineUrl:
    """Read an address without a rank. Raises ConfigError: it is none, or names a rank."""
    if word.isdecimal():  # As vllm-router has it behind a prefiller's address.
        raise ConfigError(f"is {word!r}: a bootstrap port goes to --bootstrap http://HOST:{word}")
    url = EngineUrl.parse(word)
    if url.rank is not None:
        raise ConfigError(f"is {url.name!r}: only decode engines are addressed by rank")
    return url


def base_address(word: str) -> str:
    """Return a URL without a path or a rank; see `own_address`."""
    return own_address(word).base


def event_address(word: str) -> str:
    """Check an address of KV cache events: `tcp://HOST:PORT`. Raises ConfigError."""
    if not word.startswith("tcp://"):
        raise ConfigError(f"is {shown(word)}, must be tcp://HOST:PORT")
    url = own_address(f"http://{word.removeprefix('tcp://')}")
    return f"tcp://{url.base.removeprefix('http://')}"


def model_name(word: str) -> str:
    """Check the name of a model. Raises ConfigError."""
    if not _MODEL.fullmatch(word):
        raise ConfigError(f"is {shown(word)}, must be 1 to 256 visible ASCII characters")
    return word


def picker_metrics(word: str) -> tuple[tuple[str, str], ...]:
    """Read `vllm` for all of `PICKER_METRICS`, or `WHAT=NAME` for one of them.

    Raises:
        ConfigError: It is neither.
    """
    what, _, name = word.partition("=")
    if word == "vllm":
        return tuple(PICKER_METRICS.items())
    if what not in PICKER_METRICS or not _METRIC.fullmatch(name):
        raise ConfigError(
            f"is {shown(word)}, must be vllm or WHAT=NAME, with WHAT of {', '.join(PICKER_METRICS)} "
            "and NAME of a metric that is not the proxy's own"
        )
    return ((what, name),)


def api_key(word: str) -> Secret:
    """Return a key of clients.

    Raises:
        ConfigError: It can be none. The message does not show it.
    """
    try:
        return as_secret(word.encode(errors="replace"))
    except ConfigError as error:
        raise ConfigError(f"has something that is no key: {error}") from None


def web_origin(word: str) -> str:
    """Check the origin of a page, or `*` for all. Raises ConfigError."""
    if word != "*" and not _ORIGIN.fullmatch(word):
        raise ConfigError(f"is {shown(word)}, must be *, or http:// or https:// and a host")
    return word


def host_name(word: str) -> str:
    """Check an address to listen on, or a name. Raises ConfigError."""
    if "://" in word or word.count(":") == 1:
        reason = "a name or an address alone: no http://, and the port goes to a setting of its own"
        raise ConfigError(f"is {shown(word)}, must be {reason}")
    try:
        return valid_host(word)
    except ConfigError as error:
        raise ConfigError(f"is {shown(word)}: it {error}") from None
