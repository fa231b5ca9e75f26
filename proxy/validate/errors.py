"""What is wrong with the files that a validation is given."""

from balanceroute.proxy.core.errors import BalanceRouteError


class ValidationError(BalanceRouteError):
    """A file cannot be used, or files do not fit together. The message says which and why."""
