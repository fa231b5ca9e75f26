"""The dashboard and the alert rules ask for metrics that the proxy has, with labels that they have."""

import asyncio
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.script import ROOT, script
from tests.support.chaos.groups import GroupSettings, GroupWorld
from tests.support.site import LARGE, SMALL, Site, play_groups

DEPLOY = ROOT / "topologies" / "deploy"
DASHBOARD = json.loads((DEPLOY / "helm" / "grafana-dashboard.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = yaml.safe_load(
    (DEPLOY / "helm" / "rules.yaml").read_text(encoding="utf-8")
)
QUERIES = [
    target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())
] + [rule["expr"] for rule in RULES]
PROMTOOL = shutil.which("promtool")
# Of the client library, and what Prometheus itself adds to every sample.
FOREIGN = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
ADDED = {"job", "instance", "le", "process"}


def known() -> dict[str, set[str]]:
    """Return the labels of every series that the proxy exports, by its name."""
    listed = script("reproduce.reference")
    found: dict[str, set[str]] = {}
    for name, (kind, _, labels) in listed.labels_by_family(listed.full_page()).items():
        names = (
            [f"{name}_{part}" for part in ("bucket", "sum", "count")]
            if kind == "histogram"
            else [name]
        )
        found.update(dict.fromkeys(names, labels))
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_there_is(query: str) -> None:
    labels = known()
    asked = re.findall(r"\b(?:balanceroute|process)_[a-z0-9_]+", query)
    assert asked
    allowed = set(ADDED)
    for name in asked:
        assert name in labels or name in FOREIGN, name
        allowed |= labels.get(name, set())
    selected = re.findall(r"([a-z_]+)=~?\"", query)
    grouped = [one for part in re.findall(r"by \((.*?)\)", query) for one in part.split(", ")]
    assert {*selected, *grouped} <= allowed


