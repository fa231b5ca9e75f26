"""The Compose file and the Kubernetes manifests say what their topologies say, and drain in time."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from balanceroute.proxy.cli.command_line import make_parser
from balanceroute.proxy.cli.serve import flags_given
from balanceroute.proxy.cli.topology import check_topology
from balanceroute.proxy.live.discovery.kubernetes import ROLE_LABEL
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.topologies.commands import Command, engine_commands
from balanceroute.topologies.topology import Topology, read_topology

DEPLOY = Path(__file__).parents[2] / "topologies" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
POD_IP = "$(POD_IP)"
INSTANCE = "app.kubernetes.io/instance"
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}

Object = dict[str, Any]


def objects() -> list[Object]:
    """Return what `kubectl apply -k` would, less the generated ConfigMap."""
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    return [
        item
        for name in kustomization["resources"]
        for item in yaml.safe_load_all((KUBERNETES / name).read_text())
    ]


def one(kind: str, name: str) -> Object:
    found = [o for o in objects() if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1
    return found[0]


def pod(item: Object) -> Object:
    spec: Object = item["spec"]["template"]["spec"]
    return spec


def container(item: Object) -> Object:
    (found,) = pod(item)["containers"]
    assert isinstance(found, dict)
    return found


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


def arguments(command: Command) -> list[str]:
    words = [word for item in command.words for word in item]
    assert words[:2] == ["vllm", "serve"]
    return words[2:]


@pytest.fixture(scope="module")
def topology() -> Topology:
    return read_topology(KUBERNETES / "topology.toml")


@pytest.fixture(scope="module")
def compose() -> Object:
    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert isinstance(content, dict)
    return content


def test_every_manifest_is_in_the_kustomization() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    written = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == written


def test_nothing_is_wrong_with_their_topology(topology: Topology) -> None:
    assert not list(check_topology(topology))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stateful_set_runs_the_commands_of_its_role(role: str, topology: Topology) -> None:
    assert topology.engines is not None
    commands = [
        command
        for command in engine_commands(topology.engines, topology.models)
        if command.role == role
    ]
    item = one("StatefulSet", role)
    service = item["spec"]["serviceName"]
    assert [command.host for command in commands] == [
        f"{item['metadata']['name']}-{i}.{service}" for i in range(item["spec"]["replicas"])
    ]
    given = container(item)
    environment = {entry["name"]: entry.get("value") for entry in given["env"]}
    for command in commands:
        words = [POD_IP if word == command.host else word for word in arguments(command)]
        assert given["args"] == words
        for key, value in command.environment.items():
            if key != "CUDA_VISIBLE_DEVICES":
                assert environment[key] == (POD_IP if value == command.host else value)
        devices = command.environment["CUDA_VISIBLE_DEVICES"].split(",")
        assert given["resources"]["limits"]["nvidia.com/gpu"] == str(len(devices))
    assert environment["VLLM_HOST_IP"] == POD_IP


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_are_found_by_label_and_probed_where_they_listen(role: str) -> None:
    service, item = one("Service", role), one("StatefulSet", role)
    assert service["metadata"]["labels"][ROLE_LABEL] == role
    # Else who is not ready would be listed as ready.
    assert "publishNotReadyAddresses" not in service["spec"]
    # A new version is no use beside old ones, one by one.
    assert item["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert one("PodDisruptionBudget", role)["spec"]["selector"] == item["spec"]["selector"]
    assert "securityContext" not in container(item)  # Of the component rdma alone.
    assert (
        service["spec"]["selector"].items()
        <= item["spec"]["template"]["metadata"]["labels"].items()
    )
    assert item["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    given = container(item)
    ports = {port["name"]: port["containerPort"] for port in given["ports"]}
    assert str(ports["api"]) == given["args"][given["args"].index("--port") + 1]
    assert ports["api"] == service["spec"]["ports"][0]["port"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert given[probe]["httpGet"] == {"path": "/health", "port": "api"}
    base = next(e["value"] for e in given["env"] if e["name"] == "VLLM_NIXL_SIDE_CHANNEL_PORT")
    ranks = 8 if role == "decode" else 1
    assert [ports[f"nixl-{i}"] for i in range(ranks)] == [int(base) + i for i in range(ranks)]
    # Those who reach an engine are named by its label.
    labels = item["spec"]["template"]["metadata"]["labels"]
    policy = one("NetworkPolicy", "balanceroute-engines")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_proxy_is_probed_and_has_time_to_drain(topology: Topology) -> None:
    item = one("Deployment", "balanceroute")
    given = container(item)
    labels = item["spec"]["template"]["metadata"]["labels"]
    chosen = make_parser().parse_args(
        [word.replace("$(INSTANCE)", labels[INSTANCE]) for word in given["args"]]
    )
    config = make_config(None, flags_given(chosen), environment=IN_A_POD)
    expected = make_config(topology, {})
    assert config.scheduling.batch == expected.scheduling.batch
    assert config.lease_s == expected.lease_s
    assert config.engines == expected.engines
    (source,) = config.discovery.discover
    selector = dict(word.partition("=")[::2] for word in source.place.split(","))
    for role in ("prefill", "decode"):
        service = one("Service", role)["metadata"]["labels"]
        assert all(service[key] == value for key, value in selector.items() if value)
        assert selector.keys() <= service.keys()
    (variable,) = given["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{INSTANCE}']"
    assert (
        pod(item)["serviceAccountName"] == one("ServiceAccount", "balanceroute")["metadata"]["name"]
    )
    (rule,) = one("Role", "balanceroute")["rules"]
    assert rule["resources"] == ["endpointslices"]
    assert set(rule["verbs"]) == {"get", "list", "watch"}
    (port,) = given["ports"]
    assert port == {"name": "api", "containerPort": config.listening.port}
    assert config.listening.host == "0.0.0.0"  # noqa: S104 - what the file says.
    assert given["livenessProbe"]["httpGet"] == {"path": "/health", "port": "api"}
    assert given["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "api"}
    (program, wait) = given["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    grace = pod(item)["terminationGracePeriodSeconds"]
    assert grace > config.times.drain_timeout_s + int(wait)
    assert {"cpu", "memory"} <= given["resources"]["requests"].keys()
    assert "memory" in given["resources"]["limits"]
    # Two would not know of each other.
    assert item["spec"]["replicas"] == 1
    service = one("Service", "balanceroute")
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    (allowed, _) = one("NetworkPolicy", "balanceroute-engines")["spec"]["ingress"]
    assert allowed["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    # Administration stays in the pod.
    assert config.listening.admin_host == "127.0.0.1"


def test_compose_runs_the_commands_of_its_topology(compose: Object) -> None:
    topology = read_topology("gpu-1p1d")
    assert topology.engines is not None
    commands = engine_commands(topology.engines, topology.models)
    services = compose["services"]
    assert services.keys() == {"proxy", *(command.name for command in commands)}
    for command in commands:
        service = services[command.name]
        assert service["entrypoint"] == ["vllm", "serve"]
        # Compose splits a command as a shell does.
        assert shlex.split(service["command"]) == arguments(command)
        assert service["environment"] == dict(command.environment)
        # KV caches move over GPU links only between processes that see each other and all GPUs.
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert devices["count"] == "all"
        assert service["pid"] == service["ipc"] == "host"
        # A rank cannot rejoin its group alone.
        assert (service["restart"] == "no") == (command.role == "decode")
        words = arguments(command)
        port = words[words.index("--port") + 1]
        assert service["healthcheck"]["test"][-1] == f"http://{command.host}:{port}/health"


def test_the_proxy_of_compose_has_time_to_drain(compose: Object) -> None:
    config = make_config(read_topology("gpu-1p1d"), {})
    proxy = compose["services"]["proxy"]
    assert shlex.split(proxy["command"]) == ["serve", "--topology", "gpu-1p1d"]
    assert seconds(proxy["stop_grace_period"]) > config.times.drain_timeout_s
    assert f"127.0.0.1:{config.listening.port}/health" in proxy["healthcheck"]["test"][-1]
    assert (DEPLOY / proxy["build"]["context"] / proxy["build"]["dockerfile"]).is_file()


def test_alerts_are_on_metrics_that_there_are() -> None:
    page = (DEPLOY.parents[1] / "docs" / "appendix" / "metrics.md").read_text()
    rules = yaml.safe_load((DEPLOY / "helm" / "rules.yaml").read_text())
    named = {name for rule in rules for name in re.findall(r"balanceroute_\w+", rule["expr"])}
    assert len(named) > 5
    assert {name for name in named if f"`{name.removesuffix('_bucket')}`" not in page} == set()
