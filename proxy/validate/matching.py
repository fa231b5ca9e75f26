"""Which step trace is which decode rank's.

The proxy knows a rank by its URL, followed by "@rank" if several ranks share it. An engine knows the
port of its API server, from its command line, and its data-parallel rank. So a trace belongs to a rank
if port and rank agree, and the host too if several traces agree otherwise. With hybrid load balancing
the number in a URL counts the ranks of that server alone, the engine's number all ranks of the group:
the server's first rank is then 0 in the URL. If no engine knows its port, the data-parallel ranks alone
decide, provided that each occurs once. What the operator assigned takes precedence.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from balanceroute.engine_patch.reader import EngineTrace, TraceFormatError, read_steps
from balanceroute.engine_patch.records import SUFFIX
from balanceroute.proxy.validate.errors import ValidationError

_NAME = re.compile(r"https?://(?P<host>\[[^\]]*\]|[^:/@]*)(:(?P<port>\d+))?(@(?P<rank>\d+))?")


def read_traces(folder: Path) -> list[EngineTrace]:
    """Return the traces in a folder that have a step, by name.

    Raises:
        ValidationError: The folder has no trace, or one that cannot be used, or none has a step.
        OSError: A file cannot be read.
    """
    if not folder.is_dir():
        raise ValidationError(f"{folder}: not a directory")
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise ValidationError(f"{folder}: no step trace (*{SUFFIX}) in it")
    traces = [_read(path) for path in paths]
    filled = [trace for trace in traces if len(trace.steps)]
    if not filled:
        raise ValidationError(f"{folder}: {len(paths)} step traces, and no step in any of them")
    return filled


def match(
    traces: Sequence[EngineTrace],
    names: Sequence[str],
    *,
    given: Mapping[str, Path],
    span_ns: tuple[int, int],
) -> dict[str, EngineTrace]:
    """Return the traces of ranks, by the ranks' names; ranks without a trace are left out.

    Args:
        traces: With a step each.
        names: The ranks' names in the proxy.
        given: Paths of traces that the operator assigned to ranks.
        span_ns: When the proxy's first and last samples were taken. A trace outside of it is
            another run's.

    Raises:
        ValidationError: An assignment does not fit, a rank has two traces, or none has one.
    """
    found = {name: _given(name, path, traces, names) for name, path in given.items()}
    taken = {trace.path for trace in found.values()}
    if len(taken) < len(found):
        raise ValidationError("--map gives one trace to two ranks")
    free = [trace for trace in traces if trace.path not in taken and _may_decode(trace, span_ns)]
    for name in names:
        if name not in found:
            own = _own(name, free)
            if own is not None:
                _check_new(name, own, found)
                found[name] = own
    if not found:
        found = _by_rank_alone(names, free)
    if not found:
        known = ", ".join(sorted(trace.path.name for trace in traces))
        reason = f"no trace fits a rank: the proxy has {', '.join(names)}, the folder {known}"
        raise ValidationError(f"{reason}; give them with --map RANK=FILE")
    return {name: found[name] for name in names if name in found}


def _read(path: Path) -> EngineTrace:
    try:
        return read_steps(path)
    except TraceFormatError as error:
        raise ValidationError(str(error)) from error


def _given(
    name: str, path: Path, traces: Sequence[EngineTrace], names: Sequence[str]
) -> EngineTrace:
    if name not in names:
        raise ValidationError(f"--map: no rank is called {name!r}, but {', '.join(names)}")
    for trace in traces:
        if trace.path == path or trace.path.name == str(path):
            return trace
    trace = _read(path)
    if not len(trace.steps):
        raise ValidationError(f"--map: {path} has no step")
    return trace


def _may_decode(trace: EngineTrace, span_ns: tuple[int, int]) -> bool:
    begin_ns, end_ns = int(trace.steps["start_ns"].min()), int(trace.steps["end_ns"].max())
    if end_ns < span_ns[0] or begin_ns > span_ns[1]:
        return False
    return trace.header.get("kv_role") != "kv_producer"


def _own(name: str, traces: Sequence[EngineTrace]) -> EngineTrace | None:
    """Return the trace of a rank by port and data-parallel rank, if one has them."""
    address = _NAME.fullmatch(name)
    if address is None:
        return None
    port = int(address["port"] or (443 if name.startswith("https") else 80))
    rank = None if address["rank"] is None else int(address["rank"])
    of_port = [trace for trace in traces if trace.header.get("port") == port]
    of_host = [trace for trace in of_port if trace.header.get("host") == address["host"]]
    fitting = _of_rank(rank, of_host) or _of_rank(rank, of_port)
    if len(fitting) > 1:
        files = ", ".join(trace.path.name for trace in fitting)
        raise ValidationError(f"{name} fits several traces, {files}: choose with --map RANK=FILE")
    return fitting[0] if fitting else None


def _of_rank(rank: int | None, traces: Sequence[EngineTrace]) -> list[EngineTrace]:
    if rank is None or not traces:
        return list(traces)
    ranks = [trace.header.get("dp_rank") for trace in traces]
    first = min((number for number in ranks if isinstance(number, int)), default=0)
    return [trace for trace, number in zip(traces, ranks, strict=True) if number == rank] or [
        trace for trace, number in zip(traces, ranks, strict=True) if number == first + rank
    ]


def _check_new(name: str, trace: EngineTrace, found: Mapping[str, EngineTrace]) -> None:
    for other, taken in found.items():
        if taken is trace:
            reason = f"{trace.path.name} fits {other} and {name}"
            raise ValidationError(f"{reason}: choose with --map RANK=FILE")


def _by_rank_alone(names: Sequence[str], traces: Sequence[EngineTrace]) -> dict[str, EngineTrace]:
    by_rank = {trace.header.get("dp_rank"): trace for trace in traces}
    addresses = {name: _NAME.fullmatch(name) for name in names}
    ranks = [
        int(address["rank"])
        for address in addresses.values()
        if address is not None and address["rank"]
    ]
    any_port_known = any(trace.header.get("port") is not None for trace in traces)
    unique = len(by_rank) == len(traces) and len(set(ranks)) == len(ranks) == len(names)
    if any_port_known or not unique:
        return {}
    pairs = zip(names, ranks, strict=True)
    return {name: by_rank[rank] for name, rank in pairs if rank in by_rank}
