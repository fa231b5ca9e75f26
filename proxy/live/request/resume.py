"""Streams that another decode rank continues when theirs fails."""

from enum import Enum


class Resume(Enum):
    """Which streams go on.

    In vLLM a seed begins anew with each request, unless the sampler draws by position. So only the most
    likely tokens (temperature 0) are certain to be those that one engine would have given.
    """

    OFF = "off"
    EXACT = "exact"
    VALID = "valid"
