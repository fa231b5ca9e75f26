"""KV cache events: every form that vLLM sent, and whatever may be lost, repeated, out of order or bad."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, Knowledge, token_hashes
from balanceroute.proxy.live.engines.kv_feed import KvEventError, KvFeed, apply

P = PrefillerId(0)
BLOCK = 4
PROMPT = list(range(100, 120))  # Five blocks.
HASHES = [bytes([number] * 32) for number in range(1, 6)]


def pack(*events: object, as_map: bool = False) -> bytes:
    batch: object = {"ts": 1.5, "events": events} if as_map else [1.5, events, 0]
    return msgspec.msgpack.encode(batch)


def stored(hashes: list[Any], before: Any, tokens: list[int], **more: object) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": before,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | more


def removed(*hashes: Any) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}
WHOLE = stored([*HASHES], None, PROMPT)


def known(blocks: EngineBlocks, tokens: list[int]) -> int:
    return blocks.leading(P, token_hashes(np.array(tokens, np.int64), BLOCK))


def fresh() -> EngineBlocks:
    blocks = EngineBlocks(BLOCK, 200)
    blocks.begin(P, Knowledge.ALL)
    return blocks


# One batch.


@pytest.mark.parametrize("as_map", [False, True])
@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("arrays", [False, True])
def test_every_form_is_read(as_map: bool, integers: bool, arrays: bool) -> None:
    hashes = [int.from_bytes(one[-8:]) for one in HASHES] if integers else [*HASHES]
    events: list[object] = [
        stored([*hashes[:3]], None, PROMPT[:12], extra_keys=[None] * 3, group_idx=0),
        stored([*hashes[3:]], hashes[2], PROMPT[12:]),
        removed(hashes[4]),
    ]
    if arrays:
        events = [list(event.values()) for event in events if isinstance(event, dict)]
    blocks = fresh()
    assert apply(pack(*events, as_map=as_map), blocks, P) is None
    assert known(blocks, PROMPT) == 4
    apply(pack(["AllBlocksCleared"] if arrays else CLEARED), blocks, P)
    assert (known(blocks, PROMPT), blocks.resets(P)) == (0, 1)


@pytest.mark.parametrize(
    "more",
    [
        {"medium": "CPU"},
        {"lora_id": 1},
        {"locality": "REMOTE"},
        {"group_idx": 1},
        {"medium": []},
        {"token_ids": PROMPT[4:]},
        {"type": "BlockMoved"},
    ],
    ids=str,
)
def test_what_is_not_in_the_engine_s_memory_or_cannot_be_told_apart_is_left_out(
    more: dict[str, object],
) -> None:
    blocks = fresh()
    assert apply(pack(WHOLE | more), blocks, P) is None
    assert blocks.blocks(P) == 0


@pytest.mark.parametrize(
    "more",
    [
        {"lora_name": "adapter"},
        {"lora_name": "adapter", "lora_id": 1},
        {"extra_keys": [["salt"], None, None, None, None]},
        {"extra_keys": [["adapter"]] * 5, "lora_name": "adapter"},
        {"extra_keys": [[["image", 0]], None, None, None, None]},
    ],
    ids=str,
)
def test_blocks_of_adapters_salts_and_images_are_others(more: dict[str, object]) -> None:
    blocks = fresh()
    apply(pack(WHOLE | more | {"session_id": "br-7-1-40"}), blocks, P)
    assert (blocks.blocks(P), known(blocks, PROMPT)) == (5, 0)
    told = blocks.texts.tokens((7,))
    assert (len(told), blocks.leading(P, told)) == (5, 5)
    # Beside those of the model itself.
    apply(pack(stored([b"a", b"b"], None, PROMPT[:8])), blocks, P)
    assert (blocks.blocks(P), known(blocks, PROMPT)) == (7, 2)


def test_an_adapter_is_the_same_however_it_is_told() -> None:
    one, other = fresh(), fresh()
    apply(pack(WHOLE | {"lora_name": "a", "session_id": "br-7-1-40"}), one, P)
    keyed = {"lora_name": "a", "extra_keys": [["a"]] * 5, "session_id": "br-7-1-40"}
    apply(pack(WHOLE | keyed), other, P)
    assert one.texts.tokens((7,)) == other.texts.tokens((7,))


def test_blocks_of_another_size_are_left_out_and_told() -> None:
    blocks = fresh()
    assert apply(pack(stored([b"a"], None, [1] * 32, block_size=32)), blocks, P) == 32
    assert blocks.blocks(P) == 0


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"[1]",
        b"\x91" * 5_000,
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode({"events": 7}),
        pack(7),
        pack([]),
        pack([7]),
        pack({"type": 7}),
        pack({"type": "BlockRemoved"}),
        pack(removed(1.5)),
        pack(removed(b"x" * 100)),
        pack(stored(["a"], None, PROMPT[:4])),
        pack(stored([1], {}, PROMPT[:4])),
        pack(stored([1], None, [1, 2, 3, -4])),
        pack(stored([1], None, [1, 2, 3, True])),
        pack(stored([1], None, [1, 2, 3, 1 << 63])),
        pack(WHOLE | {"extra_keys": [["salt"]]}),
        pack(WHOLE)[:-3],
        pack(WHOLE) + b"\x00",
    ],
    ids=range(22),
)
def test_what_is_no_batch_of_events_is_refused(payload: bytes) -> None:
    blocks = fresh()
    with pytest.raises(KvEventError):
        apply(payload, blocks, P)
    assert blocks.blocks(P) == 0


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_taken(payload: bytes) -> None:
    feed = KvFeed(EngineBlocks(BLOCK, 20), P, replays=False)
    feed.take(0, payload)
    feed.take(1, pack(CLEARED) + payload)


# The stream.


def begun(*, replays: bool) -> tuple[EngineBlocks, KvFeed]:
    """Return a feed that has had batches 0 and 1."""
    blocks = EngineBlocks(BLOCK, 200)
    feed = KvFeed(blocks, P, replays=replays)
    if replays:
        assert feed.begin_replay() == 0
        feed.end_replay(complete=True)
    assert not feed.take(0, pack(stored(HASHES[:3], None, PROMPT[:12])))
    assert not feed.take(1, pack(stored(HASHES[3:], HASHES[2], PROMPT[12:])))
    assert known(blocks, PROMPT) == 5
    assert blocks.knowledge(P) is Knowledge.ALL
    return blocks, feed


def test_a_stream_heard_from_its_start_is_known_whole() -> None:
    blocks, feed = begun(replays=False)
    assert not feed.take(2, pack(removed(HASHES[4])))
    assert known(blocks, PROMPT) == 4
    assert not feed.losses


def test_a_stream_heard_late_is_known_in_part() -> None:
    blocks = EngineBlocks(BLOCK, 200)
    feed = KvFeed(blocks, P, replays=False)
    assert not feed.take(7, pack(WHOLE))
    assert blocks.knowledge(P) is Knowledge.SOME
    assert known(blocks, PROMPT) == 5
    assert not feed.take(8, pack(CLEARED, WHOLE))
    assert blocks.knowledge(P) is Knowledge.ALL


@pytest.mark.parametrize(("number", "reason"), [(4, "gap"), (1, "repeated"), (0, "repeated")])
def test_without_replays_what_is_not_in_order_empties_the_index(number: int, reason: str) -> None:
    blocks, feed = begun(replays=False)
    other = list(range(50, 54))
    assert not feed.take(number, pack(stored([b"other"], None, other)))
    assert feed.losses == [reason]
    assert (known(blocks, PROMPT), known(blocks, other)) == (0, 1)
    # Number 0 is the first of an engine that has begun anew.
    assert blocks.knowledge(P) is (Knowledge.SOME if number else Knowledge.ALL)
    assert blocks.resets(P) == (1 if number else 2)


def test_a_batch_that_comes_twice_in_a_row_counts_once() -> None:
    blocks, feed = begun(replays=False)
    assert not feed.take(1, pack(stored(HASHES[3:], HASHES[2], PROMPT[12:])))
    assert (known(blocks, PROMPT), feed.losses) == (5, [])


def test_a_gap_is_filled_by_a_replay() -> None:
    blocks, feed = begun(replays=True)
    batches = {
        1: pack(stored(HASHES[3:], HASHES[2], PROMPT[12:])),
        2: pack(removed(HASHES[4])),
        3: pack(removed(HASHES[3])),
    }
    assert feed.take(3, batches[3])
    assert feed.begin_replay() == 1
    assert all(feed.replayed(number, payload) for number, payload in batches.items())
    feed.end_replay(complete=True)
    assert known(blocks, PROMPT) == 3
    # What waited meanwhile.
    assert not feed.take(2, batches[2])
    assert not feed.take(3, batches[3])
    assert not feed.take(4, pack(removed(HASHES[2])))
    assert (known(blocks, PROMPT), feed.losses) == (2, [])


def test_an_engine_that_has_begun_anew_is_found_by_its_last_batch() -> None:
    blocks, feed = begun(replays=True)
    other = list(range(50, 58))
    batches = [pack(stored([b"1"], None, other[:4])), pack(stored([b"2"], b"1", other[4:]))]
    assert feed.take(0, batches[0])
    assert feed.begin_replay() == 1
    assert not feed.replayed(1, batches[1])
    assert feed.begin_replay() == 0
    assert all(feed.replayed(number, payload) for number, payload in enumerate(batches))
    feed.end_replay(complete=True)
    assert (known(blocks, PROMPT), known(blocks, other)) == (0, 2)
    assert blocks.knowledge(P) is Knowledge.ALL
    assert feed.losses == ["restart"]


def test_an_engine_without_a_batch_yet_has_begun_anew() -> None:
    blocks, feed = begun(replays=True)
    feed.begin_replay()
    assert not feed.end_replay(complete=True)
    feed.begin_replay()
    assert feed.end_replay(complete=True)
    assert (known(blocks, PROMPT), feed.losses) == (0, ["restart"])
    assert not feed.take(0, pack(WHOLE))
    assert blocks.knowledge(P) is Knowledge.ALL


def test_without_an_answer_the_index_is_emptied_and_fills_again() -> None:
    blocks, feed = begun(replays=True)
    assert feed.take(9, pack(CLEARED))
    feed.begin_replay()
    feed.end_replay(complete=False)
    assert feed.losses == ["no replay"]
    assert not feed.take(10, pack(WHOLE))
    assert (known(blocks, PROMPT), blocks.knowledge(P)) == (5, Knowledge.SOME)


@pytest.mark.parametrize("replays", [False, True])
def test_a_lost_connection_empties_the_index_unless_it_can_be_verified(replays: bool) -> None:
    blocks, feed = begun(replays=replays)
    feed.interrupted()
    assert known(blocks, PROMPT) == (5 if replays else 0)


def test_a_bad_batch_empties_the_index() -> None:
    blocks, feed = begun(replays=True)
    assert not feed.take(2, b"\xc1")
    assert (known(blocks, PROMPT), feed.losses) == (0, ["malformed"])
    assert not feed.take(3, pack(WHOLE))
    assert known(blocks, PROMPT) == 5


class Engine:
    """A cache of some blocks, which publishes what changes, and begins anew at times."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.begin()

    def begin(self) -> None:
        self.seed = self.rng.randrange(1 << 62)
        self.held: dict[tuple[int, ...], None] = {}
        self.sent: list[bytes] = []

    def name(self, path: tuple[int, ...]) -> int:
        return hash((self.seed, path)) & ((1 << 64) - 1)

    def compute(self) -> tuple[int, bytes]:
        """Take a prompt; return the batch and its number."""
        steps = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 5))]
        tokens = [step for step in steps for _ in range(BLOCK)]
        paths = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        first = next((n for n, one in enumerate(paths) if one not in self.held), len(paths))
        events: list[object] = []
        if first < len(paths):
            names = [self.name(path) for path in paths[first:]]
            before = self.name(paths[first - 1]) if first else None
            events.append(stored([*names], before, tokens[first * BLOCK :]))
        for path in reversed(paths):
            self.held.pop(path, None)
            self.held[path] = None
        while len(self.held) > 10:
            oldest = next(iter(self.held))
            del self.held[oldest]
            events.append(removed(self.name(oldest)))
        self.sent.append(pack(*events))
        return len(self.sent) - 1, self.sent[-1]


