"""What code and files declare, for the appendix: settings, metrics, alerts, topologies and more."""

import argparse
import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, takewhile
from typing import Any

import yaml
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from balanceroute.proxy.capacity import LoadFollower
from balanceroute.proxy.core.admission import Rate, TenantLimits
from balanceroute.proxy.core.setting import Setting, settings_of
from balanceroute.proxy.live import select_service
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.leader.leadership import LeaderMetrics, LeaderState
from balanceroute.proxy.live.openai.routes import CONTROL, ROUTES, Handling, Media, Route
from balanceroute.proxy.live.request.failures import RULES
from balanceroute.proxy.live.scaling import OfLoads
from balanceroute.proxy.live.settings.declared import HEADINGS
from balanceroute.proxy.live.telemetry.component_metrics import Http3Counts, Http3Metrics
from balanceroute.proxy.live.telemetry.metrics import Metrics
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.live.telemetry.request_metrics import AliasWorth
from balanceroute.proxy.live.telemetry.snapshot import (
    BudgetState,
    EngineState,
    LimitsState,
    PredictorScores,
    PrefillerState,
    RankState,
    Snapshot,
    TenantState,
)
from experiment import ROOT, table_head, table_row
from house import MAY_IMPORT

CHART = ROOT / "topologies" / "deploy" / "helm"


MADE: dict[str, Callable[[], str]] = {}
"""What makes each file that `reference` writes."""


def page(
    name: str, title: str, origin: str
) -> Callable[[Callable[[], Iterable[str]]], Callable[[], str]]:
    """Have the lines of a function be a page of the appendix, made from its `origin`."""

    def note(lines: Callable[[], Iterable[str]]) -> Callable[[], str]:
        def made() -> str:
            text = "\n".join(lines()).rstrip()
            return f"""\
# {title}

<!-- not run: writes pages of this folder -->

    python scripts/reproduce reference

makes this page from {origin.rstrip()}

{text}
"""

        MADE[f"docs/appendix/{name}.md"] = made
        return made

    return note


STATE = Snapshot(
    policy="br-h",
    predictor="survival",
    ranks=[RankState(0, "http://d:8000", True, "up", 0, 0, 0, 0)],
    prefillers=[PrefillerState(0, "http://p:8000", True, "up", 0, 0, 0, 0.0)],
    queued=0,
    prefilling=0,
    pooled=0,
    decoding=0,
    pool_limit=1,
    oldest_pooled_s=0.0,
    imbalance_tokens=0,
    steps=0,
    step_s=0.0,
    idle_tokens=0,
    capacity_tokens=0,
    client_connections=0,
    engine_connections=0,
    draining=False,
    rows_judged=0,
    predictors=[
        PredictorScores(
            name="survival",
            active=True,
            failed=False,
            rows=1,
            auc=0.0,
            brier=0.0,
            ece=0.0,
            mae=0.0,
            predicted=(0.0,),
            observed=(0.0,),
            decile_rows=(0,),
        )
    ],
    budget=BudgetState(1, 0, 0.0, 0.0, {"increase": 0}, 1.0),
    rejected_connections={"full": 0},
    pumped_returns={"event": 0},
    tenants=[TenantState("t", 0, 0, {}, TenantLimits(Rate(1, 1), Rate(1, 1), 1, 1), 1.0)],
    engines=[EngineState("decode", "http://d:8000", 0.0, 0.0, 0.0)],
    limits=LimitsState(1, 1, 1, 1),
)


def full_page() -> bytes:
    """Return a page with at least one sample of every metric."""
    metrics = Metrics(lambda: [STATE], traces=True, process=False)
    counts = Http3Counts(0, 0, {"crowd": 0}, "rr", {"usual": 0}, 0, 0)
    metrics.collect_from(Http3Metrics(lambda: counts))
    metrics.collect_from(OfLoads({"": LoadFollower()}))
    metrics.collect_from(LeaderMetrics(lambda: LeaderState(False, "", "", 0, 0, 0, 0.0)))
    metrics.tenants.names = {"t"}
    metrics.aliases.worth = {"a": AliasWorth(1.0, 1.0, {("any", "g"): 1.0})}
    record = RequestRecord(
        request_id="r",
        endpoint="/v1/completions",
        arrived_ns=0,
        arrived_unix_s=0.0,
        outcome=Outcome.OK,
        output_tokens=2,
        prefiller="http://p:8000",
        rank="http://d:8000",
        first_token_ns=1,
        second_token_ns=2,
        prefill_started_ns=0,
        ended_ns=2,
        tenant="t",
        refused_for="rate",
        group="g",
        alias="a",
        task="any",
        fall_backs=(("h", "503"),),
    )
    metrics.requests.ended(record)
    metrics.requests.passed_through(replace(record, endpoint="/v1/embeddings"))
    metrics.legs.retry("decode", Fault.RESET.value)
    metrics.legs.abandoned_lease("ended")
    metrics.legs.kv_transfer_failed(record.prefiller, record.rank, Fault.RESET.value)
    engine = Target(Role.DECODE, "http://d:8000")
    metrics.engines.added(engine)
    metrics.engines.leg_failed(engine, Fault.RESET)
    metrics.engines.left_no_kv(engine, "absent")
    metrics.engines.kv_events_lost("gap")
    metrics.decisions.dispatched("total", 0.0)
    metrics.decisions.failed("policy")
    return metrics.render()


