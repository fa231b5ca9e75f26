"""Which prompts are refused, of those under which engines died."""

import itertools

import pytest

from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.openai.body import SMALL_BYTES, RequestBody
from balanceroute.proxy.live.request.shared import (
    FEW,
    KEPT_S,
    MOST_PROMPTS,
    SOON_S,
    EngineDied,
    Suspects,
)

A, B, C, D = (Target(Role.DECODE, f"http://d{i}") for i in range(4))


class Clock:
    """The loop's time, and what waits for it."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.later: list[tuple[float, object]] = []
        self.refusals = 0
        self.suspects = Suspects(lambda: self.now_s, self.call_later)
        self.suspects.on_refused = self._count

    def _count(self, death: object, count: int) -> None:
        del death
        self.refusals += count

    def call_later(self, delay_s: float, callback: object) -> None:
        self.later.append((self.now_s + delay_s, callback))

    def wait(self, seconds: float = 1.0) -> None:
        self.now_s += seconds
        due, self.later = [one for one in self.later if one[0] <= self.now_s], []
        for _, callback in due:
            callback()  # type: ignore[operator]

    def die(
        self,
        engine: Target,
        *prompts: bytes,
        sent_s: float | None = None,
        said: bool = False,
        group: Target | None = None,
    ) -> None:
        sent_s = self.now_s - 0.5 if sent_s is None else sent_s
        for prompt in prompts:
            name = prompt.decode()
            died = EngineDied(prompt, name, engine, group or engine, sent_s, self.now_s, said)
            self.suspects.died(died)

    def refused(self, *prompts: bytes) -> list[bytes]:
        return [one for one in prompts if self.suspects.refuses(one)]


def test_the_second_death_makes_a_prompt_refused_for_a_while() -> None:
    clock = Clock()
    assert not clock.suspects.prompts
    clock.die(A, b"p")
    clock.wait()
    assert (clock.suspects.deaths(b"p"), clock.refused(b"p")) == (1, [])
    clock.die(B, b"p")
    assert clock.refused(b"p") == [b"p"]  # At once, before the others on the engine are heard.
    clock.wait()
    assert (clock.refused(b"p"), clock.refusals) == ([b"p"], 1)
    clock.wait(KEPT_S - 2.0)
    assert clock.refused(b"p") == [b"p"]
    clock.wait(2.0)
    assert clock.refused(b"p") == []
    assert not clock.suspects.prompts


def test_engines_that_end_together_are_one_death() -> None:
    """A prompt of the one that was seen first went to another one before that ended, too."""
    clock = Clock()
    clock.die(A, b"p", b"q", group=A)
    clock.wait(0.6)
    clock.die(B, b"p", b"q", b"r", group=A, said=True, sent_s=clock.now_s - 0.5)
    clock.die(B, b"p", group=A)
    clock.wait()
    assert clock.refused(b"p", b"q", b"r") == []
    assert [clock.suspects.deaths(one) for one in (b"p", b"q", b"r")] == [1, 1, 0]
    # Another group is another death; and so is the same one when it is back.
    clock.die(C, b"p", group=C)
    clock.wait(20.0)
    assert clock.refused(b"p", b"q") == [b"p"]
    clock.die(B, b"q", group=A)
    clock.wait()
    assert clock.refused(b"q") == [b"q"]


def test_all_that_is_on_a_group_that_ends_in_one_moment_may_be_the_cause() -> None:
    """The connections of the rank that died of it may be seen to break after another one's."""
    clock = Clock()
    for group, first, killer in ((A, A, B), (C, C, D)):
        clock.die(first, b"q%d" % clock.now_s, group=group)
        clock.wait(0.1)
        clock.die(killer, b"p", group=group)
        clock.wait()
    assert clock.refused(b"p") == [b"p"]
    # What was sent after its group had begun to end is none.
    clock.die(B, b"late", group=A, sent_s=clock.now_s - 0.05)
    assert clock.suspects.deaths(b"late") == 0


def test_a_group_that_is_back_at_once_can_die_once_more() -> None:
    clock = Clock()
    clock.die(A, b"p", group=A)
    clock.wait(0.6)
    clock.suspects.group_returned(A)
    clock.wait(0.6)
    clock.die(B, b"p", group=A)
    clock.wait()
    assert clock.refused(b"p") == [b"p"]


class Sent:
    """A request that hears that its prompt is refused."""

    def __init__(self, heard: "list[Sent]") -> None:
        self.heard = heard

    def prompt_refused(self) -> None:
        self.heard.append(self)


