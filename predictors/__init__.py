"""Predictors of remaining output length: see `balanceroute.predictors.base` for the contract."""

from balanceroute.predictors.base import (
    Capped,
    NoPrediction,
    Oracle,
    PastRequest,
    Predictor,
    RequestFeatures,
)
from balanceroute.predictors.files import PredictorFileError, load, save
from balanceroute.predictors.state import Savable, State, StateError
from balanceroute.predictors.survival import Hinted, Survival

__all__ = [
    "Capped",
    "Hinted",
    "NoPrediction",
    "Oracle",
    "PastRequest",
    "Predictor",
    "PredictorFileError",
    "RequestFeatures",
    "Savable",
    "State",
    "StateError",
    "Survival",
    "load",
    "save",
]
