"""Settings of the environment: between flags and files, each by one rule."""

from pathlib import Path

import pytest
from tests.command_line import refused

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.cli.command_line import make_parser
from balanceroute.proxy.cli.serve import flags_given
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import Setting, settings_of
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.live.settings.declared import SECTIONS
from balanceroute.proxy.settings import Given, variable_of
from balanceroute.topologies.topology import read_topology

ENGINES = {
    "BALANCEROUTE_PREFILL": "http://p:1 http://q:1",
    "BALANCEROUTE_DECODE": "http://d:1@discover",
}
FILE = '[[prefill]]\nurl = "http://p:1"\n[[decode]]\nurl = "http://d:1"\n[proxy]\nbatch = 7\n'


def configured(environment: dict[str, str], **flags: object) -> ProxyConfig:
    return make_config(None, flags, environment=ENGINES | environment)


def test_each_kind_of_setting_has_a_variable(tmp_path: Path) -> None:
    config = configured(
        {
            "BALANCEROUTE_BATCH": "12",
            "BALANCEROUTE_CHECK_PAIRS": "False",
            "BALANCEROUTE_CONNECTOR": "mooncake-ascend",
            "BALANCEROUTE_LOAD_LOG": "loads.jsonl",
            "BALANCEROUTE_MODEL": " a\tb ",
            "BALANCEROUTE_POOL_TTL_S": "inf",
            "BALANCEROUTE_QUEUE_TTL_S": "",
        }
    )
    assert [one.url.host for one in config.prefillers] == ["p", "q"]
    assert config.decoders[0].discover
    assert config.scheduling.batch == 12
    assert config.engines.check_pairs is False
    assert config.engines.connector == "mooncake-ascend"
    assert config.engines.model == ("a", "b")
    assert config.log.load_log == Path("loads.jsonl")
    assert config.times.queue_ttl_s == 600.0


def _word_of(setting: Setting) -> str:
    """Return a word that the setting may be."""
    for word in (
        *setting.choices,
        setting.shown_default,
        "1",
        "http://h:1",
        "tcp://h:1",
        "file:a",
        "vllm",
        "vllm",
        "true",
    ):
        try:
            setting.check([word] if setting.many else setting.parse(word))
        except ConfigError:
            continue
        return word
    return "on" if setting.action else "1"


def test_every_setting_of_serve_can_be_a_variable() -> None:
    for section in SECTIONS:
        for setting in settings_of(section):
            given = Given(
                SECTIONS, flags={}, environment={variable_of(setting.name): _word_of(setting)}
            )
            assert given.where(setting.name) == variable_of(setting.name)


def test_a_flag_goes_before_a_variable_and_that_before_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(FILE)
    topology = read_topology(path)
    variable = {"BALANCEROUTE_BATCH": "8"}
    assert make_config(topology, {}).scheduling.batch == 7
    config = make_config(topology, {}, environment=variable)
    assert config.scheduling.batch == 8
    assert config.given["batch"] == "BALANCEROUTE_BATCH"
    config = make_config(topology, {"batch": 9}, environment=variable)
    assert config.scheduling.batch == 9
    assert config.given["batch"] == "--batch"


