"""Predictors by name or from a file, and the file that keeps what the one in use has learned."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.predictors import NoPrediction
from balanceroute.predictors.capped import Capped
from balanceroute.predictors.files import PredictorFileError, load, read_state, write_state
from balanceroute.predictors.hinted import Hinted
from balanceroute.predictors.outside import outside_predictor
from balanceroute.predictors.registry import KINDS
from balanceroute.predictors.state import StateError
from balanceroute.proxy.core.errors import ConfigError, shown
from balanceroute.proxy.core.outside import outside_name
from balanceroute.proxy.live.prediction.predictor_set import NamedPredictor
from balanceroute.topologies import did_you_mean

if TYPE_CHECKING:
    from balanceroute.predictors.base import Predictor
    from balanceroute.predictors.state import Savable, State
    from balanceroute.proxy.live.telemetry.component_metrics import PredictorMetrics

InThread = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a function where it may wait for a disk, and waits for it."""

SAVE_INTERVAL_S = 60.0

PREDICTORS: "dict[str, Callable[[], Savable | NoPrediction]]" = {
    "none": NoPrediction,
    **{name: kind.untrained for name, kind in KINDS.items() if kind.untrained is not None},
}
"""Those that need no file, by name."""

_log = logging.getLogger(__name__)


def make_predictor(word: str) -> "Savable | NoPrediction | Predictor":
    """Return a new predictor.

    Args:
        word: A name in `PREDICTORS`, a file that `balanceroute train` made, or that of one from outside.

    Raises:
        ConfigError: The file cannot be used; the message reads on from a flag.
    """
    made = PREDICTORS.get(word)
    if made is not None:
        return made()
    if not os.path.lexists(word):
        # What stands in a file has got that file's folder before it.
        outside = outside_name("predictors", Path(word).name)
        if outside is not None:
            return _from_outside(outside)
        hint = did_you_mean(Path(word).name, PREDICTORS)
        raise ConfigError(f"is {shown(word)}, which is neither a predictor nor a file{hint}")
    try:
        return load(word)
    except PredictorFileError as error:
        raise ConfigError(f"is {error}") from error
    except ConfigError as error:  # A library is not installed.
        raise ConfigError(f"is {word}: {error}") from error


def _from_outside(name: str) -> "Predictor":
    try:
        return outside_predictor(name)
    except ConfigError as error:
        raise ConfigError(f"is not usable: {error}") from error


def predictor_name(word: str) -> str:
    """Return what metrics call the predictor that `make_predictor` makes of a word."""
    return word if word in PREDICTORS else Path(word).name


def named(word: str, predictor: "Predictor") -> NamedPredictor:
    """Return a predictor under its name, corrected by clients' hints and limits."""
    hinted = Hinted(predictor)
    return NamedPredictor(
        predictor_name(word),
        Capped(hinted),
        uses_keys=getattr(predictor, "uses_keys", False),
        hint_of=hinted.hint_of,
    )


class StateKeeper:
    """Keeps what a predictor learns in a file.

    A file that cannot be used never stops the proxy: the predictor begins afresh, the log says why,
    and the first save puts the file aside as FILE.bad.

    Args:
        path: The file; it need not be there.
        fresh: The predictor as it begins if nothing was kept.
        metrics: Counts refusals and saves.
        in_thread: Runs a function in a thread, for what may wait for a disk.
        observed: Outputs that the predictor has learned from; nothing new is not saved again.

    Attributes:
        predictor: Who has learned what the file says.
    """

    def __init__(
        self,
        path: Path,
        fresh: "Savable",
        *,
        metrics: "PredictorMetrics",
        in_thread: InThread,
        observed: Callable[[], int],
    ) -> None:
        self.predictor = fresh
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
        """Save what is new; `run` must have ended."""
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
            # What goes wrong here must not end the proxy.
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


def _restored(path: Path, fresh: "Savable") -> "Savable":
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


def _write(path: Path, state: "State", *, aside: bool) -> None:
    if aside and os.path.lexists(path):
        path.replace(path.with_name(f"{path.name}.bad"))
    write_state(path, state)