def catch_up(engine: Engine, feed: KvFeed) -> None:
    for _ in range(2):
        start = feed.begin_replay()
        batches = list(enumerate(engine.sent))[start:]
        fits = all(feed.replayed(number, payload) for number, payload in batches)
        if fits and feed.end_replay(complete=True):
            return
    feed.end_replay(complete=False)


@pytest.mark.parametrize("seed", range(60))
def test_a_treacherous_stream_ends_in_what_the_engine_has(seed: int) -> None:
    rng = random.Random(seed)
    engine, blocks = Engine(rng), EngineBlocks(BLOCK, 200)
    feed = KvFeed(blocks, P, replays=True)
    waiting: list[tuple[int, bytes]] = []
    catch_up(engine, feed)
    for _ in range(rng.randint(1, 80)):
        treachery = rng.random()
        if treachery < 0.03:
            # Its connection ends with it, and there is another one.
            engine.begin()
            waiting.clear()
            feed.interrupted()
            catch_up(engine, feed)
        waiting.append(engine.compute())
        if treachery > 0.95:
            waiting.pop()
        elif treachery > 0.9:
            waiting.append(rng.choice(waiting))
        elif treachery > 0.85:
            rng.shuffle(waiting)
        elif treachery > 0.82:
            waiting.append((rng.randrange(1 << 64), rng.randbytes(8)))
        while waiting and rng.random() < 0.7:
            if feed.take(*waiting.pop(0)):
                catch_up(engine, feed)
    waiting.clear()
    catch_up(engine, feed)
    assert blocks.blocks(P) == len(engine.held)
    assert blocks.knowledge(P) is Knowledge.ALL
    for path in engine.held:
        assert known(blocks, list(path)) == len(path) // BLOCK
