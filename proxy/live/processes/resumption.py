"""How a relay's requests go on under another scheduler process.

Each is told as it stands, by the new ids of the engines. An engine may be missing that the earlier
scheduler process had: an administrator removed it, or it was added and is in no file. What it has not
begun to answer leaves it, as when an engine is removed in the presence of a scheduler process. A stream
that comes from it goes on, and nobody accounts for it until it ends or comes back.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.live.processes.adoption import live_message
from balanceroute.proxy.live.processes.from_relay import Live
from balanceroute.proxy.live.processes.links import Link
from balanceroute.proxy.live.processes.mirror import Renumbered
from balanceroute.proxy.live.request.phases import Phase

if TYPE_CHECKING:
    from balanceroute.proxy.live.scheduling.isolation import Isolation


def resumed(
    links: Mapping[RequestId, Link],
    renumbered: Renumbered,
    isolation: "Isolation",
) -> list[Live]:
    """Return what the new scheduler process is to hear of the requests that the last one accepted."""
    followed = [(number, link) for number, link in links.items() if link.accounted]
    for _, link in followed:
        if not (link.over or _renumber(link, renumbered)):
            _leave(link, renumbered, isolation)
    return [
        _live(link)
        for number, link in followed
        if number in links and link.accounted and not link.over
    ]


def _leave(link: Link, renumbered: Renumbered, isolation: "Isolation") -> None:
    session = link.session
    if session.phase is not Phase.STREAMING:
        for target in renumbered.missing:
            if session.is_on(target):
                isolation.run_for(session, "action", session.instance_removed, target)
    if not (link.over or _renumber(link, renumbered)):
        link.accounted = False


def _renumber(link: Link, renumbered: Renumbered) -> bool:
    return link.standing.renumber(renumbered.prefillers, renumbered.ranks)


def _live(link: Link) -> Live:
    link.begin_anew()
    session = link.session
    return live_message(
        link.message,
        link.standing,
        engine_id=link.engine_id,
        emitted=session.emitted_tokens,
        emitted_before=session.emitted.tokens,
        pulls=session.pullable,
    )
