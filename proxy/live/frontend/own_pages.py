"""Pages about a proxy that is one process."""

from collections.abc import Callable


class OwnPages:
    """Answers at once; see `Pages`."""

    def __init__(self, page_of_metrics: Callable[[], bytes], sessions: Callable[[], int]) -> None:
        self._page_of_metrics = page_of_metrics
        self._sessions = sessions

    def metrics(self, answer: Callable[[bytes], None]) -> None:
        """Answer the page of metrics."""
        answer(self._page_of_metrics())

    def load(self, passing: int, answer: Callable[[int], None]) -> None:
        """Answer how many requests there are."""
        answer(self._sessions() + passing)
