"""Where engines are found, as flags and files say it."""

from pathlib import Path

import pytest
from tests.live.settings.configs import of_file

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.live.settings.declared import EngineSource, engine_source
from balanceroute.topologies import read_topology

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.mark.parametrize(
    ("word", "source"),
    [
        ("file:/run/engines.toml", EngineSource("file", "/run/engines.toml")),
        ("decode=dns:d.serving:8000", EngineSource("dns", "d.serving:8000", Role.DECODE)),
        (
            "kubernetes:app=x,tier in (a, b),!old@serving",
            EngineSource("kubernetes", "app=x,tier in (a, b),!old@serving"),
        ),
        (
            "prefill=kubernetes:app.kubernetes.io/name=p",
            EngineSource("kubernetes", "app.kubernetes.io/name=p", Role.PREFILL),
        ),
    ],
)
def test_sources_are_read(word: str, source: EngineSource) -> None:
    assert engine_source(word) == source


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("engines.toml", "must be file:PATH, ROLE=dns:HOST:PORT or"),
        ("router=dns:d:8000", "must be file:PATH"),
        ("file:", "must be file:PATH"),
        ("prefill=file:/x", "the file itself names the role"),
        ("dns:d:8000", "needs the role, as in decode=dns:HOST:PORT"),
        ("decode=dns:d:0", "a port that is not from 1 to 65535"),
        ("kubernetes:a=b@Serving", "no selector of labels"),
        ("kubernetes:a&b", "no selector of labels"),
    ],
)
def test_what_is_no_source_is_refused(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_config(None, {"discover": [word]})


def test_a_role_that_is_found_needs_no_address() -> None:
    config = make_config(None, {"discover": ["file:/run/engines.toml"]})
    assert (config.prefillers, config.decoders) == ((), ())
    with pytest.raises(ConfigError, match="--prefill: at least one is needed, or --discover"):
        make_config(None, {"discover": ["decode=dns:d:8000"]})
    config = make_config(None, {"discover": ["decode=dns:d:8000"], "prefill": ["http://p:8000"]})
    assert len(config.prefillers) == 1


def test_a_topology_may_leave_its_engines_to_discovery(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[proxy]\ndiscover = ["prefill=dns:p:1", "decode=dns:d:1"]\n')
    assert len(make_config(read_topology(path), {}).discovery.discover) == 2


def test_the_api_server_is_that_of_the_pod() -> None:
    flags = {"discover": ["kubernetes:a=b"]}
    config = make_config(None, flags, environment=IN_A_POD)
    assert config.discovery.kubernetes_api == "https://10.96.0.1:443"
    config = make_config(None, flags, environment=IN_A_POD | {"KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert config.discovery.kubernetes_api == "https://[fd00::1]:443"
    other = flags | {"kubernetes_api": "http://127.0.0.1:8001"}
    assert make_config(None, other).discovery.kubernetes_api == "http://127.0.0.1:8001"
    with pytest.raises(ConfigError, match="--discover: not in a pod of a cluster: needs --kube"):
        make_config(None, flags)


def test_the_state_of_the_roster_can_be_where_it_is_to_be(tmp_path: Path) -> None:
    config = of_file(tmp_path, 'roster_state = "roster.json"')
    assert config.discovery.roster_state == tmp_path / "roster.json"
    with pytest.raises(ConfigError, match=r"roster_state is .*: a directory"):
        of_file(tmp_path, 'roster_state = "."')


def test_where_replicas_agree_on_who_leads(tmp_path: Path) -> None:
    flags = {"prefill": ["http://127.0.0.1:1"], "decode": ["http://127.0.0.1:2"]}
    assert not make_config(None, flags).leader.has_replicas
    lock = make_config(None, flags | {"leader_lock": str(tmp_path / "leader")})
    assert lock.leader.leader_lock == tmp_path / "leader"
    assert lock.leader.has_replicas
    lease = flags | {"leader_lease": "serving/balanceroute-leader"}
    config = make_config(None, lease, environment=IN_A_POD)
    assert config.leader.leader_lease == "serving/balanceroute-leader"
    assert config.discovery.kubernetes_api == "https://10.96.0.1:443"
    with pytest.raises(ConfigError, match="--leader-lease: not in a pod of a cluster"):
        make_config(None, lease)
    with pytest.raises(ConfigError, match="and --leader-lease says who leads already"):
        make_config(None, lease | {"leader_lock": str(tmp_path / "x")}, environment=IN_A_POD)
    with pytest.raises(ConfigError, match=r"--leader-lock is .*: a directory"):
        make_config(None, flags | {"leader_lock": str(tmp_path)})


@pytest.mark.parametrize("word", ["A", "a/b/c", "a_b", "-a", "a-", "/a", "a/", "x" * 254, "a b"])
def test_what_is_no_name_of_a_lease_is_refused(word: str) -> None:
    flags = {"prefill": ["http://127.0.0.1:1"], "decode": ["http://127.0.0.1:2"]}
    with pytest.raises(ConfigError, match=r"--leader-lease is .*must be NAME or NAMESPACE/NAME"):
        make_config(None, flags | {"leader_lease": word})