def test_who_was_sent_with_a_prompt_that_is_refused_hears_of_it_once() -> None:
    clock, heard = Clock(), list[Sent]()
    early, first, second, over, other = (Sent(heard) for _ in range(5))
    clock.suspects.sends(b"p", early)  # While nobody knew of any death.
    clock.die(A, b"p", b"q")
    for one in (first, second, over):
        clock.suspects.sends(b"p", one)
    clock.suspects.sends(b"q", other)
    clock.suspects.ended(b"p", over)
    clock.wait()
    assert heard == []
    clock.die(B, b"p")
    assert heard == []
    clock.wait()
    assert heard == [first, second]
    clock.die(C, b"p")
    clock.wait()
    assert heard == [first, second]


def test_who_died_with_a_prompt_that_is_refused_is_no_suspect_any_more() -> None:
    clock = Clock()
    others = [b"%d" % i for i in range(100)]
    clock.die(A, b"p", *others)
    clock.wait()
    assert {clock.suspects.deaths(one) for one in others} == {1}
    clock.die(B, b"p", *(b"other %d" % i for i in range(100)))
    clock.wait()
    assert clock.refused(b"p", *others) == [b"p"]
    assert {clock.suspects.deaths(one) for one in others} == {0}


@pytest.mark.parametrize("others", [0, FEW - 1, FEW])
def test_what_an_explained_death_hid_is_found_with_the_next_one(others: int) -> None:
    """Two prompts that kill were on one engine, and the wrong one was taken for the cause."""
    clock = Clock()
    beside = [b"%d" % i for i in range(others)]
    clock.die(A, b"p")
    clock.wait()
    clock.die(B, b"q", b"p", *beside)
    clock.wait()
    assert clock.refused(b"p", b"q") == [b"p"]
    clock.die(C, b"q", b"new")
    assert clock.refused(b"q", b"new") == [b"q"]  # Before all on the engine are heard, too.
    for one in beside:
        clock.die(C, one)
    clock.wait()
    few = others < FEW
    assert clock.refused(b"q", b"new", *beside) == ([b"q", *beside] if few else [])
    assert clock.suspects.deaths(b"q") == (0 if few else 1)


def test_who_is_cleared_of_a_death_is_no_cause_of_one_that_another_prompt_explains() -> None:
    clock = Clock()
    clock.die(A, b"p")
    clock.wait()
    clock.die(B, b"p", b"innocent")
    clock.wait()
    clock.die(C, b"q")
    clock.wait()
    clock.die(A, b"q", b"innocent", sent_s=clock.now_s - 0.5)
    assert clock.refused(b"p", b"q") == [b"p", b"q"]
    clock.wait()
    assert clock.refused(b"p", b"q", b"innocent") == [b"p", b"q"]


@pytest.mark.parametrize("count", [FEW, FEW + 1])
def test_a_death_makes_few_prompts_refused(count: int) -> None:
    clock = Clock()
    prompts = [b"%d" % i for i in range(count)]
    clock.die(A, *prompts)
    clock.wait()
    clock.die(B, *prompts)
    clock.wait()
    assert clock.refused(*prompts) == (prompts if count == FEW else [])
    assert {clock.suspects.deaths(one) for one in prompts} == ({0} if count == FEW else {2})


def test_a_prompt_that_was_long_on_an_engine_is_not_refused() -> None:
    clock = Clock()
    clock.die(A, b"p")
    clock.wait(SOON_S + 1.0)
    clock.die(B, b"p", sent_s=clock.now_s - SOON_S - 1.0)
    clock.wait()
    assert (clock.refused(b"p"), clock.suspects.deaths(b"p")) == ([], 2)


def test_a_connection_that_is_lost_later_is_another_death() -> None:
    clock = Clock()
    clock.die(A, b"other", b"beside", sent_s=999.0)
    clock.wait()
    clock.die(B, b"other", sent_s=1_000.5)
    clock.wait()
    assert (clock.refused(b"other"), clock.suspects.deaths(b"beside")) == ([b"other"], 0)
    clock.die(B, b"p", sent_s=1_000.4)
    assert clock.suspects.deaths(b"p") == 1


