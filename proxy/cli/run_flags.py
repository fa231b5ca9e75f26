"""The flags of simulated and emulated deployments."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.core.admission import ADMISSIONS, EXPECTING, AimdOptions
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.prefill import ScoreSettings
from balanceroute.proxy.core.queueing import FAIR_COSTS
from balanceroute.proxy.core.setting import choice, flag, integer, number, words
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel, SimulatedEngineOptions
from balanceroute.proxy.settings import Given

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.core.admission import Admission


# Keeps memory in bounds.
_UNLIMITED = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long things take on simulated and emulated machines."""

    # A step of no time would let time stand still.
    step_base_ms: float = number(30.0, "step = a + b x max load", 0.001, 1e6, metavar="a")
    step_us_per_token: float = number(0.2, "see a", 0, 1e6, metavar="b")
    prefill_base_ms: float = number(20.0, "prefill = c + d x prompt", 0, 1e6, metavar="c")
    prefill_us_per_token: float = number(50.0, "see c", 0, 1e6, metavar="d")
    transfer_base_ms: float = number(0.0, "KV transfer = e + f x KV tokens", 0, 1e6, metavar="e")
    transfer_us_per_token: float = number(0.0, "see e", 0, 1e6, metavar="f")

    def of(self, *names: str) -> dict[str, Any]:
        """Return some of the times in ns, by the names of their users: `step_base_ns` and so on."""
        found: dict[str, Any] = {}
        for name in names:
            found[f"{name}_base_ns"] = round(1e6 * getattr(self, f"{name}_base_ms"))
            found[f"{name}_ns_per_token"] = 1e3 * getattr(self, f"{name}_us_per_token")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines(Times):
    recompute_us_per_token: float | None = number(
        None,
        "a rank computes again what its KV capacity had no room for, within a step, as vLLM does",
        0.001,
        1e6,
        shown_default="it is prefilled again, as with vllm-ascend's recomputed",
        metavar="x",
    )
    prefill_servers: int | None = integer(
        None, "prefillers", 1, 10_000, shown_default="prefill at once", metavar="P"
    )
    prefix_cache: int | None = integer(
        None,
        "tokens in a prefiller's prefix cache, for traces with hash_ids",
        0,
        10**12,
        shown_default="no cache",
        metavar="TOKENS",
    )
    prefix_block_tokens: int = integer(
        512,
        "tokens that one of the trace's hash_ids stands for (Mooncake's and Bailian's: 512)",
        1,
        10**6,
        metavar="TOKENS",
    )
    first_token: str = choice(
        "decode",
        "whose first token clients get: that of a rank, or at once the one of the prefiller, which "
        "needs --prefill-servers and implies --deep-pool",
        words(("prefill", "decode")),
    )
    fair_queue: str = choice(
        "none",
        "what tenants share by weight before prefill; --queue-order then holds within a tenant",
        words(("none", *FAIR_COSTS)),
    )
    admission: str = choice("bounded", "who is let in", words(ADMISSIONS))
    queue_limit: int | None = integer(
        None, "requests that wait; further ones are refused", 1, 10**6, shown_default="no limit"
    )
    queue_ttl_s: float | None = number(
        None,
        "wait before prefill after which a request expires",
        0.001,
        1e6,
        shown_default="for ever; with --aimd as in `serve`",
        metavar="S",
    )
    lease_s: float | None = number(
        None,
        "how long a prefiller keeps a KV cache that no rank has asked for, from the start of its "
        "prefill",
        0.001,
        1e6,
        shown_default="for ever",
        metavar="S",
    )
    lease_margin_s: float = number(
        5.0, "how long before the end of its lease a KV cache counts as lost", 0, 1e6, metavar="S"
    )
    speeds_unknown: bool = flag("do not tell the scheduler the --rank-speeds")

    def prefill_model(self, servers: int) -> PrefillModel:
        return PrefillModel(
            servers=servers,
            base_ns=round(1e6 * self.prefill_base_ms),
            ns_per_token=1e3 * self.prefill_us_per_token,
            cache_tokens=self.prefix_cache,
            block_tokens=self.prefix_block_tokens,
        )


def deployment_of(given: Given, deadline_s: float | None) -> SimulatedDeployment:
    """Return the deployment of the flags; `deadline_s` as in `SimulatedDeployment`."""
    machines, aimd = given.read(Machines), given.read(AimdOptions)
    aimd.check(given.where)
    queue_ttl_s = machines.queue_ttl_s or aimd.queue_ttl_s
    recompute = machines.recompute_us_per_token
    servers = machines.prefill_servers
    prefill = None if servers is None else machines.prefill_model(servers)
    early = machines.first_token == "prefill"  # noqa: S105 - no password.
    if early and prefill is None:
        raise ConfigError("--first-token prefill: needs --prefill-servers too")
    learns = given.values["learn_speeds"]
    return given.read(
        SimulatedDeployment,
        **machines.of("step", "transfer"),
        recompute_ns_per_token=None if recompute is None else 1e3 * recompute,
        prefill=prefill,
        scores=given.read(ScoreSettings),
        deadline_ns=None if deadline_s is None else round(1e9 * deadline_s),
        deep_pool=given.values["deep_pool"] or early,
        early_tokens=early,
        fair_queue=None if machines.fair_queue == "none" else machines.fair_queue,
        admission=_admission(machines),
        expects_first_tokens=machines.admission in EXPECTING,
        aimd=aimd.settings,
        queue_ttl_ns=None if queue_ttl_s is None else round(1e9 * queue_ttl_s),
        lease_ns=None if machines.lease_s is None else round(1e9 * machines.lease_s),
        lease_margin_ns=round(1e9 * machines.lease_margin_s),
        engines=given.read(SimulatedEngineOptions),
        speeds_known=not (machines.speeds_unknown or learns),
    )


def _admission(machines: Machines) -> "Callable[[], Admission] | None":
    limit = machines.queue_limit
    if limit is None and machines.admission not in EXPECTING:
        return None
    return partial(ADMISSIONS[machines.admission], limit or _UNLIMITED)
