"""Manifests and Leases at a real API server; skipped where it is not built (`make kube`)."""

import asyncio
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.topologies.kube_api_server import IS_THERE, ApiServerProcess, api_server, run

from balanceroute.proxy.live.discovery.sources import api_client
from balanceroute.proxy.live.leader.kubernetes_lease import KubernetesLease
from balanceroute.proxy.live.leader.leadership import Leadership
from balanceroute.proxy.live.settings.declared import DiscoverySettings

pytestmark = [
    pytest.mark.skipif(not IS_THERE, reason="no API server in build/kube/bin"),
    pytest.mark.extended,
]
DEPLOY = Path(__file__).parents[2] / "topologies" / "deploy"
LEVELS = ("baseline", "restricted")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServerProcess]:
    with api_server(tmp_path_factory.mktemp("kube")) as running:
        yield running


@pytest.fixture(scope="module")
def base(server: ApiServerProcess, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Apply the kustomization with two proxies; return its namespace."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(DEPLOY, folder / "deploy")
    path = folder / "deploy" / "kubernetes" / "kustomization.yaml"
    path.write_text(path.read_text() + "\ncomponents: [components/replicas]\n")
    server.kubectl("create", "namespace", "serving")
    for side in ("", "server", "server"):  # Nothing conflicts with what was applied before.
        applied = server.kubectl("apply", f"--server-side={bool(side)}", "-k", path.parent)
        assert applied.returncode == 0, applied.stderr
    return "serving"


def can(server: ApiServerProcess, account: Path, verb: str, what: str, name: str = "") -> bool:
    """Return whether an account may do something, by trying it."""
    token = (account / "token").read_text()
    access = ("--server", server.url, "--token", token)
    trust = (
        "--certificate-authority",
        account / "ca.crt",
        "-n",
        (account / "namespace").read_text(),
    )
    done = run("kubectl", *access, *trust, "auth", "can-i", verb, what, *([name] if name else []))
    return done.stdout.strip() == "yes"


def test_the_proxys_account_may_use_leases_and_no_secrets(
    server: ApiServerProcess, base: str
) -> None:
    account = server.account("balanceroute", base)
    for verb in ("get", "create", "update"):
        assert can(server, account, verb, "leases.coordination.k8s.io")
    assert not can(server, account, "delete", "leases.coordination.k8s.io")
    assert not can(server, account, "get", "secrets")


def test_two_proxies_are_one_deployment(server: ApiServerProcess, base: str) -> None:
    told = server.get(f"/apis/apps/v1/namespaces/{base}/deployments/balanceroute")
    assert told["spec"]["replicas"] == 2
    assert told["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": "100%",
        "maxUnavailable": "100%",
    }
    (one,) = told["spec"]["template"]["spec"]["containers"]
    assert one["args"][-1] == "--leader-lease=balanceroute-$(INSTANCE)"


def lease(server: ApiServerProcess, account: Path, name: str) -> KubernetesLease:
    settings = DiscoverySettings(kubernetes_api=server.url, kubernetes_account=account)
    return KubernetesLease(
        api_client(settings),
        "balanceroute-balanceroute",
        None,
        name=name,
        duration_s=3,
        clock=time.monotonic,
        unix_s=time.time,  # noqa: TID251 - a real process.
        rng=random.SystemRandom(),
    )


class Candidate:
    """A process that may lead, as far as that goes."""

    def __init__(self, server: ApiServerProcess, account: Path, name: str) -> None:
        self.leadership = Leadership(
            lease(server, account, name),
            duration_s=3,
            clock=time.monotonic,
            rng=random.SystemRandom(),
            groups=tuple,
        )
        self._task = asyncio.create_task(self.leadership.run())

    async def until(self, *, leads: bool = True, limit_s: float = 30.0) -> None:
        async with asyncio.timeout(limit_s):
            while self.leadership.leads != leads:  # noqa: ASYNC110 - nobody tells.
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.leadership.close()


def test_one_leads_by_a_real_lease_whatever_becomes_of_it(
    server: ApiServerProcess, base: str
) -> None:
    account = server.account("balanceroute", base)
    where = ("lease", "balanceroute-balanceroute", "-n", base)

    async def patch(spec: object) -> None:
        words = ("patch", *where, "--type=merge", "-p", json.dumps({"spec": spec}))
        done = await asyncio.to_thread(server.kubectl, *words)
        assert done.returncode == 0, done.stderr

    async def main() -> None:
        a, b = Candidate(server, account, "a"), Candidate(server, account, "b")
        both = (a, b)
        over = False

        async def watch() -> None:
            while not over:
                assert sum(one.leadership.leads for one in both) <= 1
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())

        async def leader() -> Candidate:
            async with asyncio.timeout(60.0):
                while not any(one.leadership.leads for one in both):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            return a if a.leadership.leads else b

        first = await leader()
        for edit in (
            {"holderIdentity": None},
            {"holderIdentity": "somebody"},
            {"renewTime": None, "leaseTransitions": None, "acquireTime": None},
            {"leaseDurationSeconds": 1},
            {"leaseTransitions": (1 << 31) - 1},
            {"renewTime": "1999-01-01T00:00:00.000000Z"},
        ):
            await patch(edit)
            await asyncio.sleep(0.7)
            first = await leader()
        await asyncio.to_thread(server.kubectl, "delete", *where)
        await asyncio.sleep(1.0)
        first = await leader()
        await asyncio.to_thread(server.kill)
        await first.until(leads=False)
        await asyncio.sleep(2.0)
        await asyncio.to_thread(server.start)
        first = await leader()
        # Given up, it is taken at once.
        await first.leadership.retire()
        other = b if first is a else a
        await other.until(limit_s=2.5)
        # Killed, its Lease runs out.
        await first.kill()
        await other.kill()
        both = (c := Candidate(server, account, "c"), other)
        await c.until(limit_s=6.0)
        over = True
        await watching
        await c.kill()

    asyncio.run(main())
    spec = server.get(f"/apis/coordination.k8s.io/v1/namespaces/{base}/leases/{where[1]}")["spec"]
    assert spec["holderIdentity"] == "c"
    assert spec["leaseDurationSeconds"] == 3


