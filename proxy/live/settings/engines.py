"""The engines that a configuration names: prefillers and decode servers, each of them once."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.topologies import CONNECTORS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from balanceroute.proxy.live.settings.declared import EngineAddresses
    from balanceroute.topologies import Topology

# vLLM's VLLM_MOONCAKE_BOOTSTRAP_PORT.
BOOTSTRAP_PORT = 8998


@dataclass(frozen=True, slots=True)
class PrefillServer:
    """One prefiller, and its bootstrap server if its connector has those."""

    url: EngineUrl
    bootstrap: EngineUrl | None = None


@dataclass(frozen=True, slots=True)
class DecodeServer:
    """One decode server.

    Attributes:
        url: Its address, without a rank.
        rank_ids: The data-parallel ranks behind it, in the order of the configuration; None if it
            is one rank, to which no header is sent.
        discover: Whether `rank_ids` is to be asked of the server.
    """

    url: EngineUrl
    rank_ids: tuple[int, ...] | None = None
    discover: bool = False

    @property
    def ranks(self) -> tuple[EngineUrl, ...]:
        """The addresses of its ranks; empty if they are still to be discovered."""
        if self.discover:
            return ()
        if self.rank_ids is None:
            return (self.url,)
        return tuple(self.url.at(rank) for rank in self.rank_ids)


def prefill_servers(
    addresses: "EngineAddresses", topology: "Topology | None", connector: str
) -> tuple[PrefillServer, ...]:
    """Return the prefillers of the flags, else of the file.

    Raises:
        ConfigError: There is none, one is named twice, or bootstrap servers do not fit.
    """
    servers: dict[EngineUrl, PrefillServer] = {}
    bootstraps: set[EngineUrl] = set()
    for label, url, given in _prefill_entries(addresses, topology):
        if url in servers:
            raise ConfigError(f"{label} names {url} twice")
        try:
            servers[url] = prefill_server(url, given, connector)
        except ConfigError as error:
            raise ConfigError(f"{label}: {error}") from None
        bootstrap = servers[url].bootstrap
        if bootstrap in bootstraps:
            reason = f"would share the bootstrap server {bootstrap}: name one for each"
            raise ConfigError(f"{label}: prefillers {reason} (--bootstrap)")
        if bootstrap is not None:
            bootstraps.add(bootstrap)
    if not servers:
        raise ConfigError(_none("--prefill", topology))
    return tuple(servers.values())


def prefill_server(url: EngineUrl, bootstrap: EngineUrl | None, connector: str) -> PrefillServer:
    """Return a prefiller.

    Args:
        url: Its address.
        bootstrap: Its bootstrap server; None for the usual one, if the connector has those.
        connector: The connector's name.

    Raises:
        ConfigError: The connector has no bootstrap servers.
    """
    if CONNECTORS[connector].has_bootstrap:
        return PrefillServer(url, bootstrap or EngineUrl("http", url.host, BOOTSTRAP_PORT))
    if bootstrap is not None:
        raise ConfigError(f"connector {connector} has no bootstrap servers")
    return PrefillServer(url)


def decode_servers(
    addresses: "EngineAddresses",
    topology: "Topology | None",
    prefill: "Iterable[PrefillServer]",
) -> tuple[DecodeServer, ...]:
    """Return the decode servers of the flags, else of the file.

    Raises:
        ConfigError: There is none, or a rank is named twice or in two ways, or is a prefiller.
    """
    prefillers = {server.url for server in prefill}
    servers: dict[EngineUrl, DecodeServer] = {}
    for label, server in _decode_entries(addresses, topology):
        url = server.url
        if url in prefillers:
            raise ConfigError(f"{label} names {url}, which is a prefiller")
        servers[url] = _merged(servers[url], server, label) if url in servers else server
    if not servers:
        raise ConfigError(_none("--decode", topology))
    return tuple(servers.values())


def _prefill_entries(
    addresses: "EngineAddresses", topology: "Topology | None"
) -> "Iterator[tuple[str, EngineUrl, EngineUrl | None]]":
    """Yield each prefiller with what to call its setting."""
    urls, bootstraps = addresses.prefill, addresses.bootstrap
    if urls:
        if bootstraps and len(bootstraps) != len(urls):
            counts = f"{len(bootstraps)} for {len(urls)} of --prefill"
            raise ConfigError(f"--bootstrap: {counts}, must be one for each")
        for url, bootstrap in zip(urls, bootstraps or [None] * len(urls), strict=True):
            yield "--prefill", url, bootstrap
        return
    if bootstraps:
        raise ConfigError("--bootstrap: goes with --prefill")
    if topology is None:
        return
    for i, entry in enumerate(topology.prefill):
        label = f"{topology.path}: prefill[{i}]"
        own = None
        if entry.bootstrap is not None:
            own = _own_address(f"{label}.bootstrap", entry.bootstrap)
        yield label, _own_address(f"{label}.url", entry.url), own


def _decode_entries(
    addresses: "EngineAddresses", topology: "Topology | None"
) -> "Iterator[tuple[str, DecodeServer]]":
    for url, discover in addresses.decode:
        ids = None if url.rank is None else (url.rank,)
        yield "--decode", DecodeServer(url.at(None), ids, discover)
    if addresses.decode or topology is None:
        return
    for i, entry in enumerate(topology.decode):
        label = f"{topology.path}: decode[{i}]"
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
    return f"{flag}: at least one is needed"
