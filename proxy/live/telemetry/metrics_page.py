"""The page of metrics, kept for a moment: rendering takes milliseconds of the event loop's time."""

from collections.abc import Callable

_KEPT_S = 1.0


class MetricsPage:
    """Called for the page, it renders at most once a second."""

    def __init__(self, render: Callable[[], bytes], clock: Callable[[], float]) -> None:
        self._render = render
        self._clock = clock
        self._page = b""
        self._until_s = float("-inf")

    def __call__(self) -> bytes:
        """Return a page that is at most a second old."""
        now_s = self._clock()
        if now_s >= self._until_s:
            self._page = self._render()
            self._until_s = now_s + _KEPT_S
        return self._page
