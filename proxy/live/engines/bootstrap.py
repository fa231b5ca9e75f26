"""What a Mooncake prefiller's bootstrap server tells: the engine's id, new with each start.

`GET <bootstrap>/query` of vLLM 0.32 answers {"<dp rank>": {"engine_id": ..., "worker_addr": ...}}.
"""

import json
from dataclasses import dataclass

from balanceroute.proxy.live.engines.faults import Fault, FetchError

MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BootstrapIdentity:
    """A prefiller as decoders find it; see `PrefillerIdentity`."""

    engine_id: str
    bootstrap_address: str


def read_identity(page: bytes, bootstrap: str) -> BootstrapIdentity:
    """Return the identity of a prefiller's first data-parallel rank.

    Raises:
        FetchError: The page is not what a bootstrap server answers.
    """
    try:
        engine_id = json.loads(page)["0"]["engine_id"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise FetchError(Fault.PROTOCOL, f"{bootstrap} names no engine") from None
    if not isinstance(engine_id, str) or not engine_id:
        raise FetchError(Fault.PROTOCOL, f"{bootstrap} names no engine")
    return BootstrapIdentity(engine_id, bootstrap)
