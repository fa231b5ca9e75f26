"""What an audit found, for people and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from balanceroute.proxy.audit.energy import lost_shares
from balanceroute.proxy.audit.observation import Observation
from balanceroute.proxy.audit.replica import Recovery
from balanceroute.proxy.audit.verdict import MEANINGS, Verdict


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found.

    Attributes:
        recovery: What policies would recover; None if it could not be simulated.
        unknown: Why not; empty if it was.
    """

    seen: Observation
    verdict: Verdict
    recovery: Recovery | None
    unknown: str = ""

    @property
    def energy_lost(self) -> tuple[float, float] | None:
        """Share of the energy that goes into waiting, from the least to the most; see `energy`."""
        fit = self.seen.fit
        if fit is None:
            return None
        step_ms = fit.base_ms + fit.us_per_token / 1e3 * float(self.seen.loads.max(axis=1).mean())
        return lost_shares(self.seen.idle, base_ms=fit.base_ms, step_ms=step_ms)


def lines(audit: Audit) -> Iterator[str]:
    """Yield the findings as text."""
    seen = audit.seen
    yield (
        f"{len(seen.ranks)} ranks of {seen.batch} slots, {seen.prefillers} prefillers, "
        f"{len(seen.loads)} looks in {seen.seconds:.0f} s"
    )
    yield f"idle at the barrier      {100 * seen.idle:.1f} % of rank time"
    yield f"imbalance                {seen.imbalance_tokens:,.0f} KV tokens"
    yield f"output                   {seen.output_tokens_per_s:,.0f} tokens/s"
    yield f"slots in use             {100 * seen.slots_share:.0f} %"
    if seen.fit is None:
        yield "step time                unknown: loads did not vary enough"
    else:
        yield (
            f"step time                {seen.fit.base_ms:.3g} ms + {seen.fit.us_per_token:.3g} us x "
            f"max KV tokens (R2 {seen.fit.r2:.2f})"
        )
    if audit.energy_lost is not None:
        low, high = audit.energy_lost
        yield (
            f"energy spent on waiting  {100 * low:.1f} to {100 * high:.1f} % (model: a waiting rank "
            "draws 137/300 to all of its power)"
        )
    yield f"bound by                 {MEANINGS[audit.verdict.bound]}"
    wanted = audit.verdict.prefillers_per_rank
    if wanted is not None and seen.prefillers:
        yield (
            f"prefillers per rank      {seen.prefillers / len(seen.ranks):.2f} now, {wanted:.2f} "
            "would keep both roles equally busy"
        )
    if audit.recovery is None:
        yield f"what policies recover    unknown: {audit.unknown}"
        return
    yield (
        f"simulated with {audit.recovery.in_flight} requests in flight; this router behaves most like "
        f"{audit.recovery.baseline}:"
    )
    for one in sorted(audit.recovery.predictions, key=lambda one: one.gain):
        yield (
            f"  {one.policy:<14} idle {100 * one.idle:5.1f} %   {one.output_tokens_per_s:9,.0f} "
            f"tokens/s   {100 * one.gain:+6.1f} % +- {100 * one.error:.1f}"
        )
    if not seen.saturated:
        yield (
            "  of clients who wait for an answer before they send more: ranks have free slots, so where "
            "arrivals do not depend on answers, steps are shorter and the output stays"
        )


def as_json(audit: Audit) -> dict[str, object]:
    """Return the findings as JSON has them."""
    seen = audit.seen
    return {
        "ranks": list(seen.ranks),
        "prefillers": seen.prefillers,
        "seconds": seen.seconds,
        "looks": len(seen.loads),
        "batch": seen.batch,
        "idle_fraction": seen.idle,
        "imbalance_tokens": seen.imbalance_tokens,
        "mean_kv_tokens": dict(zip(seen.ranks, seen.loads.mean(axis=0).tolist(), strict=True)),
        "output_tokens_per_s": seen.output_tokens_per_s,
        "slots_share": seen.slots_share,
        "saturated": seen.saturated,
        "fit": None if seen.fit is None else asdict(seen.fit),
        "energy_lost": audit.energy_lost,
        "bound": audit.verdict.bound.value,
        "prefillers_per_rank": audit.verdict.prefillers_per_rank,
        "recovery": None if audit.recovery is None else asdict(audit.recovery),
        "unknown": audit.unknown,
    }
