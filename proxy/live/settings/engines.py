"""The engines that a configuration names: prefillers and decode servers, each of them once."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.settings.checks import event_address
from balanceroute.proxy.live.settings.declared import EngineAddresses, EngineSettings
from balanceroute.proxy.wire.messages import bracketed
from balanceroute.topologies import CONNECTORS, MAX_RANKS, KvFlow

if TYPE_CHECKING:
    from balanceroute.topologies.topology import Topology

# vLLM's VLLM_MOONCAKE_BOOTSTRAP_PORT.
BOOTSTRAP_PORT = 8998
MAX_SERVER_RANKS = 1024
"""Of one decode server. The largest that vLLM is run with has some dozens on a host."""


@dataclass(frozen=True, slots=True)
class PrefillServer:
    """One prefiller."""

    url: EngineUrl
    bootstrap: EngineUrl | None = None  # Its bootstrap server, if its connector has those.
    kv_events: str | None = None  # Where it publishes its KV cache events; None for nowhere.
    kv_replay: str | None = None  # Where it sends them again; None for nowhere.

    def event_addresses(self, ports: EngineSettings) -> tuple[str | None, str | None]:
        """Return `kv_events` and `kv_replay`, by the ports of the settings if it names neither."""
        if self.kv_events is not None:
            return self.kv_events, self.kv_replay
        return self._at(ports.kv_events_port), self._at(ports.kv_replay_port)

    def _at(self, port: int | None) -> str | None:
        return None if port is None else f"tcp://{bracketed(self.url.host)}:{port}"


@dataclass(frozen=True, slots=True)
class DecodeServer:
    """One decode server."""

    url: EngineUrl  # Its address, without a rank.
    # The data-parallel ranks behind it, in the order of the configuration; None if it is one rank,
    # to which no header is sent.
    rank_ids: tuple[int, ...] | None = None
    discover: bool = False  # Whether `rank_ids` is to be asked of the server.

    @property
    def ranks(self) -> tuple[EngineUrl, ...]:
        """The addresses of its ranks; empty if they are still to be discovered."""
        if self.discover:
            return ()
        if self.rank_ids is None:
            return (self.url,)
        return tuple(self.url.at(rank) for rank in self.rank_ids)


def check_ranks(url: EngineUrl, ranks: int, room: int = MAX_RANKS) -> None:
    """Check that neither a server nor the fleet with it has too many ranks.

    Args:
        url: Of the server.
        ranks: How many it has.
        room: How many the fleet may still have.

    Raises:
        ConfigError: It has.
    """
    if not 1 <= ranks <= MAX_SERVER_RANKS:
        raise ConfigError(f"{url.base}: ranks is {ranks}, must be from 1 to {MAX_SERVER_RANKS}")
    if ranks > room:
        reason = f"the fleet may have {MAX_RANKS} ranks, of which {max(0, room)} are left"
        raise ConfigError(f"{url.base}: ranks is {ranks}: {reason}")


def prefill_servers(
    addresses: EngineAddresses,
    topology: "Topology | None",
    connector: str,
    where: Callable[[str], str],
    *,
    may_be_none: bool = False,
) -> tuple[PrefillServer, ...]:
    """Return the prefillers of the flags, else of the file; with `may_be_none` perhaps none.

    `where` names a setting for errors: by its flag, or by its variable if that gave it.

    Raises:
        ConfigError: There is none, one is named twice, or bootstrap servers do not fit.
    """
    servers: dict[EngineUrl, PrefillServer] = {}
    bootstraps: set[EngineUrl] = set()
    for label, given in _prefill_entries(addresses, topology, where):
        url = given.url
        if url in servers:
            raise ConfigError(f"{label} names {url} twice")
        try:
            bare = prefill_server(url, given.bootstrap, connector)
        except ConfigError as error:
            raise ConfigError(f"{label}: {error}") from None
        servers[url] = replace(bare, kv_events=given.kv_events, kv_replay=given.kv_replay)
        bootstrap = servers[url].bootstrap
        if bootstrap in bootstraps:
            reason = f"would share the bootstrap server {bootstrap}: name one for each"
            raise ConfigError(f"{label}: prefillers {reason} (--bootstrap)")
        if bootstrap is not None:
            bootstraps.add(bootstrap)
    if not (servers or may_be_none):
        raise ConfigError(_none("--prefill", topology))
    return tuple(servers.values())


def prefill_server(url: EngineUrl, bootstrap: EngineUrl | None, connector: str) -> PrefillServer:
    """Return a prefiller; `bootstrap` is None for the usual server, if the connector has those.

    Raises:
        ConfigError: The connector has no bootstrap servers.
    """
    if CONNECTORS[connector].flow is KvFlow.NAMED:
        return PrefillServer(url, bootstrap or EngineUrl("http", url.host, BOOTSTRAP_PORT))
    if bootstrap is not None:
        raise ConfigError(f"connector {connector} has no bootstrap servers: mooncake has")
    return PrefillServer(url)


def decode_servers(
    addresses: EngineAddresses,
    topology: "Topology | None",
    prefill: Iterable[PrefillServer],
    where: Callable[[str], str],
    *,
    may_be_none: bool = False,
) -> tuple[DecodeServer, ...]:
    """Return the decode servers of the flags, else of the file; see `prefill_servers`.

    Raises:
        ConfigError: There is none, or a rank is named twice or in two ways, or is a prefiller.
    """
    prefillers = {server.url for server in prefill}
    servers: dict[EngineUrl, DecodeServer] = {}
    for label, server in _decode_entries(addresses, topology, where):
        url = server.url
        if url in prefillers:
            raise ConfigError(f"{label} names {url}, which is a prefiller")
        servers[url] = _merged(servers[url], server, label) if url in servers else server
    if not (servers or may_be_none):
        raise ConfigError(_none("--decode", topology))
    return tuple(servers.values())


def _prefill_entries(
    addresses: EngineAddresses, topology: "Topology | None", where: Callable[[str], str]
) -> Iterator[tuple[str, PrefillServer]]:
    """Yield each prefiller as it is given, with what to call its setting."""
    urls = addresses.prefill
    for name, each in (
        (where("bootstrap"), addresses.bootstrap),
        (where("kv_events"), addresses.kv_events),
        (where("kv_replay"), addresses.kv_replay),
    ):
        if each and not urls:
            raise ConfigError(f"{name}: goes with --prefill")
        if each and len(each) != len(urls):
            counts = f"{len(each)} for {len(urls)} of --prefill"
            raise ConfigError(f"{name}: {counts}, must be one for each")
    if addresses.kv_replay and not addresses.kv_events:
        raise ConfigError("--kv-replay: needs --kv-events too")
    for place, url in enumerate(urls):
        yield (
            where("prefill"),
            PrefillServer(
                url,
                addresses.bootstrap[place] if addresses.bootstrap else None,
                addresses.kv_events[place] if addresses.kv_events else None,
                addresses.kv_replay[place] if addresses.kv_replay else None,
            ),
        )
    if urls or topology is None:
        return
    for i, entry in enumerate(topology.prefill):
        label = f"{topology.path}: {topology.place}prefill[{i}]"
        own = None
        if entry.bootstrap is not None:
            own = _own_address(f"{label}.bootstrap", entry.bootstrap)
        events = _event_address(f"{label}.kv_events", entry.kv_events)
        replay = _event_address(f"{label}.kv_replay", entry.kv_replay)
        if replay is not None and events is None:
            raise ConfigError(f"{label}.kv_replay: needs kv_events too")
        yield label, PrefillServer(_own_address(f"{label}.url", entry.url), own, events, replay)


def _decode_entries(
    addresses: EngineAddresses, topology: "Topology | None", where: Callable[[str], str]
) -> Iterator[tuple[str, DecodeServer]]:
    for url, discover in addresses.decode:
        ids = None if url.rank is None else (url.rank,)
        yield where("decode"), DecodeServer(url.at(None), ids, discover)
    if addresses.decode or topology is None:
        return
    for i, entry in enumerate(topology.decode):
        label = f"{topology.path}: {topology.place}decode[{i}]"
        url = _own_address(f"{label}.url", entry.url)
        yield label, DecodeServer(url, entry.rank_ids, entry.discover)


def _merged(one: DecodeServer, other: DecodeServer, label: str) -> DecodeServer:
    """Return one server with the ranks of two entries."""
    if one.discover or other.discover or one.rank_ids is None or other.rank_ids is None:
        raise ConfigError(f"{label} names {one.url} twice")
    for url in other.ranks:
        if url in one.ranks:
            raise ConfigError(f"{label} names {url} twice")
    return DecodeServer(one.url, one.rank_ids + other.rank_ids)


def _event_address(label: str, word: str | None) -> str | None:
    try:
        return None if word is None else event_address(word)
    except ConfigError as error:
        raise ConfigError(f"{label} {error}") from None


def _own_address(label: str, word: str) -> EngineUrl:
    try:
        url = EngineUrl.parse(word)
    except ConfigError as error:
        raise ConfigError(f"{label} {error}") from None
    if url.rank is not None:
        raise ConfigError(f"{label} is {url.name!r}: ranks are named by rank_ids = [{url.rank}]")
    return url


def _none(flag: str, topology: "Topology | None") -> str:
    if topology is not None and topology.emulation is not None:
        return f"{topology.path}: its engines are emulated: start them with `balanceroute up`"
    return f"{flag}: at least one is needed, or --discover"
