"""Pages about a proxy that is one process."""

from collections.abc import Callable, Sized


class OwnPages:
    """Answers at once; see `Pages`."""

    def __init__(self, page_of_metrics: Callable[[], bytes], sessions: Sized) -> None:
        self._page_of_metrics = page_of_metrics
        self._sessions = sessions

    def metrics(self, answer: Callable[[bytes], None]) -> None:
        """Answer the page of metrics."""
        answer(self._page_of_metrics())

    def load(self, passing: int, answer: Callable[[int], None]) -> None:
        """Answer how many requests there are."""
        answer(len(self._sessions) + passing)
