"""Error tree of the package.

BalanceRouteError
├── ConfigError        a setting that cannot be served; names the setting
├── LifecycleError     an event that a request's state does not allow: the driver's fault
├── PolicyError        a policy's decision that cannot be carried out
└── PredictorError     a predictor's result of the wrong shape or range
"""

_SHOWN_CHARACTERS = 80


class BalanceRouteError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(BalanceRouteError, ValueError):
    """A setting that cannot be served. The message names the setting and the reason."""


class LifecycleError(BalanceRouteError):
    """An event that the request's present state does not allow."""


class PolicyError(BalanceRouteError):
    """A policy's decision cannot be carried out."""


class PredictorError(BalanceRouteError):
    """A predictor's result has the wrong shape or range."""


def shown(value: object) -> str:
    """Return a value as text for a message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
