"""Errors in the files of a validation."""

from balanceroute.proxy.core.errors import BalanceRouteError


class ValidationError(BalanceRouteError):
    """A file cannot be used, or files do not fit together. The message says which and why."""
