"""What must hold beside an engine whose KV cache does not fit: it gets nothing, and nothing is lost."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from answers import ask, assert_equal, essence
from client import CLIENT
from engines import Engine, Order, free_port, metric, running
from fleet import SUCCESSES, Fleet, Proxy, until
from pd_checks import completion

_REQUESTS, _AT_A_TIME = 24, 8
_DTYPE = "bfloat16"
_SIDE_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_FAILURES = "balanceroute_kv_transfer_failures_total"


class PairingChecks:
    """The checks, in the order in which they run. The name of a method is what it claims.

    Args:
        fleet: All its engines fit.
        order: Of one of its decode engines.
    """

    def __init__(self, fleet: Fleet, order: Order) -> None:
        self._fleet = fleet
        self._order = order

    def check_an_engine_with_another_kv_cache_is_never_paired(self) -> str:
        with self._other() as other:
            decode = [engine.url for engine in (*self._fleet.decoders, other)]
            with self._fleet.proxy("pairs", "--policy", "round-robin", decode=decode) as proxy:
                until(lambda: bool(_unfit(proxy).get(other.url)), "the engine is found unfit")
                reason = _unfit(proxy)[other.url]
                assert _DTYPE in reason, reason
                assert list(_unfit(proxy)) == [other.url], _unfit(proxy)
                self._served(proxy)
                assert other.metric(SUCCESSES) == 0, "it was given requests"
                failures = metric(proxy.url, _FAILURES)
                assert failures == 0, f"{failures:.0f} KV transfers failed"
            with self._fleet.proxy("held", decode=[other.url]) as proxy:
                until(lambda: bool(_unfit(proxy).get(other.url)), "the only rank is unfit")
                _refused(proxy)
            # Otherwise nothing was held back that needed it.
            flags = ("--no-check-pairs", "--retry-attempts", "1")
            with self._fleet.proxy("unchecked", *flags, decode=[other.url]) as proxy:
                _refused(proxy)
                assert metric(proxy.url, _FAILURES), "the engines took such a pair"
        return f"{_REQUESTS} requests exact without it, alone it is refused; {reason}"

    # How it is done.

    @contextmanager
    def _other(self) -> Iterator[Engine]:
        flags = (*self._order.flags, f"--kv-cache-dtype={_DTYPE}")
        environment = {**(self._order.environment or {}), _SIDE_PORT: str(free_port(2))}
        # Its steps are not those of the fleet's ranks.
        environment.pop("BALANCEROUTE_STEP_TRACE", None)
        order = replace(self._order, name="other", flags=flags, environment=environment)
        with running([order], self._fleet.folder) as (engine,):
            yield engine

    def _served(self, proxy: Proxy) -> None:
        asked = [completion(f"class Pair{number}:", stream=True) for number in range(_REQUESTS)]
        with ThreadPoolExecutor(_AT_A_TIME) as threads:
            ours = list(threads.map(lambda one: essence(ask(proxy.url, *one)), asked))
        for one, answer in zip(asked, ours, strict=True):
            assert_equal(answer, essence(ask(self._fleet.prefillers[0].url, *one)))


def _unfit(proxy: Proxy) -> dict[str, str]:
    """Return why engines are not paired, by URL."""
    return {row["url"]: row["unfit"] for row in proxy.instances() if "unfit" in row}


def _refused(proxy: Proxy) -> None:
    path, body = completion("def refused():")
    answer = CLIENT.post(f"{proxy.url}{path}", json=body, timeout=60.0)
    assert answer.status_code >= 500, f"{answer.status_code}: {answer.text[:300]}"
