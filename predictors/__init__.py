"""Predictors of remaining output length: see `balanceroute.predictors.base` for the contract."""

from balanceroute.predictors.base import PastRequest, Predictor, RequestFeatures
from balanceroute.predictors.none import NoPrediction
from balanceroute.predictors.oracle import Oracle
from balanceroute.predictors.survival import Survival

__all__ = ["NoPrediction", "Oracle", "PastRequest", "Predictor", "RequestFeatures", "Survival"]
