"""What is seen of engines from outside: by an audit, and by a second proxy before the same engines."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

from answers import ask
from engines import metric
from fleet import Fleet, Proxy, until
from pd_checks import completion

_WATCHED_MINUTES = 0.5
_CLIENTS = 12
_OTHERS = "balanceroute_rank_other_requests"


class AuditChecks:
    """The checks, in the order in which they run. The name of a method is what it claims."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def check_an_audit_tells_what_it_sees_and_what_it_cannot_know(self) -> str:
        out = self._fleet.folder / "audit.json"
        command = [sys.executable, "-m", "balanceroute.proxy", "audit", "--json", str(out)]
        command += ["--prefill", *(engine.url for engine in self._fleet.prefillers)]
        command += ["--decode", *(engine.url for engine in self._fleet.decoders)]
        command += ["--minutes", str(_WATCHED_MINUTES), "--interval-s", "0.2"]
        with self._fleet.proxy("audited", "--policy", "jsq") as proxy, _busy(proxy, 150):
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        told: dict[str, Any] = json.loads(out.read_text())
        assert len(told["ranks"]) == len(self._fleet.decoders), told["ranks"]
        assert 0.0 < told["idle_fraction"] < 1.0, told
        assert told["output_tokens_per_s"] > 0.0, told
        # Steps of two ranks on a busy CPU need not show what a token costs.
        unknown = [] if told["fit"] is not None else ["step time"]
        if told["recovery"] is None:
            assert told["unknown"], told
            unknown.append(f"what policies recover ({told['unknown'].partition(' (')[0]})")
        return (
            f"{told['looks']} looks, {told['idle_fraction']:.0%} idle, bound by {told['bound']}, "
            f"unknown: {', '.join(unknown) or 'nothing'}"
        )

    def check_two_proxies_see_what_the_other_has(self) -> str:
        with (
            self._fleet.proxy("first") as first,
            _busy(first, 1_500),
            self._fleet.proxy("second") as second,
        ):
            until(lambda: sum(self._bound(first)) == _CLIENTS, "all requests run")
            until(lambda: self._others(second) == self._bound(first), "the second sees them")
            seen = self._others(second)
            assert self._others(first) == [0] * len(seen), "the first sees others where none are"
            answer = ask(second.url, *completion("one two three", max_tokens=4))
            assert answer["usage"]["completion_tokens"] == 4, answer
        return f"{seen} requests on the ranks"

    def _bound(self, proxy: Proxy) -> list[float]:
        return self._by_rank(proxy, "balanceroute_rank_bound_requests")

    def _others(self, proxy: Proxy) -> list[float]:
        return self._by_rank(proxy, _OTHERS)

    def _by_rank(self, proxy: Proxy, name: str) -> list[float]:
        ranks = range(len(self._fleet.decoders))
        return [metric(proxy.admin_url, name, rank=str(rank)) for rank in ranks]


@contextmanager
def _busy(proxy: Proxy, tokens: int) -> Iterator[None]:
    """Keep as many requests running as there are clients, of about so many tokens each."""
    ended = Event()

    def run(number: int) -> None:
        while not ended.is_set():
            number += _CLIENTS
            prompt = [1 + (7 * number) % 97] * (20 + 37 * number % 300)
            limit = tokens - 13 * (number % 7)
            ask(proxy.url, *completion(prompt, max_tokens=limit, ignore_eos=True), timeout_s=600.0)

    with ThreadPoolExecutor(_CLIENTS) as clients:
        running = [clients.submit(run, number) for number in range(_CLIENTS)]
        try:
            yield
        finally:
            ended.set()
        for one in running:
            one.result()
