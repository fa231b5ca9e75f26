"""Predictors of remaining output length: see `balanceroute.proxy.core.prediction` for the contract."""

from balanceroute.predictors.none import NoPrediction
from balanceroute.predictors.oracle import Oracle
from balanceroute.predictors.survival import Survival

__all__ = ["NoPrediction", "Oracle", "Survival"]
