"""The predictors that need no file, by name: settings list them without loading any."""

from pathlib import Path

PREDICTORS = ("none", "survival", "exact-match")


def predictor_name(word: str) -> str:
    """Return what metrics call the predictor that `make_predictor` makes of a word."""
    return word if word in PREDICTORS else Path(word).name
