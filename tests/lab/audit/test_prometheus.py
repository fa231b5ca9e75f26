"""The same findings from what a Prometheus server has scraped as from the engines themselves."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import pytest
from tests.support.virtual.runner import run

from balanceroute.proxy.cli.outputs import as_json_text
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.audit.observation import Look, observe
from balanceroute.proxy.lab.audit.prometheus import PrometheusWindow, looks_of
from balanceroute.proxy.lab.audit.report import Audit, as_json, lines
from balanceroute.proxy.page_client import PageClient
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest

BEGIN_S, STEP_S, COUNT = 1_795_000_000.0, 5.0, 60
WINDOW = PrometheusWindow(BEGIN_S, BEGIN_S + STEP_S * COUNT, STEP_S)
DECODE = ["http://d0:8000", "http://d1:8000"]
PREFILL = ["http://p0:8000"]


def series(name: str, instance: str, values: list[float], **labels: str) -> dict[str, Any]:
    times = [BEGIN_S + STEP_S * number for number in range(len(values))]
    told = [[at_s, f"{value}"] for at_s, value in zip(times, values, strict=True)]
    return {"metric": {"__name__": name, "instance": instance, **labels}, "values": told}


def of_rank(instance: str, usage: float, engine: str = "0") -> list[dict[str, Any]]:
    """Return the series of one rank of 1,000 KV tokens, whose use is the same all the time."""
    each = {"engine": engine, "model_name": "m"}
    grows = [100.0 * number for number in range(COUNT)]
    return [
        series("vllm:num_requests_running", instance, [4.0] * COUNT, **each),
        series("vllm:num_requests_waiting", instance, [0.0] * COUNT, **each),
        series("vllm:kv_cache_usage_perc", instance, [usage] * COUNT, **each),
        series("vllm:generation_tokens_total", instance, grows, **each),
        series(
            "vllm:cache_config_info",
            instance,
            [1.0] * COUNT,
            engine=engine,
            block_size="10",
            num_gpu_blocks="100",
        ),
        series("vllm:request_generation_tokens_sum", instance, grows, **each),
        series("vllm:request_generation_tokens_bucket", instance, grows, le="+Inf", **each),
    ]


def fleet() -> list[dict[str, Any]]:
    return [*of_rank("d0:8000", 0.5), *of_rank("d1:8000", 0.25), *of_rank("p0:8000", 0.1)]


def ask(
    result: list[dict[str, Any]] | bytes, seen: list[HttpRequest], **addresses: Any
) -> list[Look]:
    """Return the looks out of a server that answers so."""

    async def main(loop: Any) -> list[Look]:
        def answer(request: HttpRequest, reply: Reply) -> None:
            seen.append(request)
            body = result
            if isinstance(body, list):
                data = {"resultType": "matrix", "result": body}
                body = json.dumps({"status": "success", "data": data}).encode()
            reply.send(200, [(b"content-type", b"application/json")], body)

        server = Server(answer)
        await server.start("127.0.0.1", 9090)
        try:
            async with PageClient.of_flags(None, timeout_s=5.0) as pages:
                return await looks_of(
                    addresses.get("server", "http://127.0.0.1:9090/prom/"),
                    addresses.get("prefill", PREFILL),
                    addresses.get("decode", DECODE),
                    WINDOW,
                    pages,
                )
        finally:
            server.close()
            await server.drain()

    return run(main, seed=1)


def test_the_idle_share_follows_from_the_samples() -> None:
    seen: list[HttpRequest] = []
    found = observe(ask(fleet(), seen))
    assert found.ranks == ("http://d0:8000", "http://d1:8000")
    assert found.prefillers == 1
    # Loads of 500 and 250 tokens.
    assert found.idle == pytest.approx(0.25)
    assert found.output_tokens_per_s == pytest.approx(2 * 100.0 / STEP_S)
    assert found.outputs.counts == {float("inf"): 2 * 100.0 * (COUNT - 1)}
    (request,) = seen
    assert request.path == b"/prom/api/v1/query_range"
    form = parse_qs(request.body.decode())
    assert (form["start"], form["step"]) == ([f"{BEGIN_S:.3f}"], ["5"])
    assert 'instance=~"(p0:8000|d0:8000|d1:8000)"' in form["query"][0]


def test_ranks_behind_one_port_are_told_apart() -> None:
    both = [*of_rank("d0:8000", 0.5), *of_rank("d0:8000", 0.1, engine="1")]
    found = observe(ask(both, [], prefill=[], decode=DECODE[:1]))
    assert found.ranks == ("http://d0:8000@0", "http://d0:8000@1")


def test_what_was_not_scraped_anew_is_no_look() -> None:
    repeated = fleet()
    for one in repeated:
        values = [value for _, value in one["values"]]
        one["values"] = [
            [at_s, values[number // 2]] for number, (at_s, _) in enumerate(one["values"])
        ]
    assert len(ask(repeated, [])) == COUNT // 2


def test_a_moment_at_which_an_engine_was_down_is_no_look() -> None:
    holed = fleet()
    for one in holed[:7]:
        del one["values"][10:20]
    assert len(ask(holed, [])) == COUNT - 10


@pytest.mark.parametrize(
    ("result", "addresses", "message"),
    [
        (fleet, {"decode": ["http://d7:8000"]}, "vLLM or SGLang of the instance d7:8000 then (d0:"),
        (lambda: of_rank("p0:8000", -1.0) + fleet(), {}, "vllm:kv_cache_usage_perc is -1.0"),
        (list, {}, "of the instance p0:8000 then (none of any engine)"),
        (
            lambda: b'{"status":"error","error":"bad step"}',
            {},
            "http://127.0.0.1:9090/prom/: bad s",
        ),
        (lambda: b"<html>", {}, "status 200, and no answer of Prometheus"),
        (fleet, {"server": "127.0.0.1:9090"}, "'127.0.0.1:9090', must be http://host:port"),
        (fleet, {"server": "http://127.0.0.1:9"}, "--prometheus: "),
        (fleet, {"decode": ["d0"]}, "'d0' is not http://host:port"),
    ],
)
def test_what_cannot_be_read_is_named(
    result: Callable[[], Any], addresses: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(result(), [], **addresses)
    assert message in str(caught.value)


def counting(result: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the series that only grow while their engine runs."""
    ends = ("_total", "_sum", "_bucket")
    return [one for one in result if one["metric"]["__name__"].endswith(ends)]


