"""The observer of a scheduler, for tracing and tests."""

from collections.abc import Callable, Sequence

from balanceroute.proxy.core.events import Action, Event

Observer = Callable[[Event, Sequence[Action], int], None]
"""Called with each event, its actions in order and the time in ns, before any action is performed."""
