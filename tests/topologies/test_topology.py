"""Topology files: read whole or refused with the file, the key and the reason."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from balanceroute.topologies import CONNECTORS, TopologyError, did_you_mean
from balanceroute.topologies.topology import (
    MAX_FILE_BYTES,
    DecodeEntry,
    PrefillEntry,
    Topology,
    read_topology,
    shipped_topologies,
)

if TYPE_CHECKING:
    from collections.abc import MutableMapping

RACK = """
name = "rack-7"
model = "qwen3"
connector = "mooncake"
[[prefill]]
url = "http://10.0.0.1:8100"
bootstrap = "http://10.0.0.1:8998"
[[prefill]]
url = "http://10.0.0.2:8100"
[[decode]]
url = "http://10.0.0.7:8200"
[[decode]]
url = "http://10.0.0.8:8300"
ranks = 3
[[decode]]
url = "http://10.0.0.9:8300"
ranks = "discover"
[[decode]]
url = "http://10.0.0.10:8300"
rank_ids = [4, 2]
[proxy]
policy = "br-0"
batch = 64
"""
ENGINES = '[[prefill]]\nurl = "http://p:1"\n[[decode]]\nurl = "http://d:1"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def test_a_file_with_everything_is_read_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, RACK)
    assert read_topology(path) == Topology(
        path=path,
        name="rack-7",
        models=("qwen3",),
        connector="mooncake",
        prefill=(
            PrefillEntry("http://10.0.0.1:8100", "http://10.0.0.1:8998"),
            PrefillEntry("http://10.0.0.2:8100"),
        ),
        decode=(
            DecodeEntry("http://10.0.0.7:8200"),
            DecodeEntry("http://10.0.0.8:8300", rank_ids=(0, 1, 2)),
            DecodeEntry("http://10.0.0.9:8300", discover=True),
            DecodeEntry("http://10.0.0.10:8300", rank_ids=(4, 2)),
        ),
        proxy={"policy": "br-0", "batch": 64},
        engines=None,
        emulation=None,
    )


def test_what_may_be_left_out_is_left_open(tmp_path: Path) -> None:
    topology = read_topology(write(tmp_path, f'name = "small"\n{ENGINES}'))
    assert topology.models == ()
    assert topology.connector is None
    assert topology.proxy == {}


def test_a_file_can_name_several_models(tmp_path: Path) -> None:
    path = write(tmp_path, f'name = "two"\nmodel = ["a", "b"]\n{ENGINES}')
    assert read_topology(path).models == ("a", "b")


def test_the_tables_of_a_topology_cannot_be_changed(tmp_path: Path) -> None:
    topology = read_topology(write(tmp_path, RACK))
    with pytest.raises(TypeError):
        cast("MutableMapping[str, object]", topology.proxy)["batch"] = 1


@pytest.mark.parametrize("connector", CONNECTORS)
def test_every_connector_can_be_named(connector: str, tmp_path: Path) -> None:
    path = write(tmp_path, f'name = "x"\nconnector = "{connector}"\n{ENGINES}')
    assert read_topology(path).connector == connector


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        (f'name = ""\n{ENGINES}', "name", "must be a text"),
        (f"name = 7\n{ENGINES}", "name", "must be a text, is 7"),
        (f'name = "a b"\n{ENGINES}', "name", "may have letters"),
        (f'name = "x"\nmodels = "m"\n{ENGINES}', "models", "did you mean 'model'?"),
        (f'name = "x"\nzzz = 1\n{ENGINES}', "zzz", "unknown key; known: name, model"),
        (f'name = "x"\nmodel = 7\n{ENGINES}', "model", "must be a text or a list of texts, is 7"),
        (f'name = "x"\nmodel = ["a", ""]\n{ENGINES}', "model", "must be a text or a list"),
        (f'name = "x"\nconnector = "nixel"\n{ENGINES}', "connector", "did you mean 'nixl'?"),
        (f'name = "x"\nconnector = 1\n{ENGINES}', "connector", "must be a text"),
        ('name = "x"\n[[decode]]\nurl = "http://d"', "prefill", "is missing: write [[prefill]]"),
        ('name = "x"\n[[prefill]]\nurl = "http://p"', "decode", "is missing: write [[decode]]"),
        ('name = "x"\nprefill = []\n', "prefill", "is missing"),
        ('name = "x"\n[prefill]\nurl = "http://p"', "prefill", "write [[prefill]]"),
        ('name = "x"\nprefill = ["http://p"]', "prefill[0]", "must be a table, is 'http://p'"),
        ('name = "x"\n[[prefill]]\n', "prefill[0].url", "is missing"),
        (f'name = "x"\n{ENGINES}[[decode]]\nurl = 8', "decode[1].url", "must be a text, is 8"),
        (f'name = "x"\n{ENGINES}uri = "u"', "decode[0].uri", "did you mean 'url'?"),
        (f'name = "x"\n{ENGINES}bootstrap = "u"', "decode[0].bootstrap", "unknown key"),
        ('name = "x"\n[[prefill]]\nurl = "u"\nranks = 2', "prefill[0].ranks", "unknown key"),
        (f'name = "x"\n{ENGINES}ranks = 0', "decode[0].ranks", "from 1 to 10000"),
        (f'name = "x"\n{ENGINES}ranks = 10001', "decode[0].ranks", "is 10001"),
        (f'name = "x"\n{ENGINES}ranks = true', "decode[0].ranks", "is True"),
        (f'name = "x"\n{ENGINES}ranks = 2.0', "decode[0].ranks", "is 2.0"),
        (f'name = "x"\n{ENGINES}ranks = "all"', "decode[0].ranks", "'discover', is 'all'"),
        (f'name = "x"\n{ENGINES}rank_ids = []', "decode[0].rank_ids", "must be a list of integers"),
        (f'name = "x"\n{ENGINES}rank_ids = [-1]', "decode[0].rank_ids", "from 0 to 9999, is [-1]"),
        (f'name = "x"\n{ENGINES}rank_ids = [10000]', "decode[0].rank_ids", "from 0 to 9999"),
        (f'name = "x"\n{ENGINES}rank_ids = [true]', "decode[0].rank_ids", "is [True]"),
        (f'name = "x"\n{ENGINES}rank_ids = 4', "decode[0].rank_ids", "is 4"),
        (f'name = "x"\n{ENGINES}rank_ids = [1, 1]', "decode[0].rank_ids", "names a rank twice"),
        (
            f'name = "x"\n{ENGINES}rank_ids = [1]\nranks = 1',
            "decode[0].rank_ids",
            "excludes ranks",
        ),
        (f'name = "x"\nproxy = 1\n{ENGINES}', "proxy", "must be a table: write [proxy]"),
        ('name = "x"\nemulation = 1\n', "emulation", "must be a table: write [emulation]"),
        (f'name = "x"\n{ENGINES}[emulation]\nranks = 1', "emulation", "not beside"),
        ("name = ", "", "is not TOML: Invalid value (at end of document)"),
        ('name = "x"\nname = "y"\n', "", "is not TOML: Cannot overwrite a value (at line 2"),
        (f"a = {5_000 * '['}", "", "is not TOML: nested too deeply"),
        (
            "proxy:\n  replicas: 1\n",
            "",
            "(it looks like YAML: a topology is a TOML file, and values",
        ),
        ("# Values.\n---\na: 1\n", "", "(it looks like YAML"),
        ("#" * (MAX_FILE_BYTES + 1), "", f"is larger than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_a_bad_file_is_refused_with_its_key_and_the_reason(
    text: str, key: str, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TopologyError) as refused:
        read_topology(path)
    error = refused.value
    assert (error.path, error.key) == (path, key)
    assert reason in error.reason
    assert str(error) == (f"{path}: {key}: {error.reason}" if key else f"{path}: {error.reason}")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(TopologyError, match="is not TOML: 'utf-8' codec"):
        read_topology(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.toml"):
        read_topology(tmp_path / "absent.toml")
    with pytest.raises(FileNotFoundError, match="folder/rack"):
        read_topology("folder/rack")


def test_the_shipped_topologies_can_be_read_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = shipped_topologies()
    assert "emulated-2p8d" in shipped
    for name, path in shipped.items():
        topology = read_topology(name)
        assert topology.name == name
        assert topology == read_topology(path)


def test_the_emulated_topology_is_what_its_name_says() -> None:
    topology = read_topology("emulated-2p8d")
    assert topology.emulation is not None
    assert topology.emulation["prefillers"] == 2
    assert topology.emulation["ranks"] == 8
    # A proxy that knows another batch than its engines would fill queues or leave slots empty.
    assert topology.emulation["batch"] == topology.proxy["batch"] == 16


def test_a_file_goes_before_a_shipped_topology_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "emulated-2p8d").write_text(f'name = "mine"\n{ENGINES}')
    assert read_topology("emulated-2p8d").name == "mine"


def test_an_unknown_name_is_told_with_its_nearest() -> None:
    with pytest.raises(TopologyError, match="did you mean 'emulated-2p8d'"):
        read_topology("emulated-2p8")


def test_a_hint_is_the_nearest_word_or_all_of_a_few() -> None:
    assert did_you_mean("polcy", ["port", "policy"]) == "; did you mean 'policy'?"
    assert did_you_mean("xyz", ["port", "policy"]) == "; known: port, policy"
    assert did_you_mean("xyz", [f"port_{i}" for i in range(50)]) == ""


def test_a_file_without_a_name_has_that_of_the_file(tmp_path: Path) -> None:
    """The README's file was refused, for it has none."""
    path = write(tmp_path, ENGINES)
    assert read_topology(path).name == Path(path).stem
    odd = tmp_path / "two words.toml"
    odd.write_text(ENGINES)
    with pytest.raises(TopologyError, match=r"name: may have letters.* is 'two words'"):
        read_topology(odd)
