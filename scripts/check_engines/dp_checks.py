"""A decode engine with two data-parallel ranks: real barrier waves, ranks addressed by header."""

from collections import Counter

import httpx
from answers import ask, assert_equal, essence
from fleet import Fleet
from pd_checks import completion
from trace_checks import TraceChecks

_RANKS = 2


class DpChecks(TraceChecks):
    """The checks, in the order in which they run. The name of a method is what it claims."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._ranks = [f"{fleet.decoders[0].url}@{rank}" for rank in range(_RANKS)]

    def names(self) -> list[str]:
        """Return the names of the checks."""
        return [name for name in vars(DpChecks) if name.startswith("check_")]

    def check_ranks_are_found_by_themselves(self) -> str:
        with self._fleet.proxy(
            "found", decode=[f"{self._fleet.decoders[0].url}@discover"]
        ) as proxy:
            ranks = httpx.get(f"{proxy.admin_url}/admin/state", timeout=10.0).json()["state"][
                "ranks"
            ]
        names = [rank["name"] for rank in ranks]
        assert names == self._ranks, names
        return ", ".join(names)

    def check_answers_of_ranks_are_those_of_one_engine(self) -> str:
        served: Counter[str] = Counter()
        with self._fleet.proxy("ranks", "--policy", "round-robin", decode=self._ranks) as proxy:
            for i in range(8):
                path, body = completion(f"def rank_{i}(", stream=bool(i % 2))
                ours = essence(ask(proxy.url, path, body))
                assert_equal(ours, essence(ask(self._fleet.prefillers[0].url, path, body)))
        decoder = self._fleet.decoders[0]
        for rank in range(_RANKS):
            served[str(rank)] = int(decoder.metric("vllm:request_success_total", engine=str(rank)))
        assert min(served.values()) >= 3, served
        return f"8 requests, served by rank: {dict(served)}"

    def check_br_h_serves_a_trace_slice_on_both_ranks(self) -> str:
        with self._fleet.proxy(
            "dp-trace", "--load-log", str(self._loads), decode=self._ranks
        ) as proxy:
            report = self._replay(proxy)
        return f"{report['finished']:.0f} requests, {report['output_tokens_per_s']:.0f} tokens/s"

    def check_the_mirrored_load_is_the_ranks(self) -> str:
        return self.check_the_mirrored_load_is_the_engines()
