"""The Helm chart and the kustomizations, rendered by their own tools where these are installed.

`make test-deploy` installs helm and Kubernetes' schemas, and runs these tests.
"""

import importlib
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.certificate import CERT, KEY

from balanceroute.proxy.live.discovery.kubernetes import ROLE_LABEL
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.topologies.commands import engine_commands
from balanceroute.topologies.topology import read_topology

DEPLOY = Path(__file__).parents[2] / "topologies" / "deploy"
CHART = DEPLOY / "helm"
HELM, KUBECTL = shutil.which("helm"), shutil.which("kubectl")
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
KUBERNETES = "1.31"
SECRETS = ("proxy.adminTokenSecret=adm", "proxy.apiKeySecret=keys", "proxy.tlsSecret=tls")
ADDRESSES = ("proxy.prefill[0].url=http://p:8000", "proxy.decode[0].url=http://d:8000")
PICKER = (
    "proxy.picker.mode=coordinator",
    "networkPolicy.gateway.namespaceSelector.matchLabels.runs=gateway",
)
SEVERAL_NODES = ("-f", str(CHART / "values-several-nodes.yaml"))

SELECTING = {"Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "InferencePool"}
CUSTOM = ("monitoring.coreos.com", "leaderworkerset.x-k8s.io", "inference.networking.k8s.io")
Object = dict[str, Any]
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")


def render(*options: str, name: str = "m1") -> list[Object]:
    """Return the objects of a release."""
    assert HELM is not None
    words = [HELM, "template", name, str(CHART), "-n", "serving", "--kube-version", "1.31.0"]
    done = subprocess.run([*words, *options], capture_output=True, check=True, text=True)
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def find(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def container(item: Object) -> Object:
    (found,) = item["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def flags(words: list[str]) -> dict[str, list[str]]:
    """Return the values of each flag, and under "" what stands before them."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = [value] if equals else []
        else:
            found[name].append(word)
    return found


def settings(objects: list[Object], tmp_path: Path) -> Any:
    """Return the configuration of the proxy of a release."""
    path = tmp_path / "proxy.toml"
    text = find(objects, "ConfigMap", "m1")["data"]["proxy.toml"]
    # Only its pod has these folders.
    for folder in ("/etc/balanceroute-keys", "/var/lib/balanceroute"):
        text = text.replace(folder, str(tmp_path))
    path.write_text(text)
    for name, content in (
        ("api-keys", "k"),
        ("admin-token", "t"),
        ("tls.crt", CERT),
        ("tls.key", KEY),
    ):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    return make_config(read_topology(path), {}, environment=IN_A_POD)


def check_schemas(objects: list[Object]) -> None:
    """Check every object that is Kubernetes' own against its schema, if the schemas are there."""
    try:
        schemas = importlib.import_module("kubernetes_validate")
    except ModuleNotFoundError:
        return
    for one in objects:
        if not one["apiVersion"].startswith(CUSTOM):
            schemas.validate(one, KUBERNETES, strict=True)


@needs_helm
def test_the_chart_has_no_lint() -> None:
    assert HELM is not None
    for options in (
        *([], [*SEVERAL_NODES], sets(*PICKER)),
        sets("monitoring.enabled=true", *SECRETS),
    ):
        words = [HELM, "lint", "--strict", str(CHART), "--kube-version", "1.31.0", *options]
        done = subprocess.run(words, capture_output=True, check=False, text=True)
        assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize(
    "options",
    [
        [],
        [*SEVERAL_NODES],
        sets("monitoring.enabled=true", *SECRETS),
        sets("proxy.inferencePool.name=chat", "monitoring.enabled=true"),
        sets(*PICKER, "monitoring.enabled=true"),
        [*SEVERAL_NODES, *sets(*PICKER)],
        sets(
            "proxy.state.enabled=true", "networkPolicy.enabled=false", "engines.rdma.enabled=false"
        ),
    ],
)
def test_every_object_is_of_its_schema_and_selectors_find_their_pods(options: list[str]) -> None:
    objects = render(*options)
    check_schemas(objects)
    pods = []
    for one in objects:
        spec = one.get("spec", {})
        if "template" in spec:
            labels = spec["template"]["metadata"]["labels"]
            assert spec["selector"]["matchLabels"].items() <= labels.items()
            pods.append(labels)
        if "leaderWorkerTemplate" in spec:
            group = spec["leaderWorkerTemplate"]
            pods += [group[f"{one}Template"]["metadata"]["labels"] for one in ("leader", "worker")]
    for one in objects:
        selector = one.get("spec", {}).get("podSelector") or one.get("spec", {}).get("selector")
        if one["kind"] in SELECTING:
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= labels.items() for labels in pods), one["metadata"]


@needs_helm
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_run_the_commands_of_the_topology(role: str) -> None:
    topology = read_topology(DEPLOY / "kubernetes" / "topology.toml")
    assert topology.engines is not None
    command = next(
        one for one in engine_commands(topology.engines, topology.models) if one.role == role
    )
    given = container(find(render(), "StatefulSet", f"m1-{role}")["spec"])
    assert given["command"] == ["vllm", "serve"]
    words = [word for item in command.words for word in item][2:]
    expected = flags(["$(POD_IP)" if word == command.host else word for word in words])
    found = flags(given["args"])
    for one in (expected, found):
        for key in ("--kv-transfer-config", "--compilation-config"):
            if key in one:
                one[key] = [json.dumps(json.loads(one[key][0]))]
    assert found == expected
    environment = {entry["name"]: entry.get("value") for entry in given["env"]}
    for key, value in command.environment.items():
        if key != "CUDA_VISIBLE_DEVICES":
            assert environment[key] == ("$(POD_IP)" if value == command.host else value)


@needs_helm
def test_the_proxy_reads_its_settings_and_finds_the_engines(tmp_path: Path) -> None:
    for options in ([], sets(*SECRETS, "proxy.settings.policy=br-0")):
        objects = render(*options)
        config = settings(objects, tmp_path)
        assert config.scheduling.policy == ("br-0" if options else "br-h")
        assert (config.scheduling.batch, config.lease_s) == (64, 120)
        (source,) = config.discovery.discover
        selector = dict(word.partition("=")[::2] for word in source.place.split(","))
        for role in ("prefill", "decode"):
            labels = find(objects, "Service", f"m1-{role}")["metadata"]["labels"]
            assert labels[ROLE_LABEL] == role
            assert selector.keys() <= labels.keys()
            assert all(labels[key] == value for key, value in selector.items() if value)
        deployment = find(objects, "Deployment", "m1")
        grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > config.times.drain_timeout_s + 10
        (rule,) = find(objects, "Role", "m1")["rules"]
        assert set(rule["verbs"]) == {"get", "list", "watch"}


@needs_helm
def test_of_two_proxies_one_leads_by_a_lease(tmp_path: Path) -> None:
    objects = render(*sets("proxy.replicas=2", "proxy.disruptionBudget=true"))
    check_schemas(objects)
    assert settings(objects, tmp_path).leader.leader_lease == "m1"
    deployment = find(objects, "Deployment", "m1")["spec"]
    assert deployment["replicas"] == 2
    # One is ready at a time: with less the old leader would never end.
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": "100%", "maxUnavailable": "100%"}
    assert container(deployment)["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert "publishNotReadyAddresses" not in find(objects, "Service", "m1")["spec"]
    _, use, make = find(objects, "Role", "m1")["rules"]
    assert (use["resources"], use["resourceNames"]) == (["leases"], ["m1"])
    assert sorted([*use["verbs"], *make["verbs"]]) == ["create", "get", "update"]
    assert find(objects, "PodDisruptionBudget", "m1")["spec"]["minAvailable"] == 1
    alone = sets("proxy.replicas=2", "engines.enabled=false", "proxy.settings.discover={dns:x}")
    assert len(find(render(*alone), "Role", "m1")["rules"]) == 2
    with pytest.raises(subprocess.CalledProcessError):
        render(*sets("proxy.replicas=2", "proxy.state.enabled=true"))


@needs_helm
def test_engines_wait_until_they_are_drained_where_they_have_the_token() -> None:
    spec = find(render(*sets("proxy.adminTokenSecret=adm")), "StatefulSet", "m1-prefill")["spec"]
    *_, order = container(spec)["lifecycle"]["preStop"]["exec"]["command"]
    for part in ("http://m1-admin:9000/admin/instances/drain", '\\"wait_s\\": 300'):
        assert part in order
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 300 + 60
    spec = find(render(), "StatefulSet", "m1-prefill")["spec"]
    assert container(spec)["lifecycle"]["preStop"]["exec"]["command"][-1] == "sleep 5"


@needs_helm
def test_ranks_on_several_nodes_are_one_group() -> None:
    objects = render(*SEVERAL_NODES)
    spec = find(objects, "LeaderWorkerSet", "m1-decode")["spec"]["leaderWorkerTemplate"]
    assert spec["size"] == 4
    leader, worker = (
        spec[which]["spec"]["containers"][0] for which in ("leaderTemplate", "workerTemplate")
    )
    for one in (leader, worker):
        shell, _, script, _ = one["command"]
        assert shell == "bash"
        environment = {"LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "m1-decode-0.x", "PATH": ""}
        # What vLLM would be started with.
        show = 'exec() { printf "%s\\n" "$@"; }\n'
        words = ["/bin/bash", "-c", show + script, "bash", *one["args"]]
        done = subprocess.run(words, env=environment, capture_output=True, check=True, text=True)
        found = flags(done.stdout.splitlines()[2:])
        assert found["--data-parallel-start-rank"] == ["16"]
        assert found["--data-parallel-size"] == ["32"]
        assert found["--data-parallel-size-local"] == ["8"]
        assert found["--data-parallel-address"] == ["m1-decode-0.x"]
        assert ("--headless" in found) == (one is worker)
    # Followers answer nobody.
    assert "readinessProbe" in leader
    assert "readinessProbe" not in worker
    selector = find(objects, "Service", "m1-decode")["spec"]["selector"]
    labels = [spec[w]["metadata"]["labels"] for w in ("leaderTemplate", "workerTemplate")]
    assert [selector.items() <= one.items() for one in labels] == [True, False]


@needs_helm
def test_two_releases_share_no_name() -> None:
    names = [
        {(one["kind"], one["metadata"]["name"]) for one in render(name=name)}
        for name in ("m1", "m2")
    ]
    assert not names[0] & names[1]


@needs_helm
def test_the_proxy_alone_serves_engines_that_are_there(tmp_path: Path) -> None:
    static = sets(
        "engines.enabled=false",
        "proxy.prefill[0].url=http://10.0.0.1:8000",
        "proxy.decode[0].url=http://10.0.0.9:8000,proxy.decode[0].ranks=8",
        "proxy.settings.batch=32",
        "monitoring.enabled=true",
    )
    objects = render(*static)
    kinds = {one["kind"] for one in objects}
    assert not kinds & {"StatefulSet", "Role", "RoleBinding", "PodDisruptionBudget"}
    pod = find(objects, "Deployment", "m1")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    config = settings(objects, tmp_path)
    assert [str(one.url) for one in config.prefillers] == ["http://10.0.0.1:8000"]
    assert [len(one.ranks) for one in config.decoders] == [8]
    assert config.scheduler_config(8, 1).batch_limit == 32
    found = "kubernetes:app=engines@other"
    objects = render(
        *sets("engines.enabled=false", f"proxy.settings.discover={{{found}}}"), name="m1"
    )
    (source,) = settings(objects, tmp_path).discovery.discover
    assert source.place.startswith("app=engines")
    assert find(objects, "Role", "m1")
    refused = refuse("engines.enabled=false")
    assert "proxy.settings.discover" in refused


def refuse(*values: str) -> str:
    """Return why the chart takes no such values."""
    assert HELM is not None
    words = [HELM, "template", "m1", str(CHART), "--kube-version", "1.31.0", *sets(*values)]
    done = subprocess.run(words, capture_output=True, check=False, text=True)
    assert done.returncode != 0
    return done.stderr


@needs_helm
@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("proxy.polcy=z", "polcy"),
        ("prxy.foo=1", "prxy"),
        ("decode.replica=3", "replica"),
        ("decode.replicas=three", "replicas"),
        ("proxy.settings.polcy=br-0", "polcy"),
        ("proxy.http3=true", "proxy.tlsSecret"),
        ("engines.rdma=false", "rdma"),
    ],
)
def test_a_value_that_means_nothing_is_refused(value: str, named: str) -> None:
    assert named in refuse(value)


@needs_helm
def test_what_operators_add_reaches_the_pods(tmp_path: Path) -> None:
    files = {
        "imagePullSecrets": [{"name": "registry"}],
        "nameOverride": "chat",
        "proxy": {
            "tenantsSecret": "tenants",
            "engineKeySecret": "engines",
            "tlsSecret": "tls",
            "http3": True,
            "httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["chat.example.com"]},
            "env": {
                "OTEL_SDK_DISABLED": "true",
                "BALANCEROUTE_X": {"secretKeyRef": {"name": "x", "key": "k"}},
            },
            "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
            "podAnnotations": {"team": "serving"},
            "disruptionBudget": True,
            "settings": {"batch": 8},
        },
        "engines": {
            "env": {"HF_TOKEN": {"secretKeyRef": {"name": "hf", "key": "token"}}},
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "DoNotSchedule",
                }
            ],
        },
    }
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(files))
    objects = render("-f", str(path))
    check_schemas([one for one in objects if one["kind"] != "HTTPRoute"])
    pod = find(objects, "Deployment", "chat")["spec"]["template"]
    assert pod["metadata"]["annotations"]["team"] == "serving"
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    (proxy,) = pod["spec"]["containers"]
    environment = {one["name"]: one for one in proxy["env"]}
    assert environment["OTEL_SDK_DISABLED"]["value"] == "true"
    assert environment["BALANCEROUTE_X"]["valueFrom"]["secretKeyRef"]["name"] == "x"
    assert {"name": "ca", "mountPath": "/ca"} in proxy["volumeMounts"]
    ports = find(objects, "Service", "chat")["spec"]["ports"]
    assert {one.get("protocol", "TCP") for one in ports} == {"TCP", "UDP"}
    text = find(objects, "ConfigMap", "chat")["data"]["proxy.toml"]
    told = tomllib.loads(text)["proxy"]
    assert (told["batch"], told["http3"]) == (8, True)
    assert told["tenants"].endswith("tenants.toml")
    assert find(objects, "PodDisruptionBudget", "chat")["spec"]["maxUnavailable"] == 0
    assert find(objects, "HTTPRoute", "chat")["spec"]["hostnames"] == ["chat.example.com"]
    engine = find(objects, "StatefulSet", "chat-decode")["spec"]["template"]["spec"]
    assert engine["imagePullSecrets"] == [{"name": "registry"}]
    assert engine["topologySpreadConstraints"][0]["maxSkew"] == 1
    token = {one["name"]: one for one in engine["containers"][0]["env"]}["HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"]["key"] == "token"


