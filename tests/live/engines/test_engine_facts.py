"""Which differences of two engines matter, by connector."""

import pytest

from balanceroute.proxy.live.engines.engine_facts import EngineFacts, facts_of, misfits
from balanceroute.proxy.live.engines.engine_gauges import cache_configs
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
    ("connector", "prefill", "decode", "refused"),
    [
        ("nixl", "auto", "fp8", True),
        ("mooncake", "auto", "fp8", False),
        ("mooncake", "bfloat16", "fp8", True),
        ("mooncake-ascend", "bfloat16", "fp8", True),
    ],
)
def test_types_of_the_kv_cache(connector: str, prefill: str, decode: str, refused: bool) -> None:
    pair = facts(cache_dtypes=[prefill]), facts(cache_dtypes=[decode])
    assert found(connector, *pair) == [(f"have cache_dtype {decode} and {prefill}", refused)]


@pytest.mark.parametrize(
    ("connector", "prefill", "decode", "refused"),
    [
        ("nixl", 128, 16, False),
        ("nixl", 48, 32, False),
        ("mooncake", 16, 32, False),
        ("mooncake-ascend", 128, 256, False),
        ("mooncake-ascend", 96, 128, True),
        ("mooncake-hybrid", 128, 256, True),
    ],
)
def test_sizes_of_blocks(connector: str, prefill: int, decode: int, refused: bool) -> None:
    pair = facts(block_tokens=[prefill]), facts(block_tokens=[decode])
    assert found(connector, *pair) == [(f"have block_size {decode} and {prefill}", refused)]
