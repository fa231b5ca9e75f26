"""Where prefillers that name no address publish their KV cache events."""

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.live.settings.engines import PrefillServer

ENGINES = {"prefill": ["http://p:8000"], "decode": ["http://d:8000"]}
AWARE = ENGINES | {"prefill_choice": "prefix-aware"}
ADDRESSES = {"kv_events": ["tcp://e:1"], "kv_replay": ["tcp://e:2"]}


def test_a_port_stands_for_those_that_name_no_address() -> None:
    ports = make_config(None, AWARE | {"kv_events_port": 5557, "kv_replay_port": 5558})
    assert ports.hears_kv_events
    server = PrefillServer(EngineUrl.parse("http://[fd00::1]:8000"))
    assert server.event_addresses(ports.engines) == ("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5558")
    own = make_config(None, AWARE | ADDRESSES | {"kv_events_port": 5557})
    (named,) = own.prefillers
    assert named.event_addresses(own.engines) == ("tcp://e:1", "tcp://e:2")
    assert server.event_addresses(own.engines) == ("tcp://[fd00::1]:5557", None)


def test_without_it_nobody_is_heard_who_names_no_address() -> None:
    config = make_config(None, AWARE)
    assert not config.hears_kv_events
    (server,) = config.prefillers
    assert server.event_addresses(config.engines) == (None, None)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (AWARE | {"kv_replay_port": 5558}, "--kv-replay-port: needs --kv-events-port too"),
        (ENGINES | {"kv_events_port": 5557}, "nobody asks without --prefill-choice"),
        (AWARE | {"kv_events_port": 0}, "kv-events-port"),
        (ENGINES | {"rank_kv_events_port": 5557}, "rank-kv-events-port: nobody asks without"),
        (ENGINES | {"rank_kv_events_port": 60_000}, "rank-kv-events-port"),
        (
            ENGINES | {"rank_kv_replay_port": 5558, "prefix_affinity": 1.0},
            "--rank-kv-replay-port: needs --rank-kv-events-port too",
        ),
    ],
)
def test_ports_that_are_of_no_use_are_refused(flags: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_config(None, flags)


@pytest.mark.parametrize("more", [{"prefix_affinity": 1.0}, {"local_prefill_tokens": 500}])
def test_ranks_are_heard_where_somebody_asks(more: dict[str, object]) -> None:
    config = make_config(None, ENGINES | {"rank_kv_events_port": 5557} | more)
    assert config.hears_rank_kv_events
    assert not config.hears_kv_events
