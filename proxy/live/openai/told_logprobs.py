"""The log-probabilities of an answer that goes on: counted on, and written as a chat's.

A completion tells each token's candidates as one object, in which two with the same text are one. Where
candidates are missing so, a chat's list cannot be written.
"""

from typing import Any

from balanceroute.proxy.core.errors import BalanceRouteError


class UntoldError(BalanceRouteError):
    """A completion does not tell what a chat would."""


class Logprobs:
    """How they go on.

    Args:
        offset: Characters of all tokens before.
        candidates: How many a chat wants of each token.
    """

    __slots__ = ("_candidates", "_offset")

    def __init__(self, offset: int, candidates: int) -> None:
        self._offset = offset
        self._candidates = candidates

    def go_on(self, logprobs: dict[str, Any], again: int) -> None:
        """Leave out the first `again` tokens, and count a completion's offsets on."""
        for name, told in logprobs.items():
            if isinstance(told, list):
                logprobs[name] = told[again:]
        offsets = logprobs.get("text_offset")
        if isinstance(offsets, list):
            logprobs["text_offset"] = [offset + self._offset for offset in offsets]

    def as_chat(self, logprobs: dict[str, Any]) -> dict[str, Any]:
        """Return a completion's as a chat's.

        Raises:
            UntoldError: A token has fewer candidates than the chat wants.
        """
        content = []
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            listed = list((top or {}).items())[: self._candidates]
            if len(listed) < self._candidates:
                raise UntoldError(f"{token!r} has {len(listed)} of {self._candidates} candidates")
            top_logprobs = [_candidate(*one) for one in listed]
            content.append(_candidate(token, logprob) | {"top_logprobs": top_logprobs})
        return {"content": content}


def tokens_of(logprobs: object) -> int:
    """Return of how many tokens log-probabilities are told."""
    if not isinstance(logprobs, dict):
        return 0
    told = logprobs.get("tokens", logprobs.get("content"))
    return len(told) if isinstance(told, list) else 0


def _candidate(token: str, logprob: float | None) -> dict[str, Any]:
    spelled = list(token.encode("utf-8", "replace"))
    return {"token": token, "logprob": logprob, "bytes": spelled}
