"""Settings whose effect depends on other ones: one table for flags, files and what is read again.

A setting that does nothing is no error: the proxy serves as it would without it. But its user expects an
effect, so the proxy warns at its start, and at a reload that makes it so. Only given settings count. The code
that makes the configuration refuses one that contradicts another.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from balanceroute.proxy.core.admission import EXPECTING
from balanceroute.proxy.core.policies import PREDICTING, is_outside
from balanceroute.proxy.core.prefill import USING_LOADS
from balanceroute.proxy.core.queueing import PREDICTING_ORDERS
from balanceroute.proxy.live.request.leg_settings import Direct, FirstTokenFrom
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.topologies import CONNECTORS, KvFlow

_DEADLINE_ORDERS, _LEVEL_ORDERS = frozenset({"edf"}), frozenset({"abs", "ml"})
_RANDOM = USING_LOADS | {"random", "power-of-two"}
# What moves a limit.
_MOVING = "aimd_tpot_ms aimd_first aimd_tick_s aimd_window_s aimd_band aimd_cooldown aimd_factor aimd_step"
_BR, _LATE = ("br-0", "br-h"), ("fifo", "br-0", "br-0-bypass", "br-h")


class _Idle(NamedTuple):
    """Settings that do nothing in some configurations."""

    names: str  # Of the settings, with spaces between them.
    why: str  # What the message says behind "has no effect"; `{c}` is the configuration.
    holds: Callable[[ProxyConfig], bool]  # Whether they do nothing.
    part: str = ""  # The part of the setting that does nothing; "" for all of it.


def without_effect(given: Mapping[str, str], deployments: Sequence[ProxyConfig]) -> list[str]:
    """Return a message for each setting that was given and does nothing.

    Args:
        given: The settings given to all deployments: names, and what to call them.
        deployments: Their configurations. A setting of all has no effect if it has none in any.
    """
    found = [list(_idle(one)) for one in deployments]
    shared = set(given.values())
    everywhere = (
        set.intersection(*({what for _, what, _ in one} for one in found)) if found else set()
    )
    whys: dict[str, str] = {}
    for place, what, why in chain.from_iterable(found):
        if what in everywhere or place not in shared:
            whys.setdefault(what, why)
    return [f"{what} has no effect {why}" for what, why in whys.items()]


def _idle(config: ProxyConfig) -> Iterable[tuple[str, str, str]]:
    """Yield the settings of one deployment that do nothing: the place, the part of it, and why."""
    for row in _TABLE:
        for name in row.names.split():
            if name in config.given and row.holds(config):
                place = config.given[name]
                yield place, f"{place}: {row.part}" if row.part else place, row.why.format(c=config)


# What the rows ask.


def _policy_not(*names: str) -> Callable[[ProxyConfig], bool]:
    """Return whether the policy is none of these; one from outside may use every setting."""
    return lambda c: not (c.scheduling.policy in names or is_outside(c.scheduling.policy))


def _is_paper(config: ProxyConfig) -> bool:
    return config.policies.paper and config.scheduling.policy in _BR


def _decode_first(config: ProxyConfig) -> bool:
    return CONNECTORS[config.engines.connector].flow is KvFlow.DECODE_FIRST


def _limits_starts(config: ProxyConfig) -> bool:
    """Return whether requests that need no prefiller wait before the pool, too."""
    return config.aimd.aimd != "off" or config.admission.admission in EXPECTING


def _never_queues(config: ProxyConfig) -> bool:
    """Return whether no request needs a prefiller of the scheduler's."""
    return _decode_first(config) and config.legs.direct is Direct.REFUSE


def _states_deadlines(config: ProxyConfig) -> bool:
    tenants = config.credentials.tenants
    return config.admission.client_deadline or any(
        one.client_deadline or one.deadline_s is not None for one in tenants
    )


def _states_levels(config: ProxyConfig) -> bool:
    tenants = config.credentials.tenants
    return config.admission.client_priority or any(
        one.client_priority or one.level != 0 for one in tenants
    )


def _predicts(config: ProxyConfig) -> bool:
    policy = config.scheduling.policy
    peak = config.policies.kv_peak_quantile is not None and policy in _LATE
    ordered = config.admission.queue_order in PREDICTING_ORDERS
    return policy in PREDICTING or is_outside(policy) or ordered or peak


def _draws(config: ProxyConfig) -> bool:
    policy = config.scheduling.policy
    random_choice = config.scheduling.prefill_choice in _RANDOM
    return policy in _RANDOM or is_outside(policy) or random_choice


def _never_scores(rule: str, config: ProxyConfig) -> bool:
    policy, choice = config.scheduling.policy, config.scheduling.prefill_choice
    return rule not in (policy, choice) and not is_outside(policy)


