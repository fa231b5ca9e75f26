"""The engines that a topology names by their addresses: `[[prefill]]` and `[[decode]]`."""

from dataclasses import dataclass

from balanceroute.topologies.engines import MAX_RANKS
from balanceroute.topologies.tables import Table, is_integer

_PREFILL_KEYS = ("bootstrap", "kv_events", "kv_replay")


@dataclass(frozen=True, slots=True)
class PrefillEntry:
    """One prefiller: its URL, and what else the file names.

    Attributes:
        bootstrap: The URL of its Mooncake bootstrap server.
        kv_events: Where it publishes its KV cache events.
        kv_replay: Where it sends them again.
    """

    url: str
    bootstrap: str | None = None
    kv_events: str | None = None
    kv_replay: str | None = None


@dataclass(frozen=True, slots=True)
class DecodeEntry:
    """One decode server.

    Attributes:
        rank_ids: The data-parallel ranks that it hosts; None if it is one rank with its own URL.
        discover: Whether the proxy asks the server for its ranks.
    """

    url: str
    rank_ids: tuple[int, ...] | None = None
    discover: bool = False


def prefill_entries(table: Table) -> tuple[PrefillEntry, ...]:
    """Return the prefillers of a table. Raises TopologyError."""
    return tuple(
        PrefillEntry(entry.required_text("url"), *map(entry.text, _PREFILL_KEYS))
        for entry in table.tables("prefill", ("url", *_PREFILL_KEYS))
    )


def decode_entries(table: Table) -> tuple[DecodeEntry, ...]:
    """Return the decode servers of a table. Raises TopologyError."""
    entries, ranks = [], 0
    for entry in table.tables("decode", ("url", "ranks", "rank_ids")):
        entries.append(_decode_entry(entry))
        ranks += len(entries[-1].rank_ids or (0,))
        if ranks > MAX_RANKS:
            raise entry.error("ranks", f"all decode servers may have {MAX_RANKS}, and have more")
    return tuple(entries)


def _decode_entry(entry: Table) -> DecodeEntry:
    url = entry.required_text("url")
    ranks = entry.get("ranks")
    ids = entry.get("rank_ids")
    if ids is not None:
        if ranks is not None:
            raise entry.error("rank_ids", "excludes ranks")
        if (
            not isinstance(ids, list)
            or not ids
            or not all(is_integer(i, 0, MAX_RANKS - 1) for i in ids)
        ):
            reason = f"must be a list of integers from 0 to {MAX_RANKS - 1}, is {ids!r}"
            raise entry.error("rank_ids", reason)
        if len(set(ids)) != len(ids):
            raise entry.error("rank_ids", f"names a rank twice: {ids!r}")
        return DecodeEntry(url, tuple(ids))
    match ranks:
        case None:
            return DecodeEntry(url)
        case "discover":
            return DecodeEntry(url, discover=True)
        case int() if is_integer(ranks, 1, MAX_RANKS):
            return DecodeEntry(url, tuple(range(ranks)))
        case _:
            reason = f"must be an integer from 1 to {MAX_RANKS} or 'discover', is {ranks!r}"
            raise entry.error("ranks", reason)
