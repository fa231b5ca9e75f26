"""Several [[model]] tables: what they may say, and where."""

from pathlib import Path

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.topologies import TopologyError, read_topology

ONE = """
[[model]]
name = "small"
prefill = [{ url = "http://p1" }]
decode = [{ url = "http://d1" }]
"""
TWO = ONE + ONE.replace("small", "large").replace("1", "2")


def made(folder: Path, text: str, **flags: object) -> ProxyConfig:
    path = folder / "fleet.toml"
    path.write_text(text)
    return make_config(read_topology(path), flags)


def test_groups_are_deployments_with_the_settings_of_all_and_their_own(tmp_path: Path) -> None:
    text = TWO + "proxy = { batch = 7, policy = 'jsq' }\n[proxy]\nbatch = 5\nport = 1234\n"
    config = made(tmp_path, text)
    small, large = config.groups
    assert (small.name, large.name) == ("small", "large")
    assert [one.scheduling.batch for one in config.deployments] == [5, 7]
    assert [one.scheduling.policy for one in config.deployments] == ["br-h", "jsq"]
    assert [one.listening.port for one in config.deployments] == [1234, 1234]
    assert [one.prefillers[0].url.base for one in config.deployments] == [
        "http://p1:80",
        "http://p2:80",
    ]
    assert not config.prefillers
    # A flag goes before the file, as everywhere.
    assert [one.scheduling.batch for one in made(tmp_path, text, batch=9).deployments] == [9, 9]


def test_one_table_is_a_group_too(tmp_path: Path) -> None:
    (group,) = made(tmp_path, ONE).groups
    assert (group.name, group.models) == ("small", ())


def test_a_group_may_list_its_names(tmp_path: Path) -> None:
    (group,) = made(tmp_path, ONE + 'model = ["qwen", "qwen-sql"]').groups
    assert (group.name, group.models) == ("small", ("qwen", "qwen-sql"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ONE + ONE, "model[0].name: is 'small', as that of another group"),
        (TWO + "model = 'small'", "model[1].model: has 'small', which is served by model[0]"),
        (ONE.replace("small", "a b"), "model[0].name: may have letters, digits and . _ : / @ -"),
        (ONE.replace('name = "small"', ""), "model[0].name: is missing"),
        (ONE.replace("prefill", "prefil"), "model[0].prefil: unknown key; did you mean 'prefill'?"),
        (ONE.replace("decode = ", "#"), "model[0].decode: is missing: write [[model.decode]]"),
        (ONE.replace('url = "http://p1"', ""), "model[0].prefill[0].url: is missing"),
        ('connector = "nixl"' + ONE, "connector: belongs into a [[model]] table"),
        ("model = 'x'\n[alias.auto]", "alias: chooses among [[model]] tables, and there are none"),
    ],
)
def test_a_file_that_is_no_topology_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(TopologyError) as error:
        made(tmp_path, text)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            ONE + "proxy = { port = 1 }",
            "[model[0].proxy].port: belongs into [proxy]: it holds for all groups",
        ),
        (ONE + "proxy = { bach = 1 }", "[model[0].proxy].bach: unknown key; did you mean 'batch'?"),
        (ONE + "proxy = { batch = 0 }", "[model[0].proxy].batch is 0, must be from 1"),
        (ONE + "[proxy]\nbatch = 0", "[proxy].batch is 0, must be from 1"),
        (
            TWO.replace("http://d2", "http://p1"),
            "model[1] has the engine http://p1:80, which",
        ),
        (ONE + "[proxy]\ndiscover = ['file:x']", "discover: each [[model]] table finds its own"),
        (
            TWO + "[proxy]\npredictor_state = 'x'",
            "which",
        ),
        (ONE.replace("http://p1", "http://p1@3"), "model[0].prefill[0].url is 'http://p1:80@3'"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(tmp_path, text)
    assert reason in str(error.value)
    assert "fleet.toml" in str(error.value)


@pytest.mark.parametrize("flag", ["prefill", "decode", "connector", "model"])
def test_engines_of_flags_have_no_group(tmp_path: Path, flag: str) -> None:
    value = "nixl" if flag == "connector" else ["http://x"]
    with pytest.raises(ConfigError, match=f"--{flag}: names engines of one deployment"):
        made(tmp_path, TWO, **{flag: value})
