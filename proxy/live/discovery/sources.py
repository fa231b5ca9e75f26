"""The sources that the settings name, and who follows them."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.live.discovery.dns_name import DnsName
from balanceroute.proxy.live.discovery.kubernetes import ACCOUNT, KubernetesSlices
from balanceroute.proxy.live.discovery.reconciler import Reconciler
from balanceroute.proxy.live.discovery.watched_file import WatchedFile
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.security.tls import engine_context
from balanceroute.proxy.wire.http1.client import Endpoint

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from balanceroute.proxy.live.control.roster import Roster
    from balanceroute.proxy.live.control.standing import Standing
    from balanceroute.proxy.live.discovery.found import Found, Source
    from balanceroute.proxy.live.settings.discovery import DiscoverySettings, EngineSource


def make_reconciler(
    settings: "DiscoverySettings",
    roster: "Roster",
    standing: "Standing",
    *,
    rng: "random.Random",
    ask: "Callable[[Found], Awaitable[int | None]]",
) -> Reconciler:
    """Return who registers what is found.

    Args:
        settings: Where it is found.
        roster: Takes it.
        standing: What is left of the time before a restart.
        rng: Spreads what sources ask.
        ask: See `Reconciler`.
    """
    present = roster.targets()
    return Reconciler(
        roster,
        make_sources(settings, rng, hears=roster.instances.engine_blocks is not None),
        ask=ask,
        hold_s=settings.discover_hold_s,
        limit=settings.discover_limit,
        clock=asyncio.get_running_loop().time,
        owned=set(standing.discovered).intersection(present),
        leaving=set(standing.leaving).intersection(present),
    )


def make_sources(
    settings: "DiscoverySettings", rng: "random.Random", *, hears: bool
) -> "list[Source]":
    """Return the sources, in the order of the settings.

    Args:
        settings: What they are.
        rng: Spreads what they ask.
        hears: Whether KV cache events of prefillers are followed.
    """
    return [_make(one, settings, rng, hears=hears) for one in settings.discover]


def _make(
    source: "EngineSource", settings: "DiscoverySettings", rng: "random.Random", *, hears: bool
) -> "Source":
    if source.kind == "file":
        interval_s = settings.discover_interval_s
        return WatchedFile(Path(source.place), interval_s=interval_s, hears=hears)
    if source.kind == "dns":
        assert source.role is not None
        url = EngineUrl.parse(f"http://{source.place}")
        return DnsName(source.role, url.host, url.port, interval_s=settings.discover_interval_s)
    selector, _, namespace = source.place.partition("@")
    account = settings.kubernetes_account or ACCOUNT

    def connect() -> Endpoint:
        url = EngineUrl.parse(settings.kubernetes_api)
        tls = None
        if url.scheme == "https":
            tls = engine_context(account / "ca.crt", insecure=False)
        return Endpoint(url.host, url.port, ssl=tls)

    return KubernetesSlices(
        selector, namespace or None, source.role, connect=connect, account=account, rng=rng
    )
