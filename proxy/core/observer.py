"""Who looks on: told of every event that a scheduler handled, and of the actions that it asked for."""

from collections.abc import Callable, Sequence

from balanceroute.proxy.core.events import Action, Event

Observer = Callable[[Event, Sequence[Action], int], None]
"""Called with an event, what came of it in order, and the time in ns, before anything is performed."""
