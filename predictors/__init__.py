"""Predictors of remaining output length: see `balanceroute.predictors.base` for the contract."""

from balanceroute.predictors.base import (
    Capped,
    NoPrediction,
    Oracle,
    PastRequest,
    Predictor,
    RequestFeatures,
)
from balanceroute.predictors.state import Savable, State, StateError
from balanceroute.predictors.survival import Hinted, Survival

__all__ = [
    "Capped",
    "Hinted",
    "NoPrediction",
    "Oracle",
    "PastRequest",
    "Predictor",
    "RequestFeatures",
    "Savable",
    "State",
    "StateError",
    "Survival",
]
