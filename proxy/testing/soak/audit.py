"""What the proxy and the engines still hold, and whether the log tells what the clients saw."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from balanceroute.proxy.testing.soak.plans import Plan
from balanceroute.proxy.testing.soak.verdict import Kind, Verdict

_OUTCOMES = re.compile(r"^balanceroute_requests_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
# An engine's 429 that no other engine could mend is a client_error, as every 4xx.
_FAILED = frozenset({"upstream_error", "expired", "rejected", "client_error"})

Line = Mapping[str, Any]
"""A line of the request log."""


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
    """Return what /emulation/stats says is in use, or was read of another prompt's KV cache."""
    found: dict[str, object] = {
        "leases": stats["leases"]["held"],
        "misreads": stats["misreads"],
        "anything": not stats["idle"],
    }
    for name in ("loads", "running", "waiting", "arriving", "held_blocks"):
        found[name] = stats[name] if any(stats[name]) else None
    return {name: value for name, value in found.items() if value}


def outcomes_counted(page: str) -> Counter[str]:
    """Return the requests by outcome, by the proxy's page of metrics."""
    counted: Counter[str] = Counter()
    for labels, value in _OUTCOMES.findall(page):
        counted[dict(_LABEL.findall(labels))["outcome"]] += int(float(value))
    return +counted


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


def contradiction(plan: Plan, verdict: Verdict, line: Line | None) -> str:
    """Return how a request's log line contradicts what its client saw; empty if it does not."""
    leaving = plan.leaving
    if line is None:
        # Who leaves at once may be gone before the request is read.
        unread = verdict.kind is Kind.LEFT and not verdict.status
        return "" if unread and leaving is not None else "it has no line"
    if leaving is not None and leaving.in_body:
        return "it was never sent whole"
    ending = line["outcome"], line["status"], line["output_tokens"]
    match verdict.kind:
        case Kind.RIGHT if ending != ("ok", 200, plan.tokens):
            return f"{ending}, but the client had all {plan.tokens} tokens"
        case Kind.ENDED_EARLY if ending != ("ok", 200, len(plan.texts)):
            return f"{ending}, but the client had {len(plan.texts)} tokens"
        case Kind.ERROR if ending[0] not in _FAILED or ending[1] != verdict.status:
            return f"{ending}, but the client had an error with status {verdict.status}"
        case Kind.LEFT if ending[0] == "ok" and ending[2] not in (plan.tokens, len(plan.texts)):
            return f"{ending}, but the answer has {plan.tokens} tokens"
        case _:
            return ""


def phase_of(line: Line) -> str:
    """Return where a cancelled request was."""
    if line["queue_s"] is None:
        return "queued"
    if line["prefill_s"] is None:
        return "prefilling"
    if not line["rank"]:
        return "pooled"
    return "before the first token" if line["ttft_s"] is None else "streaming"
