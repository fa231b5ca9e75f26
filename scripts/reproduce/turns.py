"""Conversations of many turns: who computes and who decodes the next one."""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.support.arguments import positive

from balanceroute.proxy.core.events import RankId
from balanceroute.proxy.core.policies import Fleet, Policy, PolicyInputs
from balanceroute.proxy.core.policies.oldest_first import OldestFirst
from balanceroute.proxy.core.ranks import Assignment, lowest
from balanceroute.proxy.core.waiting import Pool, PoolEntry
from balanceroute.proxy.lab.sim.workload import playable
from balanceroute.traces import TraceRequest, read_trace, write_native
from experiment import Columns, Figure, simulated, tabulated

BLOCK_TOKENS = 512
PREFILL_BASE_MS, PREFILL_TOKEN_US = 20, 50
CONVERSATIONS = 1_500
# Prefillers and load.
TURN_CASES = ((4, 0.7), (4, 0.9), (4, 1.1), (2, 0.9), (8, 0.9))
TURN_CACHE_TOKENS = 2_000_000
# Once they have begun, at rate 1 they are the work of so many prefillers.
_WORK = 4.8


def turns_rate(prefillers: int, load: float) -> float:
    """Return by how much the conversations are sped up."""
    return round(load * prefillers / _WORK, 3)


