"""Which differences of two engines matter, by connector."""

import pytest
from tests.support.site import transcript

from balanceroute.proxy.live.connectors import BootstrapIdentity
from balanceroute.proxy.live.engines.engine_facts import (
    EngineFacts,
    doubts,
    facts_of,
    misfits,
    read_identity,
)
from balanceroute.proxy.live.engines.engine_gauges import MetricsPageError, cache_configs, kv_signs
from balanceroute.proxy.live.engines.engine_url import Fault, FetchError
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.engines.model_list import ServedModel
from balanceroute.topologies import CONNECTORS

REAL = (
    '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{_block_size_resolved="True",'
    'block_size="32",cache_dtype="fp8",engine="0",num_gpu_blocks="512"} 1.0\n'
)


def facts(**told: object) -> EngineFacts:
    sets = {name: frozenset(value) for name, value in told.items() if isinstance(value, list)}
    return EngineFacts(**{**told, **sets})  # type: ignore[arg-type]


def found(connector: str, prefill: EngineFacts, decode: EngineFacts) -> list[tuple[str, bool]]:
    return [(one.what, one.refused) for one in misfits(connector, prefill, decode)]


def test_what_an_engine_tells() -> None:
    card = {"id": "m", "root": "/weights"}
    models = [
        ServedModel("m", None, 10, card),
        ServedModel("adapter", "m", 10, {"id": "adapter", "root": "/lora"}),
        ServedModel("untold", None, 10, {"id": "untold"}),
    ]
    assert facts_of("0.32.0", models, cache_configs(REAL.encode())) == facts(
        version="0.32.0", weights=[("m", "/weights")], cache_dtypes=["fp8"], block_tokens=[32]
    )


@pytest.mark.parametrize("connector", CONNECTORS)
def test_what_is_not_told_is_no_difference(connector: str) -> None:
    told = facts(version="1", weights=[("m", "a")], cache_dtypes=["fp8"], block_tokens=[16])
    for one, other in ((told, EngineFacts()), (EngineFacts(), told), (told, told)):
        assert found(connector, one, other) == []


def test_labels_that_make_no_sense_tell_nothing() -> None:
    labels = [{"block_size": "None"}, {"block_size": "0", "cache_dtype": ""}, {}]
    assert facts_of("", [], labels) == EngineFacts()


@pytest.mark.parametrize(
    ("connector", "refused"),
    [
        ("nixl", True),
        ("mooncake", False),
        ("mooncake-ascend", False),
        ("mooncake-layerwise", False),
    ],
)
def test_versions_matter_to_nixl(connector: str, refused: bool) -> None:
    pair = facts(version="0.32.0"), facts(version="0.33.0")
    assert found(connector, *pair) == [("have vLLM 0.33.0 and 0.32.0", refused)]


@pytest.mark.parametrize(("connector", "refused"), [("nixl", True), ("mooncake", False)])
def test_other_weights_matter_to_nixl(connector: str, refused: bool) -> None:
    pair = facts(weights=[("m", "a"), ("n", "x")]), facts(weights=[("m", "b"), ("k", "y")])
    assert found(connector, *pair) == [("have weights b and a of 'm'", refused)]


@pytest.mark.parametrize(
    ("name", "connector", "prefill", "decode", "refused"),
    [
        ("cache_dtype", "nixl", "auto", "fp8", True),
        ("cache_dtype", "mooncake", "auto", "fp8", False),
        ("cache_dtype", "mooncake", "bfloat16", "fp8", True),
        ("cache_dtype", "mooncake-ascend", "bfloat16", "fp8", True),
        ("block_size", "nixl", 128, 16, False),
        ("block_size", "nixl", 48, 32, False),
        ("block_size", "mooncake", 16, 32, False),
        ("block_size", "mooncake-ascend", 128, 256, False),
        ("block_size", "mooncake-ascend", 96, 128, True),
        ("block_size", "mooncake-hybrid", 128, 256, True),
    ],
)
def test_types_and_blocks_of_the_kv_cache(
    name: str, connector: str, prefill: object, decode: object, refused: bool
) -> None:
    field = {"cache_dtype": "cache_dtypes", "block_size": "block_tokens"}[name]
    pair = facts(**{field: [prefill]}), facts(**{field: [decode]})
    assert found(connector, *pair) == [(f"have {name} {decode} and {prefill}", refused)]


