"""From how busy the roles are to how many instances are wanted."""

import pytest

from balanceroute.proxy.capacity import Bound, judge, needs
from balanceroute.proxy.lab.advise.report import as_json, lines


def told(prefill_busy: float | None, slots_share: float, idle: float = 0.0) -> dict[str, object]:
    """Return the advice for 4 prefillers and 8 ranks."""
    verdict = judge(
        prefillers=4, ranks=8, prefill_busy=prefill_busy, slots_share=slots_share, idle=idle
    )
    found = needs(
        verdict,
        prefillers=4,
        ranks=8,
        prefill_work=None if prefill_busy is None else 4 * prefill_busy,
        decode_work=8 * slots_share,
        busy=0.8,
    )
    return as_json(found) | {"text": "\n".join(lines(found, 0.8))}


@pytest.mark.parametrize(
    ("prefill_busy", "slots_share", "idle", "bound", "prefillers", "ranks"),
    [
        (0.6, 0.6, 0.0, Bound.NOTHING, 3, 6),
        (0.2, 0.8, 0.0, Bound.NOTHING, 1, 8),
        (1.0, 0.3, 0.0, Bound.PREFILL, 5, 3),
        (0.5, 1.0, 0.05, Bound.DECODE, 3, 10),
        (0.5, 0.95, 0.3, Bound.BARRIER, 3, 10),
        (0.0, 0.01, 0.0, Bound.NOTHING, 1, 1),
    ],
)
def test_each_role_is_to_be_busy_for_the_share_that_is_aimed_at(
    prefill_busy: float, slots_share: float, idle: float, bound: Bound, prefillers: int, ranks: int
) -> None:
    advice = told(prefill_busy, slots_share, idle)
    assert advice["bound"] == bound.value
    assert [advice["prefillers"]["wanted"], advice["ranks"]["wanted"]] == [prefillers, ranks]  # type: ignore[index]
    least = [advice["prefillers"]["at_least"], advice["ranks"]["at_least"]]  # type: ignore[index]
    assert least == [bound is Bound.PREFILL, bound is Bound.DECODE]
    assert ("`balanceroute audit`" in str(advice["text"])) == (bound is Bound.BARRIER)


def test_the_load_of_a_full_role_is_a_lower_bound() -> None:
    assert "4 now, at least 5 wanted: the load keeps 4.00 busy" in str(told(1.0, 0.3)["text"])


def test_without_prefillers_nothing_is_said_of_them() -> None:
    advice = told(None, 0.5)
    assert advice["prefillers"]["wanted"] is None  # type: ignore[index]
    assert "their load is not known" in str(advice["text"])
