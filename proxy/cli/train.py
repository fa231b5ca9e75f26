"""`balanceroute train`: train a predictor of output lengths on requests of the past."""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from balanceroute.predictors import NoPrediction, Survival, files
from balanceroute.predictors import kinds as registry
from balanceroute.predictors.evaluation import Replay, cut_in_time, judge
from balanceroute.proxy.cli.judgement_report import print_judgements, terms
from balanceroute.proxy.cli.outputs import STDOUT, StageBar, check_output
from balanceroute.proxy.cli.trace_flags import (
    MAX_HORIZON,
    Chosen,
    add_past_flags,
    check_source,
    read_past,
    source_of,
    warn_of_limits,
)
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import integer, number
from balanceroute.proxy.settings import add_flags, read_flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balanceroute.predictors import PastRequest, Predictor
    from balanceroute.predictors.evaluation import PredictorJudgement
    from balanceroute.predictors.state import Savable


_AGE_STEP = 20
_BASELINE = "survival"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlags:
    horizon: int = integer(40, "steps ahead that are predicted", 1, MAX_HORIZON, metavar="H")
    seed: int = integer(0, "of what is drawn", 0, (1 << 31) - 1)
    holdout: float = number(
        0.2,
        "judge a predictor trained without the last share of the requests on these, before the one "
        "that is written is trained on all (0: do not)",
        0,
        0.9,
        metavar="SHARE",
    )


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "train",
        help="train a predictor of output lengths on requests of the past",
        description=f"{__doc__} The file is for `serve --predictor` and for `evaluate`.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("kind", choices=registry.KINDS, help="what to train")
    add_past_flags(parser)
    add_flags(parser.add_argument_group("training"), TrainingFlags)
    output = parser.add_argument_group("output")
    output.add_argument("--out", required=True, type=Path, metavar="FILE", help="the predictor")


def run(arguments: argparse.Namespace) -> int:
    given = read_flags(arguments, Chosen, TrainingFlags)
    settings = given.read(TrainingFlags)
    check_source(arguments)
    registry.KINDS[arguments.kind].require()
    _check_out(arguments.out)
    judged: tuple[Replay, Mapping[str, PredictorJudgement]] | None = None
    with StageBar() as bar:
        bar.show(f"reading {source_of(arguments)}")
        past = read_past(arguments, given.read(Chosen)).chosen
        if settings.holdout:
            try:
                judged = _judge_held_out(arguments.kind, settings, past, bar)
            except ConfigError as error:
                share = f"the check without the last {100 * settings.holdout:g} % of the requests"
                raise ConfigError(f"{share}: {error} (--holdout 0 leaves it out)") from None
        begin_s = time.perf_counter()
        predictor = _train(arguments.kind, settings, past, bar, "training")
        trained_s = time.perf_counter() - begin_s
    state = predictor.state()
    written = files.write_state(arguments.out, state)
    warn_of_limits(past)
    _print_facts(arguments, past, trained_s=trained_s, written=written)
    if judged is not None:
        _print_held_out(settings.holdout, *judged)
    return 0


def _check_out(path: Path) -> None:
    """Find out now, not after the training, that the predictor cannot be written."""
    if path == STDOUT:
        raise ConfigError("--out: - is no file, and a predictor may be several")
    check_output("--out", path)
    if path.exists():
        try:
            files.read_state(path)
        except files.PredictorFileError as error:
            # It may be the trace, or any other file that must not be lost.
            reason = f"exists and is not a predictor that could be replaced: {error.reason}"
            raise ConfigError(f"--out: {path} {reason}") from error


def _train(
    kind: str, settings: TrainingFlags, past: "Sequence[PastRequest]", bar: StageBar, words: str
) -> "Savable":
    bar.show(f"{words} {kind}")
    return registry.train(
        kind,
        past,
        horizon_steps=settings.horizon,
        seed=settings.seed,
        progress=lambda stage, share: bar.show(f"{words} {kind}: {stage}", share),
    )


def _judge_held_out(
    kind: str, settings: TrainingFlags, past: "Sequence[PastRequest]", bar: StageBar
) -> "tuple[Replay, Mapping[str, PredictorJudgement]]":
    """Train on the first requests and judge on the last ones, as `evaluate` would."""
    cut = cut_in_time(past, 1 - settings.holdout)
    replay = Replay(cut.after, horizon_steps=settings.horizon, age_step=_AGE_STEP, from_s=cut.at_s)
    predictors: dict[str, Predictor] = {
        "none": NoPrediction(),
        _BASELINE: Survival.of_past(cut.before),
    }
    if kind not in predictors:
        predictors[kind] = _train(kind, settings, cut.before, bar, "check: training")
    judgements = judge(
        replay,
        predictors,
        baseline=_BASELINE,
        progress=lambda name, share: bar.show(f"check: judging {name}", share),
    )
    return replay, judgements


def _print_facts(
    arguments: argparse.Namespace,
    past: "Sequence[PastRequest]",
    *,
    trained_s: float,
    written: "Sequence[Path]",
) -> None:
    facts = Table.grid(padding=(0, 2))
    tokens = sum(request.output_tokens for request in past)
    for name, value in (
        ("trained", arguments.kind),
        ("on", f"{len(past):,} requests of {source_of(arguments)}"),
        ("that emitted", f"{tokens:,} tokens"),
        ("in", f"{trained_s:.1f} s"),
        (
            "written to",
            f"{', '.join(map(str, written))}; {_bytes(sum(path.stat().st_size for path in written))}",
        ),
    ):
        facts.add_row(name, escape(value))
    console = Console()
    # Not a terminal: nothing has to be broken.
    console.width = max(console.width, 0 if sys.stdout.isatty() else 500)
    console.print(facts)


def _print_held_out(
    holdout: float, replay: Replay, judgements: "Mapping[str, PredictorJudgement]"
) -> None:
    share = 100 * holdout
    print_judgements(
        judgements,
        baseline=_BASELINE,
        title=f"Check on the last {share:g} % of the requests",
        caption=f"Trained on those that had ended before; what was written is trained on all. "
        f"{terms(replay, age_step=_AGE_STEP)}",
    )


def _bytes(size: int) -> str:
    return f"{size / 1e3:,.1f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"