def conversations(number: int, per_s: float = 9.0, seed: int = 2) -> list[TraceRequest]:
    """Return the turns of conversations: so many begin each second, and have 6.6 turns on average.

    Each begins with one of eight system prompts of four blocks. A turn adds 50 to 2,000 tokens and
    the answer before it, ten seconds after that.
    """
    rng, ids = random.Random(seed), count()
    systems = [[next(ids) for _ in range(4)] for _ in range(8)]
    requests: list[TraceRequest] = []
    start_s = 0.0
    for _ in range(number):
        start_s += rng.expovariate(per_s)
        at_s, blocks = start_s, list(rng.choice(systems))
        tokens, goes_on = BLOCK_TOKENS * len(blocks), True
        while goes_on:
            tokens += rng.randint(50, 2_000)
            output = 1 + min(1_500, int(rng.expovariate(1 / 300)))
            blocks += [next(ids) for _ in range(tokens // BLOCK_TOKENS - len(blocks))]
            requests.append(TraceRequest(round(1e9 * at_s), tokens, output, tuple(blocks)))
            tokens += output
            at_s += rng.expovariate(1 / 10) + 0.02 * output
            goes_on = rng.random() < 0.85 and tokens < 100_000
    return sorted(requests, key=lambda request: request.arrival_ns)


# Other rules for later turns, as policies of the simulator: `--policy reproduce.turns:sticky` and so
# on.

# SMG: queues whose lengths differ by more are evened out first. Theirs is 64, beyond any batch of ours.
_LONGER, _TIMES_LONGER = 8, 1.5
# SMG: the least share of a prompt that is followed.
_MATCH = 0.3
# Tokens of a beginning that conversations may share, as a system prompt: affinity alone follows longer ones.
_SHARED = 2_560


def kept_tokens(fleet: Fleet, entry: PoolEntry) -> NDArray[np.float64]:
    """Return float64[G], the tokens of a prompt that each rank has."""
    if fleet.keeping is None:
        return np.zeros(len(fleet.loads))
    return np.array(fleet.keeping.of(entry).tokens, np.float64)


class Sticky:
    """Affinity alone: a turn waits for the rank with most of its prompt, whatever its load.

    A conversation begins on the rank with a free slot and the fewest tokens.
    """

    projection = None
    next_decision_ns = None
    slots_beyond_batch = 0

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        """Bind entries in order of arrival; one whose rank is full is passed over."""
        del now_ns
        assignments: list[Assignment] = []
        if not fleet.free:
            return assignments
        for entry in list(pool):
            kept = np.maximum(kept_tokens(fleet, entry), _SHARED)
            home = int(kept.argmax())
            best = kept == kept[home]
            if not fleet.free_slots[home] and np.count_nonzero(best) == 1:
                continue
            rank = lowest(fleet.loads, fleet.has_room(entry) & best)
            if rank is not None:
                pool.admit(entry.request)
                fleet.bind(rank, entry)
                assignments.append(Assignment(entry.request, RankId(rank)))
        return assignments


def sticky(inputs: PolicyInputs) -> Policy:
    """Return affinity alone."""
    del inputs
    return Sticky()


def cache_aware(inputs: PolicyInputs) -> Policy:
    """Return SMG's `cache_aware`: the longest match while queues are even, else the shortest queue.

    Source: https://github.com/lightseekorg/smg, model_gateway/src/policies/cache_aware.rs.
    """
    del inputs

    def choose(fleet: Fleet, entry: PoolEntry) -> int | None:
        queues, able = fleet.bound, fleet.allowed(entry)
        most, least = int(queues.max()), int(queues.min())
        kept = kept_tokens(fleet, entry)
        uneven = most - least > _LONGER and most > _TIMES_LONGER * least
        if uneven or kept.max() <= _MATCH * entry.prompt_tokens:
            return lowest(queues, able)
        return lowest(-kept, able)

    return OldestFirst(choose, slots_beyond_batch=None)


def overlap_and_load(inputs: PolicyInputs) -> Policy:
    """Return the rule of Dynamo's KV router with overlap: the fewest tokens to bring and to hold.

    Source: https://github.com/ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector/default.rs.
    """
    del inputs

    def choose(fleet: Fleet, entry: PoolEntry) -> int | None:
        missing = entry.prompt_tokens - kept_tokens(fleet, entry)
        return lowest(fleet.loads + missing, fleet.allowed(entry))

    return OldestFirst(choose, slots_beyond_batch=None)


TRACE = Path("traces/public/mooncake_conversation.jsonl.gz")
FIRST, LATER = "first turns", "later turns"
CACHED = (
    "--prefill-choice prefix-aware --prefix-cache 1000000000 --probe-limit none "
    "--transfer-base-ms 2 --transfer-us-per-token 1"
)


@dataclass(frozen=True)
class Table:
    """One table."""

    command: str  # What all rows have in common.
    rules: dict[str, str]  # The options of each.
    rate: float  # Of the trace, at a load of 1.
    loads: tuple[float, ...]  # Those of the table.
    requests: int  # Of the trace.
    shared_blocks: int  # Blocks that a first turn may share.
    columns: Columns  # Its figures.
    kept_tokens: int = 0  # What all ranks keep together; 0 where they pull nothing.


AFFINITY = {
    "balance alone (BR-0)": "--policy br-0",
    "affinity alone (sticky)": "--policy reproduce.turns:sticky",
    "SMG (cache-aware)": "--policy reproduce.turns:cache_aware",
    "Dynamo (overlap + load)": "--policy reproduce.turns:overlap_and_load",
    "BR-0, price 1": "--policy br-0 --prefix-affinity 1",
    "BR-H": "--policy br-h",
    "BR-H, price 1": "--policy br-h --prefix-affinity 1",
}


def of_turns(turn: str, name: str) -> Figure:
    """Return what shows a time of first or of later turns."""
    return lambda row: f"{row[turn][name]:.2f}"


def plain(name: str, digits: int, scale: float = 1.0) -> Figure:
    """Return what shows a figure alone."""
    return lambda row: f"{scale * row[name]:,.{digits}f}"


def over_base(name: str) -> Figure:
    """Return what shows a figure over that of the same policy's balance alone."""
    return lambda row: f"{row[name] / row['base'][name]:.2f}"


PREFILL_COLUMNS = (
    ("later turns TTFT s, p50", of_turns(LATER, "ttft_s_p50")),
    ("p95", of_turns(LATER, "ttft_s_p95")),
    ("first turns TTFT s, p50", of_turns(FIRST, "ttft_s_p50")),
    ("p95", of_turns(FIRST, "ttft_s_p95")),
    ("latency s, mean", plain("latency_s_mean", 2)),
    ("TPOT ms, p50 / p95", lambda row: f"{row['tpot_ms_p50']:.1f} / {row['tpot_ms_p95']:.1f}"),
    ("idle %", plain("idle_fraction", 1, 100.0)),
    ("by ranks %", lambda row: f"{100 * row['local_prefills'] / row['requests']:.0f}"),
)
AFFINITY_COLUMNS = (
    ("pulled %", plain("pulled_fraction", 1, 100.0)),
    ("x", over_base("pulled_fraction")),
    ("idle %", plain("idle_fraction", 1, 100.0)),
    ("output tokens/s", plain("output_tokens_per_s", 0)),
    (
        "change %",
        lambda row: (
            f"{100 * (row['output_tokens_per_s'] / row['base']['output_tokens_per_s'] - 1):+.2f}"
        ),
    ),
    ("later turns TTFT s, p50", of_turns(LATER, "ttft_s_p50")),
    ("p95", of_turns(LATER, "ttft_s_p95")),
    ("TPOT ms, p95", plain("tpot_ms_p95", 1)),
    ("wait s, max", plain("pool_wait_s_max", 0)),
    ("hottest rank", plain("hottest_rank", 2)),
)
RANKS_8 = f"--ranks 8 --batch 16 --prefill-servers 8 --prefill-us-per-token 5 {CACHED}"
TABLES = {
    # At the trace's own speed 4 prefillers have 1.4 times the work that they can do, cached prefixes left out.
    "prefill": Table(
        "--ranks 16 --batch 64 --step-base-ms 10 --step-us-per-token 0.02 "
        f"--prefill-servers 4 {CACHED}",
        {
            "none": "--policy br-0",
            "up to 8,192 tokens": "--policy br-0 --local-prefill-tokens 8192 "
            "--rank-prefix-cache 2000000",
            "and a price of 1": "--policy br-0 --local-prefill-tokens 8192 "
            "--rank-prefix-cache 2000000 --prefix-affinity 1",
        },
        4 / 1.40,
        (0.6, 0.8, 1.0),
        5_000,
        1,
        PREFILL_COLUMNS,
    ),
    # Balance alone makes 1,740 tokens/s of a backlog, and the trace brings 1,146.
    "mooncake": Table(
        f"{RANKS_8} --rank-prefix-cache 2000000",
        AFFINITY,
        1_740 / 1_146,
        (0.6, 0.8, 1.0, 1.2),
        6_000,
        1,
        AFFINITY_COLUMNS,
        8 * 2_000_000,
    ),
    # 1,940 tokens/s, which is what one conversation that begins each second brings.
    "conversations": Table(
        f"{RANKS_8} --rank-prefix-cache 500000",
        AFFINITY,
        1.0,
        (0.6, 0.8, 1.0, 1.2),
        6_000,
        4,
        AFFINITY_COLUMNS,
        8 * 500_000,
    ),
}


def labelled(requests: list[TraceRequest], shared_blocks: int) -> list[TraceRequest]:
    """Return the requests, with what turn each is as its tenant."""
    seen: set[int] = set()
    turns = []
    for request in requests:
        beginning = request.hash_ids[: shared_blocks + 1]
        later = len(beginning) > shared_blocks and seen.issuperset(beginning)
        seen.update(request.hash_ids)
        turns.append(replace(request, tenant=LATER if later else FIRST))
    return turns


def least_pulled(requests: Sequence[TraceRequest], cache_tokens: int | None = None) -> float:
    """Return the share of prompt tokens that no rule can spare, as no earlier prompt had them.

    As if every rank had what any of them got: with a limit, the tokens used last.
    """
    kept: dict[int, None] = {}  # The block used last is the last one.
    sent = pulled = 0
    for request in requests:
        known = 0
        for block in request.hash_ids:
            if block not in kept:
                break
            known += BLOCK_TOKENS
        sent += request.prompt_tokens
        pulled += request.prompt_tokens - min(known, request.prompt_tokens - 1)
        for block in reversed(request.hash_ids):  # Of a prompt its beginning is kept longest.
            kept.pop(block, None)
            kept[block] = None
        while cache_tokens is not None and BLOCK_TOKENS * len(kept) > cache_tokens:
            del kept[next(iter(kept))]
    return pulled / sent


def turns(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Print what it brings that a conversation's next turn returns to the rank that has its beginning.

        python scripts/reproduce turns OUT_DIR prefill [--load U] [--rule TEXT] [--requests N] [--keep]
        python scripts/reproduce turns OUT_DIR mooncake [--load U] [--rule TEXT] [--requests N] [--keep]
        python scripts/reproduce turns OUT_DIR conversations [--load U] [--rule TEXT] [--requests N] [--keep] [--seed N]

    Each row is a `balanceroute simulate` command. `prefill`: on the public Mooncake trace of conversations,
    prefillers compute all prompts, chosen by their prefix caches, or ranks compute what they lack of them
    where that delays all requests less. `mooncake`: prefillers compute all, and ranks pull what they lack, under the
    balance alone, under rules of others that follow prefixes, and with a price of the tokens that need not be
    pulled. `conversations`: the same on conversations that `turns.py` makes.

    A request is a later turn if it begins with two blocks of an earlier one; of made conversations, which share
    system prompts of four, with five.
    """
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--load", type=float, metavar="U", help="this one alone")
    parser.add_argument("--rule", default="", metavar="TEXT", help="those with it in their names")
    parser.add_argument("--requests", type=positive, metavar="N")
    parser.add_argument("--seed", type=int, default=2, help="of the conversations that are made")
    parser.add_argument("--keep", action="store_true", help="use the figures that OUT_DIR has")
    arguments = parser.parse_args(words)
    table = TABLES[arguments.table]
    count = arguments.requests or table.requests
    arguments.out.mkdir(parents=True, exist_ok=True)
    made = arguments.table == "conversations"
    read = (
        conversations(count // 4 + 20, 1.0, arguments.seed) if made else playable(read_trace(TRACE))
    )
    trace = arguments.out / f"{arguments.table}.jsonl"
    write_native(trace, labelled(read[:count], table.shared_blocks))
    rows: list[tuple[tuple[str, str], dict[str, Any]]] = []
    loads = table.loads if arguments.load is None else (arguments.load,)
    for load in loads:
        common = f"--trace {trace} --rate {round(load * table.rate, 3)} {table.command}"
        base: dict[str, Any] = {}
        for number, (rule, options) in enumerate(table.rules.items()):
            if arguments.rule not in rule:
                continue
            path = arguments.out / f"{arguments.table}_{load}_{number}.json"
            kept = arguments.keep and path.exists()
            report = (
                json.loads(path.read_bytes()) if kept else simulated(f"{common} {options}", path)
            )
            (row,) = report["results"]
            if not base or rule == "BR-H":
                base = row
            of_turn = {group["tenant"]: group for group in row["groups"]}
            rows.append(((f"{load:g}", rule), row | of_turn | {"base": base}))
    text = tabulated(("load:", "rule"), table.columns, rows)
    if table.kept_tokens:
        least = [least_pulled(read[:count], size) for size in (None, table.kept_tokens)]
        text += "\n\nNo rule pulls less than {:.1%}, or {:.1%} of ranks that keep so much.".format(
            *least
        )
    (arguments.out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    print(text)
    return 0
