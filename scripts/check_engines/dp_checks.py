"""A mixture of experts whose ranks share a barrier, as prefiller and as decode engine.

The prefiller has its two ranks behind one port. Each decode rank has a server and a port of its own, as
most topologies deploy them. The other way round, the prefiller's ranks decode, addressed by header.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from answers import ask, assert_equal, essence
from engines import Engine
from fleet import SUCCESSES, Fleet, Proxy
from pd_checks import completion
from trace_checks import TraceChecks

_RANKS = 2
# Requests at once, and how often at most.
_BURST = 8
_ROUNDS = 5


class DpChecks(TraceChecks):
    """The checks, in the order in which they run. The name of a method is what it claims."""

    output_part = 4  # A step of these ranks takes ten times as long.

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._behind_one_port = fleet.prefillers[0]

    def check_br_h_serves_a_trace_slice_on_ranks_with_a_port_each(self) -> str:
        return self.check_a_trace_slice_is_served_without_an_error()

    def check_the_mirrored_load_is_the_ranks(self) -> str:
        seen = self.check_the_mirrored_load_is_the_engines()
        (unit,) = self._validated()["units"]
        assert unit["whole"], unit
        assert len(unit["ranks"]) == _RANKS, unit
        idle = unit["idle"]
        return (
            f"{seen}; barrier: {idle['tokens']:.0%} idle by loads, {idle['dummy']:.1%} in dummy "
            f"batches, steps end within {idle['spread_ms_p50']:.1f} ms"
        )

    def check_answers_of_ranks_with_a_port_each_are_those_of_one_engine(self) -> str:
        decoders = self._fleet.decoders
        decoded = [engine.metric(SUCCESSES) for engine in decoders]
        prefills, rounds = [0], 0
        with self._fleet.proxy("ports", "--policy", "round-robin") as proxy:
            # The engine chooses; each rank hands out what it prefilled, at a port of its own.
            while min(prefills) < 2:
                assert rounds < _ROUNDS, f"one rank prefilled nearly all: {prefills}"
                prefills = self._compare(proxy, self._behind_one_port)
                rounds += 1
        served = _grown(decoded, [engine.metric(SUCCESSES) for engine in decoders])
        assert served == [rounds * _BURST // 2] * 2, served
        return f"{sum(served)} requests, by decode rank {served}, by prefill rank {prefills}"

    def check_ranks_behind_one_port_are_found_and_answer_as_one_engine(self) -> str:
        server, prefiller = self._behind_one_port, self._fleet.decoders[0]
        with self._fleet.proxy(
            "found",
            "--policy",
            "round-robin",
            prefill=[prefiller.url],
            decode=[f"{server.url}@discover"],
        ) as proxy:
            state: Any = proxy.state()
            names = [rank["name"] for rank in state["state"]["ranks"]]
            assert names == [f"{server.url}@{rank}" for rank in range(_RANKS)], names
            served = self._compare(proxy, prefiller)
        assert served == [_BURST // 2] * 2, served
        return f"{_BURST} requests, by rank {served}"

    # How it is done.

    def _by_rank(self) -> list[float]:
        return [self._behind_one_port.metric(SUCCESSES, engine=str(rank)) for rank in range(_RANKS)]

    def _compare(self, proxy: Proxy, single: Engine) -> list[int]:
        """Compare what some requests at once are answered with what an engine says to each alone.

        Returns:
            How many of the former each rank behind one port finished.
        """
        requests = [completion(f"def rank_{i}(", stream=bool(i % 2)) for i in range(_BURST)]
        before = self._by_rank()
        with ThreadPoolExecutor(_BURST) as threads:
            ours = list(threads.map(lambda request: essence(ask(proxy.url, *request)), requests))
        finished = _grown(before, self._by_rank())
        for request, one in zip(requests, ours, strict=True):
            assert_equal(one, essence(ask(single.url, *request)))
        return finished


def _grown(before: list[float], after: list[float]) -> list[int]:
    return [int(new - old) for old, new in zip(before, after, strict=True)]
