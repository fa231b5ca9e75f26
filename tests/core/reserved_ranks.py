"""The ranks that make room for a late request, of any policy."""

from balanceroute.proxy.core.policies import Policy
from balanceroute.proxy.core.policies.two_stage import TwoStage


def reserved_ranks(policy: Policy) -> set[int]:
    """Return the ranks that may leave slots free; none if the policy reserves no ranks."""
    rule: object = policy
    while not isinstance(rule, TwoStage):
        if (rule := getattr(rule, "_rule", None)) is None:
            return set()
    return set(rule.reserved)