def of_pool(objects: list[Object], pool: Object) -> list[str]:
    """Return the names of the workloads whose pods a pool selects."""
    wanted = pool["spec"]["selector"]["matchLabels"].items()
    found = []
    for one in objects:
        spec = one.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        pods = [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
        found += [
            one["metadata"]["name"]
            for pod in pods
            if pod is not None and wanted <= pod["metadata"]["labels"].items()
        ]
    return sorted(found)


def check_pool(pool: Object, *, picker: str, failure: str = "FailOpen") -> None:
    """Check a pool as v1 of its CRD does, in the release 1.6.0 of the extension."""
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    spec = pool["spec"]
    assert spec.keys() - {"endpointPickerRef", "appProtocol"} == {"selector", "targetPorts"}
    assert spec["selector"].keys() == {"matchLabels"}
    # Each port would be an endpoint of its own.
    assert spec["targetPorts"] == [{"number": 8000}]
    reference = spec.get("endpointPickerRef")
    # The port is needed as the reference is to a Service.
    expected = {"name": picker, "port": {"number": 9002}, "failureMode": failure}
    assert reference == (expected if picker else None)


@needs_helm
def test_the_proxies_of_several_releases_are_one_pool(tmp_path: Path) -> None:
    values = ("proxy.inferencePool.name=chat", "proxy.httpRoute.parentRefs[0].name=public")
    first = render(*sets(*values, "proxy.inferencePool.endpointPicker.name=epp"))
    second = render(*sets(*values, "proxy.inferencePool.create=false"), name="m2")
    pool = find(first, "InferencePool", "chat")
    check_pool(pool, picker="epp")
    assert not [one for one in second if one["kind"] == "InferencePool"]
    bare = find(render(*sets(values[0], "proxy.settings.http2=true")), "InferencePool", "chat")
    check_pool(bare, picker="")
    assert bare["spec"]["appProtocol"] == "kubernetes.io/h2c"
    assert "appProtocol" not in pool["spec"]
    selected = of_pool([*first, *second, *render(name="m3")], pool)
    assert selected == ["m1", "m2"]  # Neither engines, nor a release of no pool.
    (rule,) = find(first, "HTTPRoute", "m1")["spec"]["rules"]
    group = {"group": "inference.networking.k8s.io", "kind": "InferencePool"}
    assert rule["backendRefs"] == [group | {"name": "chat"}]
    config = settings(first, tmp_path)
    assert config.gateway.picker_names["waiting"] == "vllm:num_requests_waiting"
    port = container(find(first, "Deployment", "m1")["spec"])["ports"][0]["containerPort"]
    assert pool["spec"]["targetPorts"] == [{"number": port}]
    assert not settings(render(), tmp_path).gateway.picker_names


def check_picker(objects: list[Object], pool: Object, service: str, proxy: Object) -> None:
    """Check that a pool's picker is the proxy, by a Service."""
    check_pool(pool, picker=service, failure="FailClose")
    (port,) = find(objects, "Service", service)["spec"]["ports"]
    assert port["port"] == pool["spec"]["endpointPickerRef"]["port"]["number"]
    ports = {one["name"]: one["containerPort"] for one in proxy["ports"]}
    assert ports[port["targetPort"]] == 9002
    assert proxy["args"][0] == "pick"


@needs_helm
@pytest.mark.parametrize("nodes", [(), SEVERAL_NODES], ids=["one", "several"])
def test_the_proxy_is_the_picker_of_a_pool_of_engines(
    nodes: tuple[str, ...], tmp_path: Path
) -> None:
    route = "proxy.httpRoute.parentRefs[0].name=public"
    objects = render(*nodes, *sets(*PICKER, route))
    pool = find(objects, "InferencePool", "m1")
    check_picker(objects, pool, "m1-picker", container(find(objects, "Deployment", "m1")["spec"]))
    assert of_pool([*objects, *render(name="m2")], pool) == ["m1-decode", "m1-prefill"]
    (rule,) = find(objects, "HTTPRoute", "m1")["spec"]["rules"]
    group = {"group": "inference.networking.k8s.io", "kind": "InferencePool"}
    assert rule["backendRefs"] == [group | {"name": "m1"}]
    gateway = settings(objects, tmp_path).gateway
    assert (gateway.pick, gateway.pick_host, gateway.pick_port) == (
        *("coordinator", "0.0.0.0"),  # noqa: S104 - read, not bound.
        9002,
    )
    peer = {"namespaceSelector": {"matchLabels": {"runs": "gateway"}}}
    for policy, port in (("m1-engines", 8000), ("m1-proxy", 9002)):
        rules = find(objects, "NetworkPolicy", policy)["spec"]["ingress"]
        assert [one["ports"] for one in rules if peer in one.get("from", ())] == [[{"port": port}]]


@needs_helm
def test_a_picker_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    objects = render()
    assert not [one for one in objects if one["kind"] == "InferencePool"]
    assert not [one for one in objects if one["metadata"]["name"] == "m1-picker"]
    proxy = container(find(objects, "Deployment", "m1")["spec"])
    assert proxy["args"][0] == "serve"
    assert settings(objects, tmp_path).gateway.pick == "off"


@needs_helm
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (PICKER[:1], "name where it runs in networkPolicy.gateway"),
        ((*PICKER, "proxy.inferencePool.name=chat"), "a pool has proxies or engines"),
        ((PICKER[1], "proxy.picker.mode=sidecar"), "decode pods have no sidecar"),
        ((*PICKER, "engines.enabled=false", *ADDRESSES), "labels of the engines' pods"),
        ((PICKER[1], "proxy.picker.mode=both"), "coordinator"),
    ],
)
def test_a_picker_that_cannot_be_is_refused(values: tuple[str, ...], reason: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render(*sets(*values))
    assert reason in refused.value.stderr


@needs_helm
def test_engines_of_others_have_a_picker_too(tmp_path: Path) -> None:
    values = ("engines.enabled=false", "proxy.picker.mode=sidecar", "proxy.picker.engines.app=llm")
    objects = render(*sets(*values, PICKER[1], *ADDRESSES))
    pool = find(objects, "InferencePool", "m1")
    assert pool["spec"]["selector"]["matchLabels"] == {"app": "llm"}
    check_picker(objects, pool, "m1-picker", container(find(objects, "Deployment", "m1")["spec"]))
    assert settings(objects, tmp_path).gateway.pick == "sidecar"


def kustomized(tmp_path: Path, old: str, new: str) -> list[Object]:
    """Return the objects of the kustomization with a line changed."""
    assert KUBECTL is not None
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    path = tmp_path / "kubernetes" / "kustomization.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    words = [KUBECTL, "kustomize", str(path.parent)]
    done = subprocess.run(words, capture_output=True, check=True, text=True)
    objects = list(yaml.safe_load_all(done.stdout))
    check_schemas(objects)
    return objects


@needs_kubectl
def test_the_component_makes_the_proxy_a_picker(tmp_path: Path) -> None:
    picker = "components: [components/picker, components/replicas]\n#"
    objects = kustomized(tmp_path, "# components:", picker)
    pool = find(objects, "InferencePool", "deepseek-v3")
    proxy = container(find(objects, "Deployment", "balanceroute")["spec"])
    check_picker(objects, pool, "balanceroute-picker", proxy)
    assert "--pick-host=0.0.0.0" in proxy["args"]
    assert of_pool(objects, pool) == ["decode", "prefill"]
    (rule, _) = find(objects, "NetworkPolicy", "balanceroute-engines")["spec"]["ingress"]
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}} in (
        rule["from"]
    )


