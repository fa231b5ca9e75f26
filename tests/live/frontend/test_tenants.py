"""Tenants in a proxy: who is let in, what is refused and how, and where each of them is seen."""

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.live.frontend.gateway_requests import BODY, TALK, is_error
from tests.support.site import Exchanged, Site, play, served

from balanceroute.proxy.live.security import digest_of
from balanceroute.proxy.live.telemetry import metrics, request_metrics
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

COMPLETIONS = "/v1/completions"
LONG = BODY | {"max_tokens": 200}
STREAM = BODY | {"stream": True}


def given(key: str, *more: tuple[bytes, bytes]) -> "Headers":
    return [(b"authorization", b"Bearer " + key.encode()), *more]


def tenant(name: str, members: str = "") -> str:
    """Return a tenant whose key is its name."""
    digest = digest_of(name.encode()).value.decode()
    return f'[[tenant]]\nname = "{name}"\nkey_sha256 = "{digest}"\n{members}\n'


def flags(folder: Path, *tenants: str) -> dict[str, object]:
    path = folder / "tenants.toml"
    path.write_text("".join(tenants))
    return {"tenants": str(path)}


def page_of(site: Site) -> bytes:
    return site.world.proxy.metrics.render()


def metric(site: Site, name: str, *labels: str) -> float:
    rows = [
        row
        for row in page_of(site).decode().splitlines()
        if row.startswith(f"balanceroute_tenant_{name}{{")
    ]
    found = [row for row in rows if all(label in row for label in labels)]
    return sum(float(row.rpartition(" ")[2]) for row in found)


@served(flags=lambda tmp_path: flags(tmp_path, tenant("acme")))
async def test_a_key_that_is_nobodys_is_refused_and_a_tenants_is_not_passed_on(
    site: Site, tmp_path: Path
) -> None:
    for headers in ([], given("guess")):
        refused = await site.post(COMPLETIONS, BODY, headers)
        is_error(refused, 401)
        assert refused.header(b"www-authenticate") == b"Bearer"
        assert (await site.get("/metrics", headers)).status == 401
    assert (await site.post(COMPLETIONS, BODY, given("acme"))).status == 200
    assert {seen.header(b"authorization") for seen in site.seen} == {None}


