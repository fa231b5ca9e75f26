"""Whether answers habitually reach the limits that their requests set.

Most clients set `max_tokens` far above what they expect, so a limit says little. Some set it to what
they get: rollouts of a fixed length, completions of a line, benchmarks. Which of the two it is shows
in the answers to requests alike: with the same limit, and the same key if requests have keys.
"""

from collections import OrderedDict

# Answers alike before anything is assumed of the next one.
LEAST_ANSWERS = 8
# A limit counts from this share of answers on that reached it.
_LEAST_SHARE = 0.5
# Latest answers alike that the share is of, about.
_LATEST = 64
# Most groups of requests alike; that which was not used for longest yields. Some 300 bytes each.
_GROUPS = 20_000
# As of `ExactMatch`: of more keys, the least specific are left out.
_MAX_KEYS = 8
_NO_KEYS = (None,)


class LimitHabits:
    """Counts the answers that reached their limits, by limit and key and by limit alone."""

    def __init__(self) -> None:
        # How many answers, and the share that reached the limit. A limit alone has key None.
        self._groups: OrderedDict[tuple[int, int | None], tuple[int, float]] = OrderedDict()

    def is_habit(self, max_tokens: int, keys: tuple[int, ...]) -> bool:
        """Return whether at least half of the recent answers alike reached this limit.

        The most specific key of which enough answers are known decides, else the limit alone.

        Args:
            max_tokens: The limit.
            keys: Of the request, the most specific first.
        """
        for key in (*keys[:_MAX_KEYS], None) if keys else _NO_KEYS:
            group = self._groups.get((max_tokens, key))
            if group is not None and group[0] >= LEAST_ANSWERS:
                return group[1] >= _LEAST_SHARE
        return False

    def learn(self, max_tokens: int, keys: tuple[int, ...], output_tokens: int) -> None:
        """Learn from an answer that ended by itself, or at its limit."""
        reached = float(output_tokens >= max_tokens)
        for key in (*keys[:_MAX_KEYS], None) if keys else _NO_KEYS:
            group = max_tokens, key
            answers, share = self._groups.pop(group, (0, 0.0))
            answers = min(answers + 1, _LATEST)
            self._groups[group] = answers, share + (reached - share) / answers
        while len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)