@needs_kubectl
def test_the_component_makes_a_pool_of_the_proxy(tmp_path: Path) -> None:
    objects = kustomized(tmp_path, "# components:", "components:")
    pool = find(objects, "InferencePool", "deepseek-v3")
    check_pool(pool, picker="deepseek-v3-epp")
    assert of_pool(objects, pool) == ["balanceroute"]
    proxy = container(find(objects, "Deployment", "balanceroute")["spec"])
    assert "--picker-metrics=vllm" in proxy["args"]
    (monitored,) = find(objects, "PodMonitor", "balanceroute")["spec"]["podMetricsEndpoints"]
    (relabeling,) = monitored["metricRelabelings"]
    for container_name, dropped in (("proxy", True), ("vllm", False)):
        joined = f"{container_name};vllm:num_requests_running"
        assert bool(re.fullmatch(relabeling["regex"], joined)) == dropped


@needs_helm
def test_an_upgrade_leaves_nobody_without_a_proxy() -> None:
    strategy = find(render(), "Deployment", "m1")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    strategy = find(render(*sets("proxy.state.enabled=true")), "Deployment", "m1")["spec"][
        "strategy"
    ]
    assert strategy == {"type": "Recreate"}


@needs_kubectl
@pytest.mark.parametrize("folder", ["kubernetes", "kubernetes-second-model"])
def test_kustomizations_build(folder: str) -> None:
    assert KUBECTL is not None
    words = [KUBECTL, "kustomize", str(DEPLOY / folder)]
    done = subprocess.run(words, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    check_schemas(objects)
    prefix, instance = ("", "balanceroute") if folder == "kubernetes" else ("second-", "second")
    for one in objects:
        assert one["metadata"]["name"].startswith(prefix)
        assert one["metadata"]["namespace"] == "serving"
    (subject,) = find(objects, "RoleBinding", f"{prefix}balanceroute")["subjects"]
    account = find(objects, "ServiceAccount", f"{prefix}balanceroute")["metadata"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    for role in ("prefill", "decode"):
        service = find(objects, "Service", f"{prefix}{role}")
        assert service["metadata"]["labels"]["app.kubernetes.io/instance"] == instance
        assert service["spec"]["selector"]["app.kubernetes.io/instance"] == instance
    policy = find(objects, "NetworkPolicy", f"{prefix}balanceroute-engines")["spec"]
    labels = policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/instance"] == instance
