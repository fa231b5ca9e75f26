"""`balanceroute evaluate`: judge predictors of output lengths on requests of the past."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute import __version__
from balanceroute.predictors import NoPrediction, Survival, files
from balanceroute.predictors.evaluation import judge
from balanceroute.predictors.questions import Replay
from balanceroute.proxy.cli.evaluation_plots import write_plots
from balanceroute.proxy.cli.judgement_report import as_json, print_judgements, terms
from balanceroute.proxy.cli.outputs import (
    check_output,
    for_people,
    make_plots_folder,
    options,
    write_output,
)
from balanceroute.proxy.cli.past_flags import (
    MAX_HORIZON,
    Chosen,
    Past,
    add_past_flags,
    check_source,
    read_past,
    source_of,
    warn_of_limits,
)
from balanceroute.proxy.cli.stage_bar import StageBar
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.pictures import require_matplotlib
from balanceroute.proxy.settings.reader import Given, add_flags, read_flags
from balanceroute.proxy.settings.setting import flag, integer, number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balanceroute.predictors import PastRequest, Predictor

_BASELINE = "survival"
_BASELINES = ("none", _BASELINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What predictors are asked, and what they may know."""

    horizon: int = integer(40, "steps ahead that are asked about", 1, MAX_HORIZON, metavar="H")
    age_step: int = integer(20, "tokens between two questions", 1, 10**6)
    train_share: float = number(
        0.0,
        "pass over the first share of the requests instead of --skip; survival begins with what is "
        "passed over",
        0,
        0.95,
        metavar="SHARE",
    )
    frozen: bool = flag("nobody learns from the requests that end")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "evaluate",
        help="judge predictors of output lengths on requests of the past",
        description=f"{__doc__} Beside them stand two that need no file: none, and the empirical "
        "survival of the requests that have ended.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a predictor that `train` wrote; may be given more than once",
    )
    add_past_flags(parser)
    add_flags(parser.add_argument_group("questions"), Questions)
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="OUT", help="write the figures as JSON")
    output.add_argument("--plots", type=Path, metavar="DIR", help="write pictures (PNG)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ConfigError: A setting cannot be served, or the requests do not suffice.
        TraceError: The trace or the log cannot be read.
        PredictorFileError: A predictor cannot be read.
        OSError: The output cannot be written.
    """
    given = read_flags(arguments, Chosen, Questions)
    chosen, asked = given.read(Chosen), given.read(Questions)
    check_source(arguments)
    if chosen.skip and asked.train_share:
        raise ConfigError("--train-share stands instead of --skip, not beside it")
    _check_outputs(arguments)
    with StageBar() as bar:
        models = _models(arguments.model)
        bar.show(f"reading {source_of(arguments)}")
        history, judged = _parts(read_past(arguments, chosen), asked.train_share)
        replay = Replay(judged, horizon_steps=asked.horizon, age_step=asked.age_step)
        make_plots_folder(arguments.plots)
        baselines: dict[str, Predictor] = {
            "none": NoPrediction(),
            _BASELINE: Survival.of_past(history),
        }
        judgements = judge(
            replay,
            baselines | models,
            baseline=_BASELINE,
            learn=not asked.frozen,
            progress=lambda name, share: bar.show(f"judging {name}", share),
        )
    warn_of_limits(judged)
    title = f"{source_of(arguments)}: {len(judged):,} requests"
    caption = " ".join([terms(replay, age_step=asked.age_step), *_notes(given, models, history)])
    with for_people(arguments.json):
        print_judgements(judgements, baseline=_BASELINE, title=title, caption=caption)
    if arguments.json is not None:
        results = as_json(replay.rows, judgements, baseline=_BASELINE)
        report = {"config": _config(arguments, given), "results": results}
        text = json.dumps(report, indent=2, allow_nan=False)
        write_output("--json", arguments.json, text + "\n")
    if arguments.plots is not None:
        write_plots(
            replay.rows, judgements, arguments.plots, title=title, baselines=len(_BASELINES)
        )
    return 0


def _parts(past: Past, share: float) -> "tuple[list[PastRequest], list[PastRequest]]":
    """Return the requests that had ended when the first one came that is judged, and the judged.

    What was passed over and still ran then is in neither: a model may have been trained on it.
    """
    place = round(share * len(past.chosen))
    judged = past.chosen[place:]
    if not judged:
        raise ConfigError(f"--train-share leaves none of {place} requests to judge on")
    begin_s = judged[0].arrival_s
    passed_over = [*past.skipped, *past.chosen[:place]]
    return [request for request in passed_over if request.finished_s <= begin_s], judged


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Find out now, not after the replay, that its figures cannot be written."""
    out = arguments.json
    check_output("--json", out)
    if out is not None:
        for path in (source_of(arguments), *arguments.model):
            if out.exists() and path.exists() and out.samefile(path):
                raise ConfigError(f"--json: {out} is what is to be read")
    if arguments.plots is not None:
        require_matplotlib()
        if arguments.plots.exists() and not arguments.plots.is_dir():
            raise ConfigError(f"--plots: {arguments.plots} is not a directory")


def _models(paths: "Sequence[Path]") -> "dict[str, Predictor]":
    """Return the predictors by what they are called in the report: their paths."""
    models: dict[str, Predictor] = {}
    for path in paths:
        name = str(path) if str(path) not in _BASELINES else f"./{path}"
        if name in models:
            raise ConfigError(f"--model: {path} is given twice")
        models[name] = files.load(path)
    return models


def _notes(
    given: Given, models: "Mapping[str, Predictor]", history: "Sequence[PastRequest]"
) -> list[str]:
    """Return what else must be known to read the figures."""
    asked = given.read(Questions)
    notes = []
    known = f"the {len(history):,} requests that had ended before" if history else "nothing"
    notes.append(f"{_BASELINE} begins with {known}.")
    if asked.frozen:
        notes.append("Nobody learned from the requests that ended.")
    else:
        notes.append("All learned from the requests that ended.")
    if models and not asked.train_share and not given.read(Chosen).skip:
        notes.append(
            "A predictor that was trained on some of these requests looks better than it is: "
            "--skip or --train-share leaves them out."
        )
    return notes


def _config(arguments: argparse.Namespace, given: Given) -> dict[str, object]:
    chosen = options(arguments)
    for name in ("json", "plots"):
        del chosen[name]
    for name in ("trace", "log"):
        chosen[name] = None if chosen[name] is None else str(chosen[name])
    return (
        chosen
        | given.values
        | {"model": [str(path) for path in arguments.model], "version": __version__}
    )
