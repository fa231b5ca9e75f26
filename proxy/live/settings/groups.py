"""What several deployments behind one proxy must not say, or not all of them."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.settings.declared import (
    ExchangeLimits,
    ListeningSettings,
    LogSettings,
)
from balanceroute.proxy.live.settings.http3 import Http3Settings
from balanceroute.proxy.live.settings.setting import flag_of, settings_of

if TYPE_CHECKING:
    from balanceroute.proxy.live.settings.config import GroupConfig, ProxyConfig
    from balanceroute.topologies import GroupEntry, Topology

# There is one public listener, one log, and one list of tenants.
_OF_ALL = frozenset(
    {
        *chain.from_iterable(
            (one.name for one in settings_of(section))
            for section in (ListeningSettings, Http3Settings, ExchangeLimits, LogSettings)
        ),
        *("tenants", "client_priority", "client_deadline"),
        *("engine_key_file", "drain_timeout_s", "roster_state"),
    }
)
# They say which engines there are.
_OF_ONE = ("prefill", "decode", "bootstrap", "kv_events", "kv_replay", "connector", "model")


def check_groups(topology: "Topology", flags: Mapping[str, object], whole: "ProxyConfig") -> None:
    """Check what is said of all groups, and that none says what is said of all.

    Raises:
        ConfigError: A setting is in the wrong place, or cannot be with several groups.
    """
    for name in _OF_ONE:
        if flags.get(name) is not None:
            reason = f"names engines of one deployment, and {topology.path} has [[model]] tables"
            raise ConfigError(f"{flag_of(name)}: {reason}")
    if whole.discovery.discover:
        raise ConfigError(
            f"{topology.path}: discover: each [[model]] table finds its own engines, by [model.proxy]"
        )
    for group in topology.groups:
        check_own(topology, group)


def check_own(topology: "Topology", group: "GroupEntry") -> None:
    """Check that a group says nothing that holds for all.

    Raises:
        ConfigError: It does.
    """
    for name in group.proxy:
        if name in _OF_ALL:
            place = f"{topology.path}: [{group.place}.proxy].{name}"
            raise ConfigError(f"{place}: belongs into [proxy]: it holds for all groups")


def check_names(topology: "Topology", group: "GroupEntry") -> None:
    """Check that a group that is added has no name of an alias.

    Raises:
        ConfigError: It has.
    """
    for name in (group.name, *group.models):
        if name in topology.aliases:
            raise ConfigError(f"{group.place}: {name!r} is an alias")


def check_apart(topology: "Topology", groups: "Iterable[GroupConfig]") -> None:
    """Check that no two groups have an engine or a file in common.

    Raises:
        ConfigError: They have.
    """
    owners: dict[object, str] = {}
    for group, entry in zip(groups, topology.groups, strict=True):
        config, place = group.config, f"{topology.path}: {entry.place}"
        urls = [*(one.url for one in config.prefillers), *(one.url for one in config.decoders)]
        found: list[tuple[object, str]] = [(url.base, f"the engine {url.base}") for url in urls]
        state = config.scheduling.predictor_state
        if state is not None:
            found.append((state, f"predictor_state {state}"))
        for key, what in found:
            if owners.setdefault(key, place) != place:
                raise ConfigError(f"{place} has {what}, which {owners[key]} has already")