@pytest.mark.parametrize("at", [1, 30, COUNT - 1])
def test_counters_that_fall_are_those_of_an_engine_that_was_restarted(at: int) -> None:
    restarted = fleet()
    for one in counting(restarted):
        if one["metric"]["instance"] == "d0:8000":
            # What it counted between the last look before and the restart is lost.
            base = float(one["values"][at][1])
            for value in one["values"][at:]:
                value[1] = f"{float(value[1]) - base}"
    found = observe(ask(restarted, []))
    lost = 100.0
    assert found.output_tokens_per_s == pytest.approx(
        (2 * 100.0 * (COUNT - 1) - lost) / (STEP_S * (COUNT - 1))
    )
    assert found.outputs.counts == {float("inf"): 2 * 100.0 * (COUNT - 1) - lost}
    assert found.outputs.total == 2 * 100.0 * (COUNT - 1) - lost
    text = as_json_text(as_json(Audit(found, found.verdict, None)))
    assert "NaN" not in text
    assert json.loads(text)["output_tokens_per_s"] > 0


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
@pytest.mark.parametrize("name", ["vllm:num_requests_running", "vllm:generation_tokens_total"])
def test_a_sample_that_is_no_number_makes_no_look(name: str, value: str) -> None:
    result = fleet()
    for one in result:
        if (one["metric"]["__name__"], one["metric"]["instance"]) == (name, "d1:8000"):
            for sample in one["values"][10:14]:
                sample[1] = value
    looks = ask(result, [])
    found = observe(looks)
    assert len(found.loads) == COUNT - 4
    assert found.output_tokens_per_s == pytest.approx(2 * 100.0 / STEP_S)
    assert "nan" not in "\n".join(lines(Audit(found, found.verdict, None))).lower()


def test_a_rank_that_never_tells_its_tokens_is_named() -> None:
    silent = [
        one
        for one in fleet()
        if (one["metric"]["__name__"], one["metric"]["instance"])
        != ("vllm:generation_tokens_total", "d1:8000")
    ]
    with pytest.raises(ConfigError, match="http://d1:8000 does not tell the tokens that it gen"):
        observe(ask(silent, []))


def test_a_figure_that_is_no_number_is_null() -> None:
    values = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}}
    assert json.loads(as_json_text(values)) == {"a": None, "b": [None, 1.5], "c": {"d": None}}
