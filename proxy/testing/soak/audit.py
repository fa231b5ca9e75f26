"""What the proxy and the engines still hold, by their own pages, and what the proxy's log tells."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import fields

from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord

Line = Mapping[str, Any]
"""A line of the request log."""
# What the log writes as the record has it.
_LOGGED = {one.name for one in fields(RequestRecord)} - {"keys", "outcome"}


def held_by_proxy(state: Mapping[str, Any]) -> dict[str, int]:
    """Return what /admin/state says is in use, or not as at the start."""
    found = {name: state[name] for name in ("queued", "prefilling", "pooled", "decoding")}
    found["client connections"] = state["client_connections"]
    for rank in state["ranks"]:
        for name in ("kv_tokens", "bound", "started"):
            found[f"{name} of {rank['name']}"] = rank[name]
    for one in state["prefillers"]:
        for name in ("probes", "held_tokens"):
            found[f"{name} of {one['name']}"] = one[name]
    return {name: value for name, value in found.items() if value}


def not_up(state: Mapping[str, Any]) -> list[str]:
    """Return the engines that the proxy does not use, by /admin/state."""
    return [one["name"] for one in (*state["ranks"], *state["prefillers"]) if not one["open"]]


def held_by_engines(stats: Mapping[str, Any]) -> dict[str, object]:
    """Return what /emulation/stats says is in use."""
    found: dict[str, object] = {"leases": stats["leases"]["held"], "anything": not stats["idle"]}
    for name in ("loads", "running", "waiting", "arriving", "held_blocks"):
        found[name] = stats[name] if any(stats[name]) else None
    return {name: value for name, value in found.items() if value}


def read_log(log: Path) -> tuple[list[Line], list[str]]:
    """Return the lines of requests, and those that tell of an error of the proxy's own."""
    requests, errors = [], []
    for text in log.read_text().splitlines():
        line = json.loads(text)
        if "request_id" in line:
            requests.append(line)
        elif line["level"] == "error" or "exception" in line:
            errors.append(text)
    return requests, errors


def record_of(line: Line) -> RequestRecord:
    """Return what a log line tells of a request; its times are left out."""
    told = {name: value for name, value in line.items() if name in _LOGGED}
    return RequestRecord(
        **told,
        arrived_ns=0,
        arrived_unix_s=line["arrival_s"],
        outcome=Outcome(line["outcome"]),
    )


def phase_of(line: Line) -> str:
    """Return where a cancelled request was."""
    if line["queue_s"] is None:
        return "queued"
    if line["prefill_s"] is None:
        return "prefilling"
    if not line["rank"]:
        return "pooled"
    return "before the first token" if line["ttft_s"] is None else "streaming"
