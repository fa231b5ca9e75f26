"""Error tree of the package.

BalanceRouteError
├── ConfigError        a setting that cannot be served; names the setting
├── LifecycleError     an event that a request's state does not allow: the driver's fault
├── PolicyError        an answer of a policy that cannot be obeyed
└── PredictorError     an answer of a predictor that is not what was asked for
"""

_SHOWN_CHARACTERS = 80


class BalanceRouteError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(BalanceRouteError, ValueError):
    """A setting that cannot be served. The message names the setting and the reason."""


class LifecycleError(BalanceRouteError):
    """An event that the request's present state does not allow."""


class PolicyError(BalanceRouteError):
    """A policy's answer is none that can be obeyed."""


class PredictorError(BalanceRouteError):
    """A predictor's answer is not what was asked for."""


def shown(value: object) -> str:
    """Return a value for a message, cut short if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
