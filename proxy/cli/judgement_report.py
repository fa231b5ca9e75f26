"""How predictors compare: the table and the JSON of `train` and `evaluate`."""

from collections.abc import Mapping
from dataclasses import asdict
from math import isnan

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from balanceroute.predictors import measures
from balanceroute.predictors.evaluation import GAINS, Gain, PredictorJudgement, Replay, Rows
from balanceroute.proxy.lab.service_levels import print_whole

# Of each of `GAINS`.
_GAIN_HEADINGS = {"auc": ("AUC", 4), "brier": ("Brier", 4), "mae": ("MAE", 2)}
assert tuple(_GAIN_HEADINGS) == GAINS


def terms(replay: Replay, *, age_step: int) -> str:
    rows = replay.rows
    asked = len(set(rows.request.tolist()))
    ends = 100 * rows.finishes.mean()
    return (
        f"{len(rows.request):,} questions about {asked:,} requests, every {age_step} tokens of age; "
        f"{ends:.1f} % end within H = {rows.horizon_steps} steps. ± is a standard error."
    )


def print_judgements(
    judgements: Mapping[str, PredictorJudgement], *, baseline: str, title: str, caption: str
) -> None:
    """Print one row per predictor to standard output, fewer figures where the terminal is narrow."""
    texts = {"baseline": baseline, "title": title, "caption": caption}
    print_whole(lambda narrow: _table(judgements, narrow=narrow, **texts))


def _table(
    judgements: Mapping[str, PredictorJudgement],
    *,
    baseline: str,
    title: str,
    caption: str,
    narrow: bool,
) -> Table:
    table = Table(
        title=escape(title),
        caption=escape(caption),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD if narrow else HEAVY_HEAD,
        pad_edge=not narrow,
        collapse_padding=narrow,
    )
    table.add_column("predictor", no_wrap=True)
    for heading in ("\nAUC", "\nBrier", "calibration\nerror", "MAE\ntokens", "composite\nMAE"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown_gains = ("brier",) if narrow else GAINS
    for name in shown_gains:
        table.add_column(
            f"{_GAIN_HEADINGS[name][0]} better than\n{escape(baseline)} by",
            justify="right",
            no_wrap=True,
        )
    for name, judgement in judgements.items():
        score = judgement.scores
        gained = (
            "" if name == baseline else gain_cell(judgement.gains[one], _GAIN_HEADINGS[one][1])
            for one in shown_gains
        )
        table.add_row(
            escape(name),
            number_cell(score.auc, 3),
            number_cell(score.brier, 4),
            number_cell(score.ece, 3),
            number_cell(score.mae, 2),
            number_cell(score.composite_mae, 2),
            *gained,
        )
    return table


def number_cell(value: float, digits: int) -> str:
    """Return a score, or a dash if it is undefined."""
    return "–" if isnan(value) else f"{value:,.{digits}f}"  # noqa: RUF001


def gain_cell(gain: Gain, digits: int) -> str:
    """Return a gain with its sign and its standard error, if there is one."""
    if isnan(gain.value):
        return number_cell(gain.value, digits)
    error = "" if isnan(gain.error) else f" ±{gain.error:,.{digits}f}"
    return f"{gain.value:+,.{digits}f}{error}".replace("-", "−")


def as_json(
    rows: Rows, judgements: Mapping[str, PredictorJudgement], *, baseline: str
) -> list[dict[str, object]]:
    """Return a row for each predictor, of JSON's types; an undefined figure is null."""
    found: list[dict[str, object]] = []
    for name, judgement in judgements.items():
        diagram = measures.reliability(judgement.answers.p_finish, rows.finishes)
        found.append(
            {"predictor": name}
            | {key: _or_null(value) for key, value in asdict(judgement.scores).items()}
            | {
                "baseline": baseline,
                "better_by": {
                    one: {"value": _or_null(gain.value), "stderr": _or_null(gain.error)}
                    for one, gain in judgement.gains.items()
                },
                "reliability": {
                    "predicted": [_or_null(value) for value in diagram.predicted.tolist()],
                    "observed": [_or_null(value) for value in diagram.observed.tolist()],
                    "rows": diagram.rows.tolist(),
                },
            }
        )
    return found


def _or_null(value: float) -> float | None:
    return None if isnan(value) else value