def labels_by_family(page: bytes) -> dict[str, tuple[str, str, set[str]]]:
    """Return type, meaning and labels of every family of a page, by the name that queries use."""
    found: dict[str, tuple[str, str, set[str]]] = {}
    for family in text_string_to_metric_families(page.decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, family.documentation, labels)
    return found


@page(
    "metrics",
    "Metrics",
    """\
what the proxy exports: `GET /metrics` of both listeners, of the public one unless
`--no-public-metrics` is given, in Prometheus's text format.

* Where vLLM has a metric of the same meaning, the rest of the name is vLLM's.
* A label takes few values, whatever clients send. `endpoint` is a route of the API, and `model` a model for which an
  engine has answered (32 at most). `name` and `url` are those of engines: a rank's `name` is `http://host:port@rank` where
  one server has several. 1,024 engines of each role have series of their own. Everything else is `other`.
* A removed engine keeps its counters until the proxy restarts.
* On the public listener what [endpoint pickers](../behind_a_gateway.md) read stands before it with `--picker-metrics`.
* With [several groups](../models.md#groups) of engines, what is of one of them has the label `group` too, which the table
  leaves out.
""",
)
def metrics_page() -> Iterator[str]:
    """Yield the table of all metrics."""
    yield table_head("metric", "type", "labels", "meaning")
    for name, (kind, meaning, labels) in sorted(labels_by_family(full_page()).items()):
        listed = ", ".join(f"`{label}`" for label in sorted(labels))
        yield table_row(f"`{name}`", kind, listed, meaning)


@page(
    "settings",
    "Settings",
    """\
what `balanceroute serve` declares. A setting is a flag, or a key of a topology's `[proxy]` table of
the same name with underscores (`--pool-limit 40` is `pool_limit = 40`); those marked *top* stand at the top of the file.
Each is also a variable of the environment, `BALANCEROUTE_` and its name in capitals (`BALANCEROUTE_POOL_LIMIT=40`), with
white space between the items of a list and `true` or `false` for a switch. A flag goes before its variable, and that
before the file. A variable of no setting is refused; what Kubernetes adds for Services called `balanceroute` is passed over. Times
are in seconds. A switch has a second flag, `--no-...`. `--topology FILE` names the file itself.
""",
)
def settings_page() -> Iterator[str]:
    """Yield the tables of all settings, by the headings of the help."""
    for heading, sections in HEADINGS.items():
        yield f"## {heading[0].upper()}{heading[1:]}\n\n{table_head('flag', 'meaning', 'default')}"
        yield from (_row(one) for section in sections for one in settings_of(section))
        yield ""


@page(
    "routes",
    "Routes",
    """\
`proxy/live/openai/routes.py`: the routes of vLLM 0.32, and the proxy's own. HEAD is answered wherever GET
is, one slash behind a path makes no difference, and everything else is 404. [serving.md](../serving.md#what-is-served) says more.
""",
)
def routes_page() -> Iterator[str]:
    """Yield the table of all routes; those in a row that are served alike are one row."""
    yield table_head("route", "served by")
    for words, alike in groupby((*ROUTES, *CONTROL), _served_by):
        yield table_row(", ".join(chain.from_iterable(map(_methods, alike))), words)
    yield "\n## The select service\n\nWith `--select-key-file`, on its own port, from `proxy/live/select_service.py`.\n"
    yield table_head("route", "what it does")
    declared = select_service.__doc__
    assert declared is not None
    for method, paths, words in re.findall(r"(?m)^ {4}([A-Z]+) +(/.*?) {2,}(.+)$", declared):
        yield table_row(f"`{method} {paths}`", words)


def _methods(route: Route) -> Iterator[str]:
    methods = [method.decode() for method in route.methods if method != b"HEAD"]
    yield from (f"`{method} {route.path}`".replace("` ", "`") for method in methods or [""])


def _served_by(route: Route) -> str:
    words = route.handling.value
    if route.media is Media.FORM:
        words += f", `{route.media.value}`"
    if route.handling is Handling.OWN and not route.keyed:
        words += ", without an API key"
    return f"{words}: {route.reason}" if route.reason else words


@page(
    "failures",
    "What follows a failed leg",
    """\
`proxy/live/request/failures.py`: which check counts the failure against the engine, and how the request
goes on. A direct leg is a request that one engine does as a whole. [failures.md](../failures.md) says what clients get.
""",
)
def failures_page() -> Iterator[str]:
    """Yield the table of what follows a failed leg."""
    yield table_head("leg", "failure", "counted by", "next")
    for (leg, what), rule in RULES.items():
        yield table_row(leg.value, what.value, rule.blame.value, rule.then.value)


