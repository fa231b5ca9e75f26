"""Why an order about the engines is not carried out."""

from balanceroute.proxy.core.errors import BalanceRouteError


class UnknownInstanceError(BalanceRouteError):
    """An order about an instance that is not there."""


class ConflictError(BalanceRouteError):
    """An order that the present state does not allow."""