def _is_fixed(config: ProxyConfig) -> bool:
    limit = config.aimd.settings
    return limit is not None and limit.cap_min == limit.cap_max


def _has_https(config: ProxyConfig) -> bool:
    urls = [*(one.url for one in config.prefillers), *(one.url for one in config.decoders)]
    return any(one.scheme == "https" for one in urls) or bool(config.discovery.discover)


def _finds(config: ProxyConfig, *kinds: str) -> bool:
    return any(one.kind in kinds for one in config.discovery.discover)


_WITH_POLICY = "with --policy {c.scheduling.policy}"
_WITH_CONNECTOR = "with {c.engines.connector}"
_WITH_ORDER = "with --queue-order {c.admission.queue_order}"
_NO_DEADLINES = "where nobody can state a deadline (--client-deadline, or deadline_s of a tenant)"
_NO_LEVELS = "where nobody can state a level (--client-priority, or level of a tenant)"

_TABLE = (
    # Engines.
    _Idle(
        "kv_block_tokens",
        "without --kv-events",
        lambda c: not (c.follows_kv_events or c.follows_rank_kv_events),
    ),
    _Idle(
        "engine_ca_file insecure_engines",
        "where no engine is named with https",
        lambda c: not _has_https(c),
    ),
    _Idle(
        "roster_state",
        "with --no-admin, without --discover and --aimd: nothing is ordered, found or learned",
        lambda c: not (c.listening.takes_orders or c.discovery.discover or c.aimd.aimd != "off"),
    ),
    _Idle(
        "discover_hold_s discover_limit", "without --discover", lambda c: not c.discovery.discover
    ),
    _Idle(
        "discover_interval_s",
        "without --discover of a file or a name",
        lambda c: not _finds(c, "file", "dns"),
    ),
    _Idle(
        "kubernetes_api kubernetes_account",
        "without --discover of kubernetes and without --leader-lease",
        lambda c: not (_finds(c, "kubernetes") or c.leader.leader_lease),
    ),
    _Idle(
        "leader_lease_s",
        "without --leader-lease or --leader-lock",
        lambda c: not c.leader.has_replicas,
    ),
    # Listening.
    _Idle(
        "http3_order http3_hard_deadlines http3_streams http3_handshakes",
        "without --http3",
        lambda c: not c.http3.http3,
    ),
    _Idle(
        "pick_host pick_port pick_fallbacks pick_test_header",
        "without --pick",
        lambda c: c.gateway.pick == "off",
    ),
    _Idle(
        "select_host select_port",
        "without --select-key-file",
        lambda c: c.gateway.select_key_file is None,
    ),
    _Idle("http2_streams", "without --http2", lambda c: not c.gateway.http2),
    _Idle("admin_host admin_port admin_name", "with --no-admin", lambda c: not c.listening.admin),
    _Idle("admin_token_file", "with --no-admin", lambda c: not c.listening.takes_orders),
    _Idle("native_threads", "with --native off", lambda c: c.listening.native == "off"),
    _Idle(
        "native native_threads",
        "with --tls-cert: streams over TLS are not moved natively, only large bodies are read so",
        lambda c: c.listening.native != "off" and c.listening.tls_cert is not None,
    ),
    # Admission.
    _Idle(
        f"aimd_ttft_s aimd_min aimd_max {_MOVING}", "without --aimd", lambda c: c.aimd.aimd == "off"
    ),
    _Idle(_MOVING, "where --aimd-min and --aimd-max fix the limit", _is_fixed),
    _Idle(
        "admission",
        _NO_DEADLINES,
        lambda c: c.admission.admission in EXPECTING and not _states_deadlines(c),
    ),
    _Idle(
        "queue_order",
        _NO_DEADLINES,
        lambda c: c.admission.queue_order in _DEADLINE_ORDERS and not _states_deadlines(c),
    ),
    _Idle(
        "queue_order",
        _NO_LEVELS,
        lambda c: c.admission.queue_order in _LEVEL_ORDERS and not _states_levels(c),
    ),
    _Idle("client_priority", _WITH_ORDER, lambda c: c.admission.queue_order not in _LEVEL_ORDERS),
    _Idle(
        "fair_queue",
        "without --tenants or --api-key-file",
        lambda c: (
            c.admission.fair_queue != "none"
            and not (c.credentials.tenants or c.credentials.api_keys)
        ),
    ),
    _Idle(
        "tenants",
        "without --fair-queue",
        lambda c: (
            c.admission.fair_queue == "none"
            and any(one.weight != 1.0 for one in c.credentials.tenants)
        ),
        "weight",
    ),
    _Idle(
        "tenants",
        _WITH_ORDER,
        lambda c: (
            c.admission.queue_order not in _LEVEL_ORDERS
            and any(one.level != 0 for one in c.credentials.tenants)
        ),
        "level",
    ),
    # Scheduling.
    _Idle(
        "prefill_waiting_limit prefill_running_limit prefill_share_limit",
        "with --prefill-choice {c.scheduling.prefill_choice}, which scores no prefiller",
        lambda c: c.scheduling.prefill_choice not in USING_LOADS,
    ),
    *(
        _Idle(name, f"where nothing is chosen by {rule}", partial(_never_scores, rule))
        for name, rule in (
            ("s1_weights", "s1-enhanced"),
            ("s2_weights", "s2-enhanced"),
            ("s2_dynamic_weights", "s2-dynamic-waiting"),
        )
    ),
    _Idle(
        "predictor",
        "on decisions " + _WITH_POLICY + ": its predictions are only scored",
        lambda c: not _predicts(c),
    ),
    _Idle("seed", _WITH_POLICY + ", which draws nothing", lambda c: not _draws(c)),
    _Idle(
        "rank_kv_tokens",
        _WITH_POLICY + ", which lets requests queue in the engines",
        _policy_not(*_LATE, "smg-least-load"),
    ),
    _Idle("rank_speeds learn_speeds", _WITH_POLICY, _policy_not(*_BR, "br-0-bypass")),
    _Idle("rank_speeds learn_speeds", "with --paper", _is_paper),
    _Idle("learn_speeds", "with --rank-speeds", lambda c: bool(c.scheduling.rank_speeds)),
    _Idle(
        "direct_limit",
        "where nothing is served by one engine (--direct refuse)",
        lambda c: c.legs.direct is Direct.REFUSE,
    ),
    _Idle(
        "direct_decode_tokens",
        "where no rank serves what cannot be split (--direct)",
        lambda c: c.legs.direct is not Direct.DECODE,
    ),
    _Idle(
        "pool_limit",
        _WITH_CONNECTOR + ", unless --aimd or --admission early has requests wait",
        lambda c: _decode_first(c) and not _limits_starts(c),
    ),
    _Idle(
        "probe_limit lease_s lease_margin_s on_missing_kv pool_deadline_s",
        _WITH_CONNECTOR + ", whose ranks have the request first",
        _decode_first,
    ),
    _Idle(
        "prefill_choice prefiller_kv_tokens",
        _WITH_CONNECTOR + " and --direct {c.legs.direct.value}, where no prefiller is chosen",
        _never_queues,
    ),
    _Idle(
        "queue_ttl_s fair_queue",
        _WITH_CONNECTOR + " and --direct {c.legs.direct.value}, where nothing waits before prefill",
        lambda c: _never_queues(c) and not _limits_starts(c),
    ),
    _Idle(
        "first_token",
        _WITH_CONNECTOR + ", whose ranks have the request first",
        lambda c: _decode_first(c) and c.legs.first_token is FirstTokenFrom.PREFILL,
    ),
    _Idle(
        "lease_margin_s",
        "where KV caches have no lease",
        lambda c: c.lease_s is None and not _decode_first(c),
    ),
    # Policies.
    _Idle("projection horizon gamma alpha beta refresh_tokens", _WITH_POLICY, _policy_not("br-h")),
    _Idle(
        "projection gamma refresh_tokens",
        "with --horizon 0",
        lambda c: c.scheduling.policy == "br-h" and c.policies.steps_ahead == 0,
    ),
    _Idle("theta window patience hold_s paper", _WITH_POLICY, _policy_not(*_BR)),
    _Idle("patience hold_s prefix_affinity", "with --paper", _is_paper),
    _Idle("prefix_affinity", _WITH_POLICY, _policy_not(*_BR, "br-0-bypass")),
    _Idle(
        "prefix_affinity",
        _WITH_CONNECTOR + ", which transfers what ranks have already, too",
        lambda c: not CONNECTORS[c.engines.connector].pulls_missing,
    ),
    _Idle("bypass_slots", _WITH_POLICY, _policy_not("br-0-bypass")),
    _Idle("kv_peak_quantile", _WITH_POLICY, _policy_not(*_LATE)),
    _Idle("pool_deadline_s", _WITH_POLICY, lambda c: _policy_not(*_BR)(c) and not _decode_first(c)),
    # Failures and logs.
    _Idle(
        "retry_backoff_s retry_backoff_limit_s",
        "with --retry-attempts 1",
        lambda c: c.legs.retry_attempts == 1,
    ),
    _Idle("log_level", "with --log none", lambda c: c.log.log == "none"),
    _Idle("load_log_interval_s", "without --load-log", lambda c: c.log.load_log is None),
)
