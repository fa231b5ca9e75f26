"""The file that keeps what the predictor in use has learned."""

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from balanceroute.predictors.files import PredictorFileError, read_state, write_state
from balanceroute.predictors.state import Savable, State, StateError
from balanceroute.proxy.live.prediction import InThread
from balanceroute.proxy.live.telemetry.component_metrics import PredictorMetrics

_log = logging.getLogger(__name__)


SAVE_INTERVAL_S = 60.0


class PredictorStateFile:
    """Keeps what a predictor learns in a file.

    A file that cannot be used never stops the proxy: the predictor begins afresh, the log says why,
    and the first save puts the file aside as FILE.bad.

    Args:
        path: The file; it need not be there.
        fresh: The predictor as it begins if nothing was kept.
        observed: Outputs that the predictor has learned from; nothing new is not saved again.
    """

    def __init__(
        self,
        path: Path,
        fresh: Savable,
        *,
        metrics: PredictorMetrics,
        in_thread: InThread,
        observed: Callable[[], int],
    ) -> None:
        self.predictor = fresh  # With the state of the file, if that could be used.
        self._path = path
        self._metrics = metrics
        self._in_thread = in_thread
        self._observed = observed
        self._saved = 0
        self._spoiled = False
        self._saving: asyncio.Task[None] | None = None
        if not os.path.lexists(path):
            return
        fields = {"path": str(path)}
        try:
            self.predictor = _restored(path, fresh)
        except PredictorFileError as error:
            self._spoiled = True
            metrics.state_refused()
            _log.error(
                "the predictor's state is refused; it begins afresh",
                extra={"fields": {**fields, "reason": str(error)}},
            )
        else:
            _log.info("the predictor's state is restored", extra={"fields": fields})

    async def run(self) -> None:
        """Save now and then, for ever."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            # To the end, also if this is cancelled: two writers must not overtake each other.
            self._saving = asyncio.ensure_future(self._save())
            await asyncio.shield(self._saving)

    async def close(self) -> None:
        """Save if there is anything new; `run` must have ended."""
        if self._saving is not None:
            await self._saving
        await self._save()

    async def _save(self) -> None:
        observed = self._observed()
        if observed == self._saved:
            return
        try:
            # The predictor is the loop's; its state is not shared.
            state = self.predictor.state()
            await self._in_thread(partial(_write, self._path, state, aside=self._spoiled))
        except Exception as error:
            # A failure here must not end the proxy.
            self._metrics.state_saved(ok=False)
            known = isinstance(error, PredictorFileError | OSError)
            _log.error(
                "the predictor's state is not saved",
                exc_info=not known,
                extra={"fields": {"path": str(self._path), "reason": str(error)}},
            )
        else:
            self._saved = observed
            self._spoiled = False
            self._metrics.state_saved(ok=True)


def _restored(path: Path, fresh: Savable) -> Savable:
    """Return a predictor of the same kind, and with the same model, that has learned more.

    Raises:
        PredictorFileError: The file is none of such a predictor.
    """
    state, expected = read_state(path), fresh.state()
    if state.kind != expected.kind:
        raise PredictorFileError(path, f"is of kind {state.kind[:40]!r}, not {expected.kind!r}")
    if state.texts != expected.texts:
        raise PredictorFileError(path, "was learned with another model than --predictor names")
    try:
        return type(fresh).from_state(state)
    except StateError as error:
        raise PredictorFileError(path, str(error)) from error


def _write(path: Path, state: State, *, aside: bool) -> None:
    if aside and os.path.lexists(path):
        path.replace(path.with_name(f"{path.name}.bad"))
    write_state(path, state)