@page(
    "packages",
    "Packages",
    """\
the rules in `scripts/house.py` and the first lines of the packages. A module belongs to the row with
the longest matching name. A name in the second column includes its sub-packages; it lacks `proxy.` and `proxy.live.`.
""",
)
def packages_page() -> Iterator[str]:
    """Yield each package, its purpose, and what it may import beside itself."""
    yield table_head("package", "is for", "may import")
    for name, imports in sorted(MAY_IMPORT.items()):
        path = ROOT / name.replace(".", "/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        purpose = (ast.get_docstring(ast.parse(source.read_text())) or "").splitlines()[0]
        allowed = sorted(re.sub(r"^proxy\.(live\.)?", "", one) for one in imports - {"__version__"})
        yield table_row(f"`{name}`", purpose.rstrip("."), " ".join(allowed))


@page(
    "alerts",
    "Alerts",
    """\
`topologies/deploy/helm/rules.yaml`, which has the expressions.
""",
)
def alerts_page() -> Iterator[str]:
    """Yield each alert, its meaning, and where the docs say what to do."""
    rules = yaml.safe_load((CHART / "rules.yaml").read_text(encoding="utf-8"))
    yield table_head("alert", "severity", "means", "what to do")
    for rule in rules:
        notes = rule["annotations"]
        page = notes["runbook"].removeprefix("docs/")
        action = f"{notes['description']} [{page}](../{page})"
        yield table_row(f"`{rule['alert']}`", rule["labels"]["severity"], notes["summary"], action)


@page(
    "topologies",
    "Topologies",
    """\
the first lines of the files in `topologies/`. G is the number of decode ranks.
""",
)
def topologies_page() -> Iterator[str]:
    """Yield the shipped layouts, each with the first paragraph of its file."""
    yield table_head("topology", "connector", "layout")
    for path in sorted((ROOT / "topologies").glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        head = takewhile(lambda line: line.startswith("# "), text.splitlines())
        layout = " ".join(line.removeprefix("# ") for line in head)
        yield table_row(f"`{path.stem}`", tomllib.loads(text)["connector"], layout)


# Mappings of the chart's values whose keys are Kubernetes' or the user's.
OPEN_VALUES = {
    *("affinity", "annotations", "env", "labels", "nodeSelector", "podAnnotations"),
    *("prometheus", "requests", "limits"),
}
# Of those that are words, the words.
CHOICES = {
    "mode": ("", "coordinator", "sidecar", None),
    "failureMode": ("FailOpen", "FailClose"),
}


def values_schema() -> str:
    """Return the JSON schema of the chart's values: what values.yaml has, of the kinds that it has.

    A role has what both roles have, too, and `proxy.settings` the settings that are no top-level keys.
    """
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    # Beyond one node, where the chart makes the arguments.
    ranks = {"dataParallel": 1}
    for role in ("prefill", "decode"):
        own = values["engines"] | values[role] | ranks
        values[role] = {name: value for name, value in own.items() if name != "enabled"}
    schema = _schema_of(values)
    known = [
        one for sections in HEADINGS.values() for part in sections for one in settings_of(part)
    ]
    schema["properties"]["proxy"]["properties"]["settings"] = {
        "type": "object",
        "propertyNames": {"enum": sorted(one.name for one in known if not one.at_top)},
    }
    top = {"$schema": "http://json-schema.org/draft-07/schema#"}
    # Helm hands a chart what a chart above it calls global.
    schema["properties"]["global"] = {"type": "object"}
    return json.dumps(top | schema, indent=1) + "\n"


def _schema_of(value: object, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        if name in OPEN_VALUES or not value:
            return {"type": "object"}
        inner = {key: _schema_of(one, key) for key, one in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": inner}
    if name in CHOICES:
        return {"enum": list(CHOICES[name])}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "integer", "minimum": 0}
    return {"type": "array"} if isinstance(value, list) else {"type": ["string", "null"]}


def _row(setting: Setting) -> str:
    value = setting.metavar or "\\|".join(setting.choices)
    value = f" {value} .." if setting.many else f" {value}" if value else ""
    top = " *top*" if setting.at_top else ""
    meaning = re.sub(r"([<>|*])", r"\\\1", setting.help)
    default = setting.shown_default.replace("|", "\\|")
    return table_row(f"`{setting.flag}{value}`{top}", meaning, default)


MADE["topologies/deploy/helm/values.schema.json"] = values_schema


def reference(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Write what code and files declare: pages of the appendix, and the schema of the chart's values.

    For the metrics everything that can be counted is counted once, on a proxy with every feature on, and
    the page read.
    """
    parser.parse_args(words)
    for name, make in MADE.items():
        (ROOT / name).write_text(make(), encoding="utf-8")


# The way of a request, as a picture.
