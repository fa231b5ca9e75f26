"""Engine addresses: one spelling each, nothing but an address, and no secret in a message."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.engines.engine_url import EngineUrl, Fault, fault_of, valid_host
from balanceroute.proxy.wire.messages import WireError, WireFault

HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"[a-z][a-z0-9_-]{0,9}[a-z0-9](\.[a-z][a-z0-9]{0,9}){0,2}", fullmatch=True),
)
URLS = st.builds(
    EngineUrl,
    st.sampled_from(["http", "https"]),
    HOSTS,
    st.integers(1, 65_535),
    st.none() | st.integers(0, 9_999),
)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://10.0.0.7:8200", EngineUrl("http", "10.0.0.7", 8200)),
        ("http://decode-3:8200@5", EngineUrl("http", "decode-3", 8200, 5)),
        ("http://h:8000@0", EngineUrl("http", "h", 8000, 0)),
        ("http://h", EngineUrl("http", "h", 80)),
        ("https://h", EngineUrl("https", "h", 443)),
        ("https://h@7", EngineUrl("https", "h", 443, 7)),
        ("HTTPS://Node.Example.:8000", EngineUrl("https", "node.example", 8000)),
        ("http://h:8000/", EngineUrl("http", "h", 8000)),
        ("http://[::1]:8000", EngineUrl("http", "::1", 8000)),
        ("http://[2001:DB8:0::1]@2", EngineUrl("http", "2001:db8::1", 80, 2)),
        ("http://my_engine:1", EngineUrl("http", "my_engine", 1)),
    ],
)
def test_an_address_is_read_in_its_usual_spelling(text: str, url: EngineUrl) -> None:
    assert EngineUrl.parse(text) == url


@given(URLS)
def test_the_name_of_an_address_is_read_back_as_the_address(url: EngineUrl) -> None:
    assert EngineUrl.parse(url.name) == url
    assert url.at(None).name == url.base
    assert str(url) == url.name


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must begin with http:// or https://"),
        ("h:8000", "must begin with http:// or https://"),
        ("tcp://h:8000", "must begin with"),
        (" http://h:8000", "must begin with"),
        ("http://", "has no host"),
        ("http://:8000", "has no host"),
        ("http://h:", "has a port that is not from 1 to 65535"),
        ("http://h:0", "has a port"),
        ("http://h:65536", "has a port"),
        ("http://h:+80", "has a port"),
        ("http://h:8_0", "has a port"),
        ("http://h:٨", "has a port"),
        ("http://h:1:2", "without brackets, or two ports"),
        ("http://::1:8000", "has an IPv6 address without brackets"),
        ("http://[::1", "has a broken IPv6 address"),
        ("http://[::1]8000", "has a broken IPv6 address"),
        ("http://[h]:8000", "in brackets that is not an IPv6 address"),
        ("http://[1:2]:8000", "is not an IPv6 address"),
        ("http://[fe80::1%eth0]:8000", "with a zone"),
        ("http://h:8000/v1", "no path, no query"),
        ("http://h:8000//", "no path, no query"),
        ("http://h:8000/@3", "no path, no query"),
        ("http://h:8000?key=k", "no path, no query"),
        ("http://h:8000#top", "no path, no query"),
        ("http://h\\@evil:8000", "no path, no query"),
        ("http://h:8000@10000", "has a rank beyond 9999"),
        ("http://h:8000@-1", "must not carry credentials"),
        ("http://h:8000@", "must not carry credentials"),
        ("http://h:8000@1@2", "must not carry credentials"),
        ("http://user:hunter2@h:8000", "must not carry credentials"),
        ("http://2130706433:80", "is not an IPv4 address"),
        ("http://0x7f000001:80", "is not an IPv4 address"),
        ("http://127.1:80", "is not an IPv4 address"),
        ("http://010.0.0.1:80", "is not an IPv4 address"),
        ("http://256.0.0.1:80", "is not an IPv4 address"),
        ("http://a b:80", "neither a name nor an IP address"),
        ("http://-h:80", "neither a name nor an IP address"),
        ("http://a..b:80", "neither a name nor an IP address"),
        ("http://é:80", "neither a name nor an IP address"),
        ("http://h\r\nx", "neither a name nor an IP address"),
        ("http://%68:80", "neither a name nor an IP address"),
        (f"http://{'a' * 64}:80", "neither a name nor an IP address"),
        (f"http://{'a.' * 130}a:80", "neither a name nor an IP address"),
    ],
)
def test_what_is_not_an_address_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineUrl.parse(text)
    assert reason in str(refused.value)
    assert not {"\r", "\n"} & set(str(refused.value))


@pytest.mark.parametrize(
    "text",
    [
        "http://user:hunter2@h:8000",
        "http://user:hunter2@h:8000@3",
        "http://hunter2@h",
        "http://user:hunter2@10",
        "http://user:hun/ter2hunter2@h:1",
        "http://user:hunter2@h:1/path",
        "user:hunter2@h:8000",
        "http://h:8000/?key=hunter2",
        "http://h:8000/hunter2",
        "http://h:8000#hunter2",
        "http://u@h?hunter2",
    ],
)
def test_no_message_shows_what_may_be_a_secret(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineUrl.parse(text)
    assert "hunter2" not in str(refused.value)


def test_a_host_is_listened_on_as_it_is_dialled() -> None:
    assert valid_host("::") == "::"
    assert valid_host("0.0.0.0") == "0.0.0.0"  # noqa: S104 - a name, nothing is bound.
    assert valid_host("LocalHost") == "localhost"
    for text in ("", "a/b", "[::1]", "*"):
        with pytest.raises(ConfigError, match="has a host that is"):
            valid_host(text)


# What a broken exchange says of an engine.


def broken(kind: WireFault, cause: OSError | None = None) -> WireError:
    error = WireError(kind, "broken", sent=False, answered=False)
    error.__cause__ = cause
    return error


OF_THIS_MACHINE = {WireFault.NO_ADDRESS, WireFault.TOO_LATE}


@pytest.mark.parametrize("kind", [kind for kind in WireFault if kind not in OF_THIS_MACHINE])
def test_every_way_to_break_off_says_something_of_the_engine(kind: WireFault) -> None:
    assert fault_of(broken(kind)) is not Fault.LOCAL


def test_an_engine_is_not_blamed_for_file_descriptors_that_this_process_lacks() -> None:
    lacking = broken(WireFault.CONNECT, OSError(errno.EMFILE, "too many open files"))
    refused = broken(WireFault.CONNECT, OSError(errno.ECONNREFUSED, "connection refused"))
    assert fault_of(lacking) is Fault.LOCAL
    assert fault_of(refused) is Fault.CONNECT


@pytest.mark.parametrize("code", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT])
def test_only_a_refusal_says_that_nobody_is_there(code: int) -> None:
    assert fault_of(broken(WireFault.CONNECT, OSError(code, "no route"))) is Fault.UNREACHABLE