@pytest.mark.parametrize("level", LEVELS)
def test_the_proxys_pod_is_accepted_at_every_level_and_engines_at_baseline(
    server: ApiServerProcess, base: str, level: str
) -> None:
    space = f"pods-{level}"
    server.kubectl("create", "namespace", space)
    label = f"pod-security.kubernetes.io/enforce={level}"
    assert server.kubectl("label", "namespace", space, label).returncode == 0
    kinds = {"balanceroute": "deployments", "prefill": "statefulsets", "decode": "statefulsets"}
    refused = {}
    for name, kind in kinds.items():
        made = server.get(f"/apis/apps/v1/namespaces/{base}/{kind}/{name}")
        template = made["spec"]["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": template["metadata"]["labels"]},
            "spec": template["spec"],
        }
        # As controllers make it: that is where the level is enforced.
        tried = server.kubectl(
            "create", "-n", space, "--dry-run=server", "-f", "-", text=json.dumps(pod)
        )
        refused[name] = "violates PodSecurity" in tried.stderr
        assert refused[name] or tried.returncode == 0, tried.stderr
    engines = level == "restricted"
    assert refused == {"balanceroute": False, "prefill": engines, "decode": engines}


# What `v1` of the Gateway API Inference Extension takes, as its reference says; the CRD itself is not here.
_NAME = {"type": "string", "minLength": 1}
_PORT = {
    "type": "object",
    "required": ["number"],
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65_535}},
}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_MODE = {"type": "string", "enum": ["FailOpen", "FailClose"]}
_POOL = {
    "selector": {
        "type": "object",
        "required": ["matchLabels"],
        "properties": {"matchLabels": _LABELS},
    },
    "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": _PORT},
    "endpointPickerRef": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": _NAME, "port": _PORT, "failureMode": _MODE},
    },
    "appProtocol": {"type": "string", "enum": ["http", "kubernetes.io/h2c"]},
}
_POOLS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "inferencepools.inference.networking.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, of a test"},
    },
    "spec": {
        "group": "inference.networking.k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "InferencePool", "plural": "inferencepools"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["selector", "targetPorts"],
                                "properties": _POOL,
                            }
                        },
                    }
                },
            }
        ],
    },
}


def test_the_picker_its_service_and_its_pool_are_taken(
    server: ApiServerProcess, tmp_path: Path
) -> None:
    space = "picks"
    server.kubectl("create", "namespace", space)
    assert server.kubectl("create", "-f", "-", text=json.dumps(_POOLS)).returncode == 0
    where = ("crd/inferencepools.inference.networking.k8s.io", "--timeout=30s")
    assert server.kubectl("wait", "--for=condition=Established", *where).returncode == 0
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    path = tmp_path / "deploy" / "kubernetes" / "kustomization.yaml"
    text = path.read_text().replace("namespace: serving", f"namespace: {space}")
    path.write_text(text + "\ncomponents: [components/picker, components/replicas]\n")
    for _ in range(2):
        applied = server.kubectl("apply", "--server-side", "-k", path.parent)
        assert applied.returncode == 0, applied.stderr
    group = f"/apis/inference.networking.k8s.io/v1/namespaces/{space}"
    picker = server.get(f"{group}/inferencepools/deepseek-v3")["spec"]["endpointPickerRef"]
    service = server.get(f"/api/v1/namespaces/{space}/services/{picker['name']}")
    assert service["spec"]["ports"][0]["port"] == picker["port"]["number"]
    label = "pod-security.kubernetes.io/enforce=restricted"
    assert server.kubectl("label", "namespace", space, label).returncode == 0
    made = server.get(f"/apis/apps/v1/namespaces/{space}/deployments/balanceroute")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "picker"}}
    tried = server.kubectl(
        *("create", "-n", space, "--dry-run=server", "-f", "-"),
        text=json.dumps(pod | {"spec": made["spec"]["template"]["spec"]}),
    )
    assert tried.returncode == 0, tried.stderr
    assert made["spec"]["template"]["spec"]["containers"][0]["args"][0] == "pick"
