"""Who a client is by its keys, what it may ask for, and what it is told of its limits."""

import pytest

from balanceroute.proxy.core.admission import Allowance
from balanceroute.proxy.live.frontend.request_head import (
    EVERYBODY,
    Clients,
    allowance_headers,
    duration,
    refuse_model,
)
from balanceroute.proxy.live.security import Secret, Tenant, digest_of

KEY = Secret(b"sk-client")
OTHER = Secret(b"other")
ACME = Tenant("acme", (digest_of(b"sk-a"), digest_of(b"sk-b")), models=("m", "n"))
WALK_IN = Tenant("walk-in", default=True)
S = 1_000_000_000


def bearer(key: bytes) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + key


def x_api_key(key: bytes) -> tuple[bytes, bytes]:
    return b"x-api-key", key


def test_without_keys_all_may_come_whatever_they_give() -> None:
    for headers in ([], [bearer(b"x")], [bearer(b"x")] * 2):
        assert Clients(()).find(headers) is EVERYBODY


@pytest.mark.parametrize("value", [b"Bearer sk-client", b"bearer sk-client", b"BEARER  sk-client"])
def test_the_key_authorises_whatever_the_case_of_its_scheme(value: bytes) -> None:
    assert Clients([OTHER, KEY]).find([(b"authorization", value)]) is EVERYBODY


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"sk-client",
        b"Basic sk-client",
        b"Bearer sk-clien",
        b"Bearer sk-clientt",
        b"Bearer SK-CLIENT",
        b"Bearer sk-client sk-client",
        b"Bearer " + b"x" * 1_000_000,
    ],
)
def test_nothing_but_the_key_authorises(value: bytes) -> None:
    assert Clients([KEY]).find([(b"authorization", value)]) is None


def test_a_missing_or_a_second_key_does_not_authorise() -> None:
    clients = Clients([KEY])
    assert clients.find([]) is None
    assert clients.find([bearer(b"sk-client")] * 2) is None
    assert clients.find([bearer(b"sk-client"), x_api_key(b"sk-client")]) is EVERYBODY
    assert clients.find([bearer(b"sk-client"), x_api_key(b"wrong")]) is None


def test_a_tenant_is_known_by_each_of_its_keys() -> None:
    clients = Clients((), [ACME, WALK_IN])
    assert clients.find([bearer(b"sk-a")]) is ACME
    assert clients.find([x_api_key(b"sk-b")]) is ACME
    assert clients.find([bearer(b"sk-a"), x_api_key(b"sk-b")]) is ACME
    # Its digest is not its key.
    assert clients.find([bearer(digest_of(b"sk-a").value)]) is None


@pytest.mark.parametrize(
    ("api_keys", "tenants", "headers", "expected"),
    [
        ((), [ACME], [], None),
        ((), [ACME], [bearer(b"sk-client")], None),
        ((), [ACME, WALK_IN], [], WALK_IN),
        ((), [ACME, WALK_IN], [bearer(b"sk-client")], None),
        ([KEY], [ACME, WALK_IN], [], None),
        ([KEY], [ACME, WALK_IN], [bearer(b"sk-client")], WALK_IN),
        ([KEY], [ACME, WALK_IN], [bearer(b"sk-a")], ACME),
        ([KEY], [ACME, WALK_IN], [bearer(b"sk-a"), x_api_key(b"sk-client")], None),
    ],
)
def test_the_default_tenant_has_the_keys_that_are_nobodys(
    api_keys: list[Secret],
    tenants: list[Tenant],
    headers: list[tuple[bytes, bytes]],
    expected: Tenant | None,
) -> None:
    assert Clients(api_keys, tenants).find(headers) is expected


def test_a_tenant_may_use_its_models_alone() -> None:
    assert refuse_model(ACME, "n") is None
    assert refuse_model(WALK_IN, "anything") is None
    assert refuse_model(ACME, "x" * 500) == (
        404,
        f"The model `{'x' * 128}` does not exist or you do not have access to it.",
    )
    # Else an engine would take the model that it has.
    assert refuse_model(ACME, "") == (400, "you must provide a model parameter")


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, b"0s"),
        (1, b"1ms"),
        (12_000_000, b"12ms"),
        (S, b"1s"),
        (8_640_000_000, b"8.64s"),
        (360 * S, b"6m0s"),
        (432_500_000_000, b"7m12.5s"),
        (3600 * S, b"1h0m0s"),
        (90_061 * S, b"25h1m1s"),
    ],
)
def test_times_are_written_as_openai_does(time_ns: int, text: bytes) -> None:
    assert duration(time_ns) == text


def test_each_rate_has_its_headers() -> None:
    assert allowance_headers({"tokens": Allowance(1000, 990, 20_000_000)}) == [
        (b"x-ratelimit-limit-tokens", b"1000"),
        (b"x-ratelimit-remaining-tokens", b"990"),
        (b"x-ratelimit-reset-tokens", b"20ms"),
    ]
    assert allowance_headers({}) == []