@pytest.mark.parametrize(
    ("variable", "word", "fault"),
    [
        ("BATCH", "many", "BALANCEROUTE_BATCH is 'many', must be an integer"),
        ("BATCH", "0", "BALANCEROUTE_BATCH is 0, must be from 1"),
        ("CHECK_PAIRS", "perhaps", "BALANCEROUTE_CHECK_PAIRS is 'perhaps', must be true or false"),
        ("POLICY", "br", "BALANCEROUTE_POLICY is 'br', which is no policy"),
        ("PREFILL", "p:1", "BALANCEROUTE_PREFILL is 'p:1': it must begin with http://"),
        ("PREFILL", "http://me:secret@p:1", "BALANCEROUTE_PREFILL is 'http://***@p:1'"),
        ("PREFILL", "http://p:1 http://p:1", "BALANCEROUTE_PREFILL names http://p:1 twice"),
        ("DECODE", "http://p:1", "BALANCEROUTE_DECODE names http://p:1, which is a prefiller"),
        ("BOOTSTRAP", "http://b:1", "BALANCEROUTE_BOOTSTRAP: 1 for 2 of --prefill"),
        ("POLCY", "br-0", "BALANCEROUTE_POLCY: no setting has this variable; did you mean "),
        ("API_KEY_FILE", "/nowhere", "BALANCEROUTE_API_KEY_FILE is /nowhere"),
    ],
)
def test_a_bad_value_names_the_variable(variable: str, word: str, fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configured({f"BALANCEROUTE_{variable}": word})
    assert str(raised.value).startswith(fault)
    assert "secret" not in str(raised.value)


def test_what_kubernetes_adds_for_services_is_no_setting() -> None:
    """Of Services called balanceroute and balanceroute-decode."""
    config = configured(
        {
            "BALANCEROUTE_PORT": "tcp://10.0.0.1:8000",
            "BALANCEROUTE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
            "BALANCEROUTE_PORT_8000_TCP_ADDR": "10.0.0.1",
            "BALANCEROUTE_PORT_8000_TCP_PORT": "8000",
            "BALANCEROUTE_SERVICE_HOST": "10.0.0.1",
            "BALANCEROUTE_SERVICE_PORT_HTTP": "8000",
            "BALANCEROUTE_DECODE_PORT": "tcp://10.0.0.2:8000",
            "BALANCEROUTE_DECODE_SERVICE_HOST": "10.0.0.2",
        }
    )
    assert config.listening.port == 8000
    assert configured({"BALANCEROUTE_PORT": "8123"}).listening.port == 8123


def test_the_topology_may_be_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(FILE.replace("batch = 7", "batch = 0"))
    monkeypatch.setenv("BALANCEROUTE_TOPOLOGY", str(path))
    assert main(["serve"]) == 2
    assert (
        capsys.readouterr().err
        == f"balanceroute: {path}: [proxy].batch is 0, must be from 1 to 1e+09\n"
    )


def test_engines_of_variables_have_no_group_either(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    table = '[[model]]\nname = "{}"\n[[model.prefill]]\nurl = "http://p:{}"\n[[model.decode]]\nurl = "http://d:{}"\n'
    path.write_text(table.format("a", 1, 1) + table.format("b", 2, 2))
    with pytest.raises(ConfigError, match=r"^BALANCEROUTE_CONNECTOR: names engines"):
        make_config(read_topology(path), {}, environment={"BALANCEROUTE_CONNECTOR": "nixl"})


# Names of vLLM and of other routers, where the meaning is the same.


def told(words: str) -> ProxyConfig:
    """Return the configuration of a command line."""
    parsed = make_parser(["serve"]).parse_args(["serve", *words.split()])
    return make_config(None, flags_given(parsed))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--kv-connector mooncake", "--connector mooncake"),
        ("--kv-connector NixlConnector", "--connector nixl"),
        ("--connector MooncakeLayerwiseConnector", "--connector mooncake-layerwise"),
        ("--served-model-name a b", "--model a b"),
        ("--decode-policy power_of_two", "--policy power-of-two"),
        ("--policy round_robin", "--policy round-robin"),
        ("--prefill-policy cache_aware", "--prefill-choice cache-aware"),
        ("--prefill-policy consistent_hash", "--prefill-choice sticky"),
    ],
)
def test_other_names_mean_the_same(theirs: str, ours: str) -> None:
    engines = "--prefill http://p:1 --prefill http://q:1 --decode http://d:1"
    assert told(f"{engines} {theirs}") == told(f"{engines} {ours}")


def test_keys_of_clients_are_given_as_in_vllm_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-three\n")
    path.chmod(0o600)
    engines = "--prefill http://p:1 --decode http://d:1"
    config = told(f"{engines} --api-key sk-one sk-two --api-key-file {path}")
    keys = [one.value for one in config.credentials.api_keys]
    assert keys == [b"sk-one", b"sk-two", b"sk-three"]
    for text in (repr(config), str(config.redacted())):
        assert "sk-" not in text


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("--worker-urls http://a:1", "--prefill URL .. --decode URL .."),
        ("--vllm-pd-disaggregation", "it is always so here: leave it out"),
        ("--max-num-seqs 8", "that of the engines goes to --batch"),
        ("--prefill http://p:1 8998", "a bootstrap port goes to --bootstrap http://HOST:8998"),
        ("--policy cache_aware", "chooses prefillers: --prefill-choice cache-aware"),
        ("--policy kv_aware", "chooses prefillers: --prefill-choice prefix-aware"),
        ("--kv-connector moriio", "invalid choice: 'moriio'"),
        ("--api-key sk-\x7f", "has something that is no key"),
    ],
)
def test_names_that_mean_something_else_get_a_hint(
    words: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["serve", *words.split(), "--batch", "1", "--decode", "http://d:1"]
    line += ["--connector", "nixl"] * ("connector" not in words)
    said = refused(line + ["--prefill", "http://p:1"] * ("--prefill" not in words), capsys)
    assert cure in said
    assert "sk-" not in said