def test_panels_have_names_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in panels]
    assert len(set(places)) == len(places)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["type"] == "row" or panel["description"].endswith("."), panel["title"]
        used = set(re.findall(r"{{(\w+)}}", json.dumps(panel)))
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", json.dumps(panel)))))
        assert used <= grouped, panel["title"]


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here")
def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    rules = [*RULES]
    for number, query in enumerate(QUERIES):
        expression = query.replace("$__rate_interval", "5m").replace("$job", ".*")
        rules.append({"record": f"of_the_dashboard:{number}", "expr": expression})
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "balanceroute", "rules": rules}]}))
    checked = subprocess.run(
        [PROMTOOL, "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr + checked.stdout


# Series of a minute each, and the alert that they raise.
RAISING: dict[str, dict[str, str]] = {
    "BalanceRouteAbsent": {"up": "0x30"},
    "BalanceRoutePrefillersMissing": {
        'balanceroute_prefiller_open{prefiller="0",name="p"}': "1x30",
        'balanceroute_prefiller_open{prefiller="1",name="q"}': "0x30",
    },
    "BalanceRouteRanksMissing": {
        'balanceroute_rank_open{rank="0",name="d"}': "0x30",
        'balanceroute_rank_draining{rank="0",name="d"}': "0x30",
    },
    "BalanceRouteSlowFirstTokens": {
        'balanceroute_time_to_first_token_seconds_bucket{le="10"}': "0+1x30",
        'balanceroute_time_to_first_token_seconds_bucket{le="30"}': "0+2x30",
        'balanceroute_time_to_first_token_seconds_bucket{le="+Inf"}': "0+2x30",
    },
    "BalanceRouteKvCachesMissing": {
        'balanceroute_prefills_without_kv_total{prefiller="p",reason="absent"}': "0x20 1x10"
    },
    "BalanceRouteEngineDoubted": {'balanceroute_rank_doubts{rank="0",name="d"}': "0x5 1x25"},
    "BalanceRouteDecodeStandsStill": {"balanceroute_decode_still_ranks": "0x20 3x10"},
    "BalanceRouteRankMakesNoTokens": {
        'balanceroute_progress_vetoes_total{rank="0",name="d"}': "0x20 2 4 4x10"
    },
    "BalanceRouteLeasesNearTheirEnd": {"balanceroute_pooled_lease_used_ratio": "0.8x30"},
    "BalanceRouteStepsMisjudged": {
        'balanceroute_decode_step_seconds{job="proxy"}': "0.05x30",
        'vllm:inter_token_latency_seconds_sum{instance="d0"}': "0+3x30",
        'vllm:inter_token_latency_seconds_count{instance="d0"}': "0+100x30",
    },
}
# What an alert tells, beside its own labels: whom it is about.
ABOUT = {
    "BalanceRouteKvCachesMissing": {"prefiller": "p"},
    "BalanceRouteEngineDoubted": {"name": "d"},
    "BalanceRouteRankMakesNoTokens": {"name": "d"},
}
SILENT = {
    'balanceroute_build_info{version="1"}': "1x30",
    # One of each role is drained: on purpose.
    'balanceroute_prefiller_open{prefiller="0",name="p"}': "0x30",
    'balanceroute_prefiller_draining{prefiller="0",name="p"}': "1x30",
    'balanceroute_rank_open{rank="0",name="d"}': "0x30",
    'balanceroute_rank_draining{rank="0",name="d"}': "1x30",
    'balanceroute_time_to_first_token_seconds_bucket{le="10"}': "0+2x30",
    'balanceroute_time_to_first_token_seconds_bucket{le="30"}': "0+2x30",
    'balanceroute_time_to_first_token_seconds_bucket{le="+Inf"}': "0+2x30",
    'balanceroute_prefills_without_kv_total{prefiller="p",reason="absent"}': "3x30",
    'balanceroute_prefiller_doubts{prefiller="0",name="p"}': "0x30",
    'balanceroute_rank_doubts{rank="0",name="d"}': "0x30",
    "balanceroute_decode_still_ranks": "0x30",
    'balanceroute_progress_vetoes_total{rank="0",name="d"}': "1x30",
    "balanceroute_pooled_lease_used_ratio": "0.7x30",
    'balanceroute_decode_step_seconds{job="proxy"}': "0.031x30",
    'vllm:inter_token_latency_seconds_sum{instance="d0"}': "0+3x30",
    'vllm:inter_token_latency_seconds_count{instance="d0"}': "0+100x30",
}


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here")
@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("alert", RAISING)
def test_an_alert_is_raised_by_what_it_is_for(tmp_path: Path, alert: str, raises: bool) -> None:
    assert PROMTOOL is not None
    (rule,) = [rule for rule in RULES if rule["alert"] == alert]
    rules, tests = tmp_path / "rules.yaml", tmp_path / "tests.yaml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "balanceroute", "rules": [rule]}]}))
    series = RAISING[alert] if raises else SILENT
    labels = rule["labels"] | ABOUT.get(alert, {})
    raised = {"exp_labels": labels, "exp_annotations": rule["annotations"]}
    test = {
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "alert_rule_test": [
            {"eval_time": "25m", "alertname": alert, "exp_alerts": [raised] if raises else []}
        ],
    }
    tests.write_text(yaml.safe_dump({"rule_files": [str(rules)], "tests": [test]}))
    checked = subprocess.run(
        [PROMTOOL, "test", "rules", str(tests)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr + checked.stdout


# Every query asked of the pages of a proxy under load, in virtual time. Real Prometheus evaluates them.

SCRAPE_S = 15.0
SCRAPES = 17
TENANTS = """
[[tenant]]
name = "walk-in"
default = true
concurrency = 8
requests_per_minute = 600
"""
ALIAS = """
[alias.auto]
groups = ["small", "large"]
tpot_ms = 80
tasks = { chat = [0.7, 1.0] }
fall_back = ["429", "503"]
"""
# What this fleet has no reason to tell: there is one replica, nobody speaks HTTP/3, no KV cache is
# lost, and emulated engines do not tell their gaps between tokens.
UNTOLD = (
    *("balanceroute_leader", "balanceroute_http3_"),
    *("balanceroute_kv_transfer_failures", "vllm:inter_token_latency"),
)


def pages_under_load() -> list[str]:
    """Return the pages of a proxy with groups, an alias, and a tenant at its limit, one each `SCRAPE_S`."""
    pages: list[str] = []
    groups = {
        name: GroupSettings(engines, proxy='aimd = "post5"\nqueue_limit = 2')
        for name, engines in (("small", SMALL), ("large", LARGE))
    }

    async def scenario(site: Site) -> None:
        assert isinstance(site.world, GroupWorld)
        rng = random.Random(3)
        for scrape in range(SCRAPES):
            for number in range(100):
                values = {
                    "model": rng.choice(("small", "large", "auto")),
                    "prompt": "t1 " * rng.randint(1, 500),
                    "max_tokens": rng.randint(2, 60),
                    "stream": True,
                }
                site.send("/v1/completions", values)
                await asyncio.sleep(0.0 if number % 10 else SCRAPE_S / 10)
                if number == 25 and scrape == SCRAPES - 6:
                    await asyncio.sleep(0.5)
                    for rank in ("decode/0", "decode/1"):
                        site.world.fleets["small"].kill(rank)
            engine = site.world.fleets["large"].engine("decode/0").port
            engines = await site.send("/metrics", method="GET", port=engine).end()
            own = await site.admin("/metrics")
            pages.append((own.body + engines.body).decode())

    play_groups(
        scenario,
        groups=groups,
        flags={"scaling_signals": True, "connection_limit": 500},
        more=ALIAS,
        tenants=TENANTS,
        at_rest=False,
    )
    return pages


def series_of(pages: list[str]) -> list[dict[str, str]]:
    """Return the samples of pages as `promtool` takes them."""
    values: dict[str, list[str]] = {}
    for number, page in enumerate(pages):
        for line in page.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                base, brace, labels = name.partition("{")
                labels = f'job="proxy",{labels}' if brace else 'job="proxy"}'
                samples = values.setdefault(f"{base}{{{labels}", ["_"] * len(pages))
                samples[number] = value
    return [{"series": name, "values": " ".join(samples)} for name, samples in values.items()]


def asked(query: str) -> str:
    """Return what has a value whether or not an alert fires."""
    same = {"$__rate_interval": "2m", "$job": ".*", " < count": " <= count", " == 0)": " >= 0)"}
    for name, value in same.items():
        query = query.replace(name, value)
    query = " ".join(query.split())
    query = re.sub(r"^absent\((\w+)\)$", r"\1", query)
    return re.sub(r"\s[<>]\s[\d.]+$", "", query)


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool here")
def test_each_query_has_data_under_load(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    queries = {asked(one): one for one in QUERIES}
    test = {
        "interval": f"{SCRAPE_S:g}s",
        "input_series": series_of(pages_under_load()),
        "promql_expr_test": [
            {
                "expr": f"count({one}) > bool 0",
                "eval_time": f"{SCRAPE_S * (SCRAPES - 1):g}s",
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
            for one in queries
        ],
    }
    path = tmp_path / "tests.yaml"
    path.write_text(json.dumps({"rule_files": [], "tests": [test]}))
    checked = subprocess.run(
        [PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    told = checked.stdout + checked.stderr
    without = re.findall(r'expr: "count\((.*)\) > bool 0"', told)
    assert (checked.returncode != 0) == bool(without), told
    missing = {queries[one.replace('\\"', '"')] for one in without}
    assert missing == {one for one in QUERIES if any(name in one for name in UNTOLD)}