def test_a_rate_of_requests_is_told_and_kept(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        first = await site.post(COMPLETIONS, BODY, given("acme"))
        assert first.status == 200
        assert first.header(b"x-ratelimit-limit-requests") == b"2"
        assert first.header(b"x-ratelimit-remaining-requests") == b"1"
        assert first.header(b"x-ratelimit-reset-requests") == b"10s"
        assert first.header(b"x-ratelimit-limit-tokens") is None
        streamed = await site.post(COMPLETIONS, BODY | {"stream": True}, given("acme"))
        assert streamed.done
        assert streamed.header(b"x-ratelimit-remaining-requests") == b"0"
        refused = await site.post(COMPLETIONS, BODY, given("acme"))
        assert "rate of 6 requests per minute" in is_error(refused, 429)
        assert refused.header(b"retry-after") == b"10"
        assert refused.header(b"x-ratelimit-remaining-requests") == b"0"
        # Another tenant has a rate of its own, here none.
        other = await site.post(COMPLETIONS, BODY, given("other-one"))
        assert other.status == 200
        assert other.header(b"x-ratelimit-limit-requests") is None
        await asyncio.sleep(10.0)
        assert (await site.post(COMPLETIONS, BODY, given("acme"))).status == 200

    limits = "requests_per_minute = 6\nrequest_burst = 2"
    play(scenario, flags=flags(tmp_path, tenant("acme", limits), tenant("other-one")))


def test_tokens_are_charged_by_what_is_asked_and_settled_by_what_is_used(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        # Its prompt has three tokens, estimated as two.
        asked = BODY | {"max_tokens": 90, "ignore_eos": False, "stop": "t"}
        first = site.send(COMPLETIONS, asked, headers=given("acme"))
        refused = await site.post(COMPLETIONS, BODY, given("acme"))
        assert "rate of 60 tokens per minute" in is_error(refused, 429)
        done = await first.end()
        assert done.status == 200
        used = done.json["usage"]["total_tokens"]
        assert used < 20
        after = await site.post(COMPLETIONS, BODY, given("acme"))
        assert after.status == 200
        remaining = int(after.header(b"x-ratelimit-remaining-tokens") or b"")
        assert 92 - used - 10 <= remaining <= 92 - used
        huge = await site.post(COMPLETIONS, BODY | {"max_tokens": 100}, given("acme"))
        assert "may have 92 at once" in is_error(huge, 413)
        assert huge.header(b"retry-after") is None

    limits = "tokens_per_minute = 60\ntoken_burst = 92"
    play(scenario, flags=flags(tmp_path, tenant("acme", limits)))


@served(flags=lambda tmp_path: flags(tmp_path, tenant("acme", "concurrency = 2")))
async def test_requests_in_flight_have_a_limit_and_count_until_they_end(
    site: Site, tmp_path: Path
) -> None:
    running = [site.send(COMPLETIONS, LONG, headers=given("acme")) for _ in range(2)]
    await asyncio.sleep(0.2)
    refused = await site.post("/v1/messages", TALK, given("acme"))
    # Anthropic's shape, where that is spoken.
    assert "2 requests of the tenant are in flight" in is_error(refused, 429)
    assert refused.json["error"]["type"] == "rate_limit_error"
    assert int(refused.header(b"retry-after") or b"0") >= 1
    (state,) = (await site.state())["tenants"]
    assert (state["name"], state["in_flight"], state["waiting"]) == ("acme", 2, 0)
    assert metric(site, "requests_in_flight", 'tenant="acme"') == 2
    # One leaves, the other one is answered.
    running[0].call.abort()
    assert (await running[1].end()).status == 200
    assert (await site.post(COMPLETIONS, BODY, given("acme"))).status == 200
    assert metric(site, "requests_in_flight", 'tenant="acme"') == 0


def test_requests_that_one_engine_answers_alone_count_too(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        first = await site.post("/tokenize", BODY, given("acme"))
        assert first.status == 200
        assert first.header(b"x-ratelimit-remaining-requests") == b"1"
        running = site.send(COMPLETIONS, LONG, headers=given("acme"))
        await asyncio.sleep(0.2)
        is_error(await site.post("/tokenize", BODY, given("acme")), 429)
        assert (await running.end()).status == 200
        refused = await site.post("/tokenize", BODY, given("acme"))
        assert "requests per minute" in is_error(refused, 429)
        await site.until(lambda: len(site.world.ended) == 4)
        outcomes = [record.outcome for record in site.world.ended]
        assert outcomes == [Outcome.OK, Outcome.REJECTED, Outcome.OK, Outcome.REJECTED]

    limits = "concurrency = 1\nrequests_per_minute = 2"
    play(scenario, flags=flags(tmp_path, tenant("acme", limits)))


def test_a_body_that_is_refused_in_any_case_is_not_read(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        assert (await site.post(COMPLETIONS, BODY, given("acme"))).status == 200
        refused = await site.post(COMPLETIONS, b"{" * 200_000, given("acme"))
        assert "requests per minute" in is_error(refused, 429)
        assert refused.header(b"retry-after") == b"60"
        assert refused.header(b"x-ratelimit-remaining-requests") == b"0"
        record = site.world.ended[-1]
        assert (record.tenant, record.outcome) == ("acme", Outcome.REJECTED)
        assert record.refused_for == "requests"
        assert metric(site, "refusals_total", 'tenant="acme"', 'reason="requests"') == 1
        # The proxy's own pages are no requests of that kind.
        assert (await site.get("/load", given("acme"))).status == 200

    limited = flags(tmp_path, tenant("acme", "requests_per_minute = 1"))
    play(scenario, flags=limited)


def test_a_tenants_queue_has_a_limit_of_its_own(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        running = [site.send(COMPLETIONS, LONG, headers=given("acme")) for _ in range(6)]
        await asyncio.sleep(0.001)
        statuses = [one.status for one in running if one.over]
        # One was given to the prefiller at once.
        assert statuses == [429] * 2
        assert (await site.post(COMPLETIONS, BODY, given("calm"))).status == 200
        for one in running:
            await one.end()
        assert sorted(one.status for one in running) == [200] * 4 + [429] * 2
        assert metric(site, "refusals_total", 'tenant="acme"', 'reason="queue"') == 2

    limited = flags(tmp_path, tenant("acme", "queue_limit = 3"), tenant("calm"))
    play(scenario, prefillers=1, flags=limited | {"probe_limit": 1})


def test_a_proxy_that_is_full_is_an_overload_and_no_tenants_fault(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        running = [site.send(COMPLETIONS, LONG, headers=given("acme")) for _ in range(4)]
        answers = [await one.end() for one in running]
        refused = [one for one in answers if one.status != 200]
        assert len(refused) == 2
        for one in refused:
            assert "wait already" in is_error(one, 503)
            assert one.header(b"retry-after") == b"1"
        outcomes = [record.outcome for record in site.world.ended]
        assert outcomes.count(Outcome.REJECTED) == 2
        assert metric(site, "refusals_total", 'reason="overload"') == 2

    limited = flags(tmp_path, tenant("acme")) | {"probe_limit": 1, "queue_limit": 2}
    play(scenario, prefillers=1, flags=limited)


@served(flags=lambda tmp_path: flags(tmp_path, tenant("acme", 'models = ["tiny"]')))
async def test_a_tenant_may_use_its_models_alone(site: Site, tmp_path: Path) -> None:
    assert (await site.post(COMPLETIONS, BODY, given("acme"))).status == 200
    for path, values in ((COMPLETIONS, BODY), ("/v1/messages", TALK), ("/v1/embeddings", BODY)):
        refused = await site.post(path, values | {"model": "secret"}, given("acme"))
        assert "does not exist or you do not have access" in is_error(refused, 404)
        unnamed = {name: value for name, value in values.items() if name != "model"}
        assert "must provide a model" in is_error(
            await site.post(path, unnamed, given("acme")), 400
        )
    form = await site.post("/v1/audio/transcriptions", b"x", given("acme"))
    assert "models cannot be told" in is_error(form, 403)
    assert all(seen.values["model"] == "tiny" for seen in site.seen)


def test_the_default_tenant_has_the_requests_without_a_key(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        assert (await site.post(COMPLETIONS, BODY)).status == 200
        is_error(await site.post(COMPLETIONS, BODY), 429)
        assert [record.tenant for record in site.world.ended] == ["walk-in"] * 2
        is_error(await site.post(COMPLETIONS, BODY, given("guess")), 401)

    walk_in = "default = true\nrequests_per_minute = 1"
    play(scenario, flags=flags(tmp_path, tenant("acme"), tenant("walk-in", walk_in)))


@pytest.mark.parametrize(
    ("members", "header", "status"),
    [
        ("deadline_s = 0.05", None, 503),
        ("deadline_s = 0.05", b"9000", 503),
        ("deadline_s = 0.05\nclient_deadline = true", b"9000", 200),
        ("client_deadline = true", b"50", 503),
        ("", b"50", 200),
    ],
)
def test_a_deadline_is_the_tenants_unless_the_request_may_say(
    tmp_path: Path, members: str, header: bytes | None, status: int
) -> None:
    async def scenario(site: Site) -> None:
        ahead = site.send(COMPLETIONS, LONG, headers=given("calm"))
        await asyncio.sleep(0.01)
        more = [] if header is None else [(b"x-request-deadline-ms", header)]
        late = await site.post(COMPLETIONS, BODY, given("acme", *more))
        assert late.status == status
        assert (await ahead.end()).status == 200

    limited = flags(tmp_path, tenant("acme", members), tenant("calm"))
    play(scenario, prefillers=1, ranks=1, batch_limit=1, flags=limited | {"batch": 1})


@pytest.mark.parametrize(
    ("order", "expected"),
    # The first one is in prefill while the others arrive.
    [({"queue_order": "abs"}, "axyzbcd"), ({"fair_queue": "request"}, "axbycdz")],
)
def test_levels_and_weights_are_the_tenants(
    tmp_path: Path, order: dict[str, object], expected: str
) -> None:
    async def scenario(site: Site) -> None:
        def send(name: str, key: str) -> Exchanged:
            headers = given(key, (b"x-request-id", name.encode()))
            return site.send(COMPLETIONS, BODY, headers=headers)

        requests = [send(name, "low") for name in "abcd"]
        requests += [send(name, "high") for name in "xyz"]
        for request in requests:
            assert (await request.end()).status == 200, request.body
        names = [seen.header(b"x-request-id") for seen in site.received("prefill")]
        assert "".join(chr(name[0]) for name in names if name) == expected

    limited = flags(tmp_path, tenant("low", "weight = 2"), tenant("high", "level = -1"))
    play(scenario, prefillers=1, flags=limited | {"probe_limit": 1} | order)


@served(flags=lambda tmp_path: flags(tmp_path, tenant("acme")))
async def test_every_request_is_counted_and_logged_under_its_tenant(
    site: Site, tmp_path: Path
) -> None:
    assert (await site.post(COMPLETIONS, STREAM, given("acme"))).status == 200
    is_error(await site.post(COMPLETIONS, b"{", given("acme")), 400)
    is_error(await site.post("/v1/nothing", BODY, given("acme")), 404)
    is_error(await site.post(COMPLETIONS, BODY, given("guess")), 401)
    assert [record.tenant for record in site.world.ended] == ["acme"] * 3 + [""]
    assert metric(site, "requests_total", 'tenant="acme"', 'outcome="ok"') == 1
    assert metric(site, "requests_total", 'tenant="acme"') == 3
    assert metric(site, "prompt_tokens_total", 'tenant="acme"') == 3
    assert metric(site, "output_tokens_total", 'tenant="acme"') == 4
    assert metric(site, "queue_time_seconds_count", 'tenant="acme"') == 1
    assert metric(site, "time_to_first_token_seconds_count", 'tenant="acme"') == 1
    assert metric(site, "time_to_first_token_seconds_sum", 'tenant="acme"') > 0


def test_gauges_tell_the_limits_and_the_share_of_each_tenant(tmp_path: Path) -> None:
    gauges = ("share_ratio", "concurrency_limit", "queue_limit", "tokens_per_minute_limit")

    def told(site: Site) -> dict[str, list[float]]:
        names = re.findall(rb'tenant_share_ratio{tenant="(.*?)"}', page_of(site))
        return {
            one: [metric(site, gauge, f'tenant="{one}"') for gauge in gauges]
            for one in map(bytes.decode, names)
        }

    async def scenario(site: Site) -> None:
        assert told(site) == {"acme": [0.75, 8, 5, 900], "other-one": [0.25, 0, 0, 0]}
        # Without a limit there is no sample: 0 would be one.
        assert b'_limit{tenant="other-one"}' not in page_of(site)
        flags(tmp_path, tenant("acme", "weight = 1"), tenant("fresh", "concurrency = 2"))
        await site.admin("/admin/reload", {})
        assert told(site) == {"acme": [0.5, 0, 0, 0], "fresh": [0.5, 2, 0, 0]}

    limits = "weight = 3\nconcurrency = 8\nqueue_limit = 5\ntokens_per_minute = 900"
    play(scenario, flags=flags(tmp_path, tenant("acme", limits), tenant("other-one")))


def test_of_many_tenants_the_first_have_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_metrics, "MAX_TENANTS", 2)
    monkeypatch.setattr(metrics, "MAX_TENANTS", 2)

    async def scenario(site: Site) -> None:
        for name in ("d", "b", "c", "a"):
            assert (await site.post(COMPLETIONS, STREAM, given(name))).status == 200
        for name, count in (("d", 1), ("b", 1), ("other", 2), ("", 4)):
            label = f'tenant="{name}'
            assert metric(site, "requests_total", label) == count
            assert metric(site, "time_to_first_token_seconds_count", label) == count
        assert re.findall(rb'tenant_share_ratio{tenant="(.)"}', page_of(site)) == [b"a", b"b"]

    play(scenario, flags=flags(tmp_path, *map(tenant, "abcd")))


@served()
async def test_a_proxy_without_tenants_has_no_metrics_of_tenants(site: Site) -> None:
    done = await site.post(COMPLETIONS, BODY, given("anybody"))
    assert done.status == 200
    assert not [name for name, _ in done.headers if name.startswith(b"x-ratelimit")]
    assert b"balanceroute_tenant" not in site.world.proxy.metrics.render()


# Reading the file again.


@served(flags=lambda tmp_path: flags(tmp_path, tenant("acme"), tenant("gone")))
async def test_another_file_counts_at_once_and_running_requests_go_on(
    site: Site, tmp_path: Path
) -> None:
    running = [site.send(COMPLETIONS, LONG, headers=given(name)) for name in ("acme", "gone")]
    await asyncio.sleep(0.2)
    flags(tmp_path, tenant("acme", "concurrency = 1"), tenant("fresh"))
    assert (await site.admin("/admin/reload", {})).json == {"api_keys": 0, "tenants": 2}
    # What is in flight counts under the new limit.
    is_error(await site.post(COMPLETIONS, BODY, given("acme")), 429)
    is_error(await site.post(COMPLETIONS, BODY, given("gone")), 401)
    assert (await site.post(COMPLETIONS, BODY, given("fresh"))).status == 200
    assert [(await one.end()).status for one in running] == [200, 200]
    assert metric(site, "requests_total", 'tenant="other"') == 1
    assert [one["name"] for one in (await site.state())["tenants"]] == ["acme", "fresh"]
    assert (await site.post(COMPLETIONS, BODY, given("acme"))).status == 200


@served(flags=lambda tmp_path: flags(tmp_path, tenant("acme")))
async def test_a_bad_file_changes_nothing_and_is_told(site: Site, tmp_path: Path) -> None:
    flags(tmp_path, tenant("fresh"), tenant("acme", "wieght = 2"))
    message = is_error(await site.admin("/admin/reload", {}), 400)
    assert "[tenant[1]].wieght: unknown key; did you mean 'weight'?" in message
    assert (await site.post(COMPLETIONS, BODY, given("acme"))).status == 200
    is_error(await site.post(COMPLETIONS, BODY, given("fresh")), 401)


@served(flags=lambda tmp_path: flags(tmp_path, tenant("acme"), tenant("gone")))
async def test_a_tenant_that_goes_while_its_body_comes_is_refused(
    site: Site, tmp_path: Path
) -> None:
    # A body that is read in slices.
    body = BODY | {"prompt": "t1 " * 400_000}
    slow = site.send(COMPLETIONS, body, headers=given("gone"))
    await site.until(lambda: bool(site.world.proxy.server.bodies.used))
    flags(tmp_path, tenant("acme"))
    site.world.proxy.reload()
    is_error(await slow.end(), 401)
