"""What must hold when the engines are paused and their requests are aborted, through the proxy."""

import time
from typing import Any

from answers import ask
from client import CLIENT
from engines import Engine
from fleet import Fleet, Proxy, until
from pd_checks import chat, completion
from streaming import Streaming

_STREAMS = 4
# Near the end of the context, so that none ends by itself.
_LONG = {"stream": True, "max_tokens": 1_900, "ignore_eos": True}
_LIMIT_S = 30.0


def _order(proxy: Proxy, path: str) -> Any:
    answer = CLIENT.post(f"{proxy.admin_url}{path}", json={}, timeout=_LIMIT_S)
    assert answer.status_code == 200, f"{path}: {answer.status_code}: {answer.text[:300]}"
    return answer.json()


def _ready(proxy: Proxy) -> int:
    return CLIENT.get(f"{proxy.admin_url}/ready", timeout=_LIMIT_S).status_code


def _paused(engine: Engine) -> bool:
    return bool(CLIENT.get(f"{engine.url}/is_paused", timeout=_LIMIT_S).json()["is_paused"])


class PauseChecks:
    """The checks, in the order in which they run. The name of a method is what it claims."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._engines = [*fleet.prefillers, *fleet.decoders]

    def check_aborted_streams_end_with_what_they_had(self) -> str:
        with self._fleet.proxy("aborted") as proxy:
            streams = self._streams(proxy)
            done = _order(proxy, "/abort_requests")
            assert done["aborted"] == _STREAMS, done
            tokens = [self._aborted(stream) for stream in streams]
            path, body = completion("for line in file:")
            ask(proxy.url, path, body)
        return f"{_STREAMS} streams, with {min(tokens)} to {max(tokens)} events; later ones served"

    def check_a_paused_fleet_holds_what_comes_until_it_resumes(self) -> str:
        with self._fleet.proxy("paused") as proxy:
            streams = self._streams(proxy)
            _order(proxy, "/pause")
            for stream in streams:
                self._aborted(stream)
            assert all(map(_paused, self._engines))
            path, body = chat("import os, sys")
            held = Streaming(proxy.url, path, body | {"stream": True})
            time.sleep(2.0)
            assert not held.events, held.events
            _order(proxy, "/resume")
            held.join()
            assert held.error is None, held.error
            assert held.events
            assert not any(map(_paused, self._engines))
        return f"{len(self._engines)} engines paused and resumed"

    def check_engines_sleep_and_wake_up(self) -> str:
        """Level 0 alone: a CPU has no memory to give back."""
        with self._fleet.proxy("asleep") as proxy:
            streams = self._streams(proxy)
            done = _order(proxy, "/sleep?level=0")
            assert (done["status"], done["aborted"]) == ("sleeping", _STREAMS), done
            for stream in streams:
                self._aborted(stream)
            assert all(map(_paused, self._engines))
            # What the engines tell of themselves is read once a second.
            until(lambda: _ready(proxy) == 503, "a proxy that is not ready", step_s=0.2)
            path, body = chat("import os, sys")
            held = Streaming(proxy.url, path, body | {"stream": True})
            time.sleep(2.0)
            assert not held.events, held.events
            woken = _order(proxy, "/wake_up?tags=scheduling")
            assert (woken["status"], woken["asleep"]) == ("awake", 0), woken
            held.join()
            assert held.error is None, held.error
            assert held.events
            assert _ready(proxy) == 200
        return f"{len(self._engines)} engines slept and woke up"

    def _streams(self, proxy: Proxy) -> list[Streaming]:
        asked = [completion([300 + i, *range(400, 440)], **_LONG) for i in range(_STREAMS)]
        streams = [Streaming(proxy.url, *one) for one in asked]
        until(lambda: all(len(one.events) > 5 for one in streams), "streams", step_s=0.01)
        return streams

    def _aborted(self, stream: Streaming) -> int:
        """Check that a stream ended as an aborted request's does; return its events."""
        stream.join()
        assert stream.error is None, stream.error
        reasons = [choice["finish_reason"] for e in stream.events for choice in e["choices"]]
        assert reasons[-1] == "abort", reasons[-3:]
        assert not any(reasons[:-1])
        return len(stream.events)
