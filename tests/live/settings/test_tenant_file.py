"""The file of tenants: what it gives, and each mistake with its place and the reason."""

import re
from pathlib import Path

import pytest
from tests.live.settings.configs import of_flags, secret_file
from tests.script import ROOT

from balanceroute.proxy.core.admission import Rate, TenantLimits
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import settings_of
from balanceroute.proxy.live.security import Tenant, digest_of
from balanceroute.proxy.live.settings.configure import read_credentials
from balanceroute.proxy.live.settings.tenant_file import TenantTable, read_tenants

PAGE = (ROOT / "docs" / "tenants.md").read_text(encoding="utf-8")
A, B = (digest_of(key).value.decode() for key in (b"sk-a", b"sk-b"))


def tenant(members: str, key: str = A) -> str:
    return f'[[tenant]]\nkey_sha256 = "{key}"\n{members}\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "tenants.toml"
    path.write_text(text)
    return path


def test_a_file_gives_tenants_with_all_their_limits(tmp_path: Path) -> None:
    secret_file(tmp_path, "b.keys", "sk-b\nsk-c\n")
    text = f"""
        [[tenant]]
        name = "acme"
        key_sha256 = ["{A.upper()}"]
        key_file = "b.keys"
        weight = 2.5
        level = -1
        requests_per_minute = 60
        request_burst = 5
        tokens_per_minute = 1000
        concurrency = 4
        queue_limit = 3
        deadline_s = 1.5
        models = ["m", "n"]
        client_priority = true
        client_deadline = true

        [[tenant]]
        name = "walk-in"
        default = true
    """
    assert read_tenants(written(tmp_path, text)) == (
        Tenant(
            "acme",
            tuple(map(digest_of, (b"sk-a", b"sk-b", b"sk-c"))),
            weight=2.5,
            level=-1,
            deadline_s=1.5,
            models=("m", "n"),
            client_priority=True,
            client_deadline=True,
            limits=TenantLimits(
                requests=Rate(60, 5), tokens=Rate(1000, 1000), concurrency=4, queue_limit=3
            ),
        ),
        Tenant("walk-in", default=True),
    )


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("", "", "needs tenants: write [[tenant]]"),
        ("tenant = 3", "", "needs tenants: write [[tenant]]"),
        ("tenant = []", "", "needs tenants: write [[tenant]]"),
        ("[tenant]\nname = 'a'", "", "needs tenants: write [[tenant]]"),
        ("[[tennant]]\nname = 'a'", "tennant", "unknown key; did you mean 'tenant'?"),
        ("[[tenant]\n", "", "not TOML"),
        (tenant(""), "[tenant[0]].name", "is missing"),
        (tenant("name = 'a b'"), "[tenant[0]].name", "is 'a b', must be 1 to 64 of"),
        (tenant("name = 'other'"), "[tenant[0]].name", "not 'other'"),
        (tenant("name = ''"), "[tenant[0]].name", "is '', must be a text"),
        (tenant("name = 'a'\nwieght = 2"), "[tenant[0]].wieght", "did you mean 'weight'?"),
        (tenant("name = 'a'\nweight = 0"), "[tenant[0]].weight", "is 0, must be from 0.001"),
        (tenant("name = 'a'\nlevel = 1.5"), "[tenant[0]].level", "must be an integer"),
        (tenant("name = 'a'\nconcurrency = 0"), "[tenant[0]].concurrency", "is 0, must be"),
        (tenant("name = 'a'\nqueue_limit = 'x'"), "[tenant[0]].queue_limit", "must be an integer"),
        (tenant("name = 'a'\ndeadline_s = 0"), "[tenant[0]].deadline_s", "is 0, must be from"),
        (tenant("name = 'a'\nmodels = [3]"), "[tenant[0]].models", "has 3, must be a list"),
        (tenant("name = 'a'\nmodels = 'a b'"), "[tenant[0]].models", "visible ASCII"),
        (tenant("name = 'a'\ndefault = 1"), "[tenant[0]].default", "must be true or false"),
        (
            tenant("name = 'a'\nrequest_burst = 3"),
            "[tenant[0]].request_burst",
            "means nothing without requests_per_minute",
        ),
        (
            tenant("name = 'a'\ntoken_burst = 3"),
            "[tenant[0]].token_burst",
            "means nothing without tokens_per_minute",
        ),
        (tenant("name = 'a'\nkey_file = 'absent'"), "[tenant[0]].key_file", "No such file"),
        ("[[tenant]]\nname = 'a'", "[tenant[0]]", "nobody could be it"),
        (tenant("name = 'a'") + tenant("name = 'a'", B), "", "two tenants have the name 'a'"),
        (
            tenant("name = 'a'") + tenant("name = 'b'"),
            "[tenant[1]]",
            "has a key that [tenant[0]] has",
        ),
        (
            tenant("name = 'a'\ndefault = true") + tenant("name = 'b'\ndefault = true", B),
            "[tenant[0]] and [tenant[1]]",
            "are both the default",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(
    text: str, place: str, reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        of_flags(tenants=str(path))
    message = str(refused.value)
    assert message.startswith(f"{path}: {place}")
    assert reason in message


def test_a_key_in_place_of_its_digest_is_not_shown(tmp_path: Path) -> None:
    path = written(tmp_path, tenant("name = 'a'", "sk-secret"))
    with pytest.raises(ConfigError, match=r"\[tenant\[0\]\].key_sha256 has what is no") as refused:
        read_tenants(path)
    assert "sk-secret" not in str(refused.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: No such file"):
        of_flags(tenants=str(tmp_path / "absent.toml"))


def test_keys_that_would_be_nobodys_are_refused(tmp_path: Path) -> None:
    flags = {
        "tenants": str(written(tmp_path, tenant("name = 'a'"))),
        "api_key_file": secret_file(tmp_path, "keys", "sk-x\n"),
    }
    with pytest.raises(ConfigError, match="--api-key-file: means nothing with --tenants if no"):
        of_flags(**flags)


def test_what_all_may_each_tenant_may(tmp_path: Path) -> None:
    flags: dict[str, object] = {
        "tenants": str(written(tmp_path, tenant("name = 'a'\nclient_deadline = true"))),
        "client_priority": True,
    }
    config = of_flags(**flags)
    (one,) = config.credentials.tenants
    assert (one.client_priority, one.client_deadline) == (True, True)
    assert not config.pass_authorization
    # As it is read again.
    engines: dict[str, object] = {"prefill": ["http://p"], "decode": ["http://d"]}
    assert read_credentials(None, engines | flags) == config.credentials


def test_the_configuration_shows_no_digest(tmp_path: Path) -> None:
    config = of_flags(tenants=str(written(tmp_path, tenant("name = 'a'"))))
    assert A not in repr(config)
    assert A not in repr(config.redacted())
    assert "'a'" in repr(config.redacted())


def test_the_pages_example_is_a_file_of_tenants(tmp_path: Path) -> None:
    secret_file(tmp_path, "batch.keys", "sk-batch\n")
    example = PAGE.split("```")[1]
    assert [one.name for one in read_tenants(written(tmp_path, example))] == [
        "acme",
        "batch",
        "walk-in",
    ]


def test_the_page_has_every_member() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.split("## ")[0], re.MULTILINE)
    assert rows == [one.name for one in settings_of(TenantTable)]