# Lines of pages of vLLM 0.32.0: without a KV connector, and of a decode engine with NIXL.
PLAIN = """vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0
vllm:external_prefix_cache_queries_total{engine="0",model_name="tiny"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 1019.0
"""
NIXL = """vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0
vllm:external_prefix_cache_queries_total{engine="0",model_name="tiny"} 4936.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 5019.0
vllm:nixl_num_descriptors_count{engine="0",model_name="tiny"} 5.0
vllm:nixl_num_failed_transfers_total{engine="0",model_name="tiny"} 2.0
"""
FRESH = PLAIN.replace("1019.0", "0.0")
MISSING = "its --kv-transfer-config is missing, or is of another connector"
NOT_ASKED = f"computed prompts and asked no KV connector for any: {MISSING}"
NO_NIXL = f"has no metrics of NIXL: {MISSING}"
PULLS = "has pulled KV caches since its start, as decode engines do: is it one?"


def doubted(
    page: str, role: Role = Role.DECODE, connector: str = "nixl", **told: object
) -> list[str]:
    models = [ServedModel(name, None, 10, {}) for name in ("m", "adapter")]
    return list(
        doubts(
            role,
            connector,
            str(told.get("version", "0.32.0")),
            told.get("models", models),  # type: ignore[arg-type]
            kv_signs(page.encode()),
            wanted=told.get("wanted", ()),  # type: ignore[arg-type]
            ranks=told.get("ranks", ()),  # type: ignore[arg-type]
        )
    )


@pytest.mark.parametrize("role", Role)
def test_an_engine_without_a_kv_connector_is_doubted(role: Role) -> None:
    assert doubted(PLAIN, role) == [NOT_ASKED]
    assert doubted(PLAIN, role, "mooncake") == [NOT_ASKED]
    assert doubted(FRESH, role) == [NO_NIXL]
    assert doubted(NIXL) == []
    assert doubted(NIXL, role, "mooncake") == []


@pytest.mark.parametrize(
    ("page", "connector", "version"),
    [
        *((PLAIN, connector, "0.23.0") for connector in CONNECTORS if "-" in connector),
        (FRESH, "mooncake", "0.32.0"),
        # Versions that may have no such metrics, and what is no version of vLLM's.
        *((FRESH, "nixl", version) for version in ("0.11.2", "0.9.1", "", "dev", "x0.32.0")),
        # With --disable-log-stats, and of another server.
        ("", "nixl", "0.32.0"),
        ("sglang:num_running_reqs 0.0\n", "nixl", "0.32.0"),
        (PLAIN.replace("external", "another"), "mooncake", "0.32.0"),
    ],
)
def test_what_a_page_does_not_tell_is_no_doubt(page: str, connector: str, version: str) -> None:
    for role in Role:
        assert doubted(page, role, connector, version=version) == []


def test_a_prefiller_that_pulls_may_be_a_decode_engine() -> None:
    assert doubted(NIXL, Role.PREFILL) == [PULLS]
    assert doubted(NIXL.replace('count{engine="0",model_name="tiny"} 5', "count 0")) == []


def test_models_and_ranks_are_compared_with_what_is_told() -> None:
    assert doubted(NIXL, wanted=("m", "adapter"), ranks=(0,)) == []
    assert doubted(NIXL, wanted=("m", "n")) == ["does not serve 'n', but adapter, m"]
    assert doubted(NIXL, wanted=("n",), models=[]) == []
    assert doubted(NIXL, ranks=(5, 0)) == ["tells of no data-parallel rank 5, but of 0"]
    two = NIXL + 'vllm:kv_cache_usage_perc{engine="10"} 0.0\n'
    assert doubted(two, ranks=(10, 0)) == []
    assert doubted(two, ranks=(2,)) == ["tells of no data-parallel rank 2, but of 0, 10"]
    assert doubted("", ranks=(5,)) == []


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "1e99", "x"])
def test_a_page_that_cannot_be_true_tells_nothing(value: str) -> None:
    with pytest.raises(MetricsPageError):
        kv_signs(PLAIN.replace("1019.0", value).encode())


# What a Mooncake bootstrap server tells of its engine.


ADDRESS = "http://10.0.0.1:8998"


def test_the_first_rank_of_a_real_server_is_named() -> None:
    identity = read_identity(transcript("mooncake_bootstrap_query.resp"), ADDRESS)
    assert identity == BootstrapIdentity("fd6a7f72-dbd6-4709-a301-6a1566937c76", ADDRESS)


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\xff",
        b"not json",
        b"[" * 100_000,
        b"null",
        b"[]",
        b'"0"',
        b"{}",
        b'{"1": {"engine_id": "a"}}',
        b'{"0": []}',
        b'{"0": {}}',
        b'{"0": {"engine_id": null}}',
        b'{"0": {"engine_id": ""}}',
        b'{"0": {"engine_id": 7}}',
    ],
)
def test_any_other_page_is_a_fault_of_the_protocol(page: bytes) -> None:
    with pytest.raises(FetchError, match="names no engine") as caught:
        read_identity(page, ADDRESS)
    assert caught.value.fault is Fault.PROTOCOL
