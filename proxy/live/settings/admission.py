"""The settings of who is let in, and of who goes first."""

from dataclasses import dataclass
from pathlib import Path

from balanceroute.proxy.core.admission import ADMISSIONS
from balanceroute.proxy.core.queueing import FAIR_COSTS, QUEUE_ORDERS
from balanceroute.proxy.live.settings.setting import choice, file, integer, switch, words


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """Who is let in, and in what order requests wait."""

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