def test_who_is_heard_late_of_a_death_is_judged_too() -> None:
    clock = Clock()
    clock.die(A, b"p")
    clock.wait()
    clock.die(B, b"q")
    clock.wait(0.3)
    clock.die(B, b"p", sent_s=1_000.9)
    assert clock.refused(b"p") == [b"p"]
    clock.wait()
    assert (clock.refused(b"p"), clock.refusals) == ([b"p"], 1)


def test_what_a_dead_engine_was_sent_did_not_kill_it() -> None:
    clock = Clock()
    clock.die(A, b"p", said=True)
    clock.wait(2.0)
    clock.die(A, b"late", said=True)  # Its server answers on.
    clock.die(A, b"beside", sent_s=clock.now_s - 3.0, said=True)
    assert [clock.suspects.deaths(one) for one in (b"p", b"late", b"beside")] == [1, 0, 1]
    clock.die(A, b"late")  # It was started again by then.
    assert clock.suspects.deaths(b"late") == 1


def test_one_death_counts_once() -> None:
    clock = Clock()
    for _ in range(3):
        clock.die(A, b"p", sent_s=990.0)
        clock.wait(0.01)
    assert clock.suspects.deaths(b"p") == 1


def test_no_more_prompts_are_remembered_than_may_be() -> None:
    clock = Clock()
    for i in range(MOST_PROMPTS + 10):
        clock.die(A, b"%d" % i, sent_s=990.0)
    assert len(clock.suspects.prompts) == MOST_PROMPTS
    assert clock.suspects.deaths(b"9") == 0
    assert clock.suspects.deaths(b"10") == 1


SUSPECTS = Suspects()
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "%b"}], %b"stream": true}'


def name_of(text: bytes, more: bytes = b"", endpoint: str = "/v1/chat/completions") -> bytes:
    return SUSPECTS.of(endpoint, RequestBody(BODY % (text, more)))


def test_a_prompt_is_known_whoever_asks_and_however() -> None:
    body = RequestBody(
        b'{"user": "me", "max_tokens": 7, "messages":  [{"role": "user", "content": "a"}],"model":"f"}'
    )
    assert SUSPECTS.of("/v1/chat/completions", body) == name_of(b"a")
    assert name_of(b"a", b'"temperature": 0.5, "seed": 3, "metadata": {}, "n": 2, ') == name_of(
        b"a"
    )


def of_ids(ids: str, sampling: str) -> bytes:
    body = b'{"model": "m", "token_ids": [%b], "sampling_params": %b, "request_id": "r%b"}'
    told = ids.encode(), sampling.encode(), sampling.encode().hex().encode()
    return SUSPECTS.of("/inference/v1/generate", RequestBody(body % told))


def test_a_prompt_of_ids_is_known_however_its_tokens_are_drawn() -> None:
    known = of_ids("1, 2", "{}")
    assert of_ids("1, 2", '{"seed": 3, "max_tokens":9,"n": 2, "temperature": 0.5}') == known
    kept = of_ids("1, 2", '{"min_tokens": 3, "stop": ["a"]}')
    assert of_ids("1, 2", '{"seed": 4, "stop":["a"], "min_tokens":3}') == kept
    others = [of_ids("1, 3", "{}"), of_ids("1, 2", "null"), of_ids("1, 2", '"{}"')]
    assert len({known, kept, *others}) == 5


def test_all_that_is_computed_tells_prompts_apart() -> None:
    system = b"s" * 10_000
    large = b"x" * (2 * SMALL_BYTES)
    names = [
        name_of(b"a"),
        name_of(b"b"),
        name_of(system + b"a"),
        name_of(system + b"b"),
        name_of(large + b"a"),
        name_of(large + b"b"),
        name_of(b"a", b'"logit_bias": {"5": 1}, '),
        name_of(b"a", b'"tools": [], '),
        name_of(b"a", b'"unknown": 1, '),
        name_of(b"a", endpoint="/v1/responses"),
        Suspects().of("/v1/chat/completions", RequestBody(BODY % (b"a", b""))),
    ]
    assert all(one != two for one, two in itertools.combinations(names, 2))


def test_a_form_is_known_under_any_boundary() -> None:
    suspects = SUSPECTS
    first, second = (b"--%b\r\n\r\nsound\r\n--%b--" % (one, one) for one in (b"b1", b"b2"))
    assert suspects.of_bytes("/a", first, b"b1") == suspects.of_bytes("/a", second, b"b2")
    assert suspects.of_bytes("/a", first, b"b1") != suspects.of_bytes("/b", first, b"b1")
    assert suspects.of_bytes("/a", first) != suspects.of_bytes("/a", second)
