"""What must hold of streams that go on elsewhere, and of engines that are not paired as they should be."""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from checks.agents import same
from checks.fleet import (
    BLOCK_TOKENS,
    CLIENT,
    GENERATE,
    MESSAGES,
    RESPONSES,
    SIDE_PORT,
    SUCCESSES,
    VLLM,
    Checks,
    Engine,
    Fleet,
    Order,
    Proxy,
    Streaming,
    ask,
    assert_equal,
    begun,
    chat,
    completion,
    essence,
    free_port,
    metric,
    restart_together,
    running,
    until,
)
from checks.packages import TOOL

Asked = tuple[str, dict[str, Any]]
_BOTH = ("--resume", "exact", "--first-token", "prefill")
# So long that all of them have begun before the first one ends, on a busy machine too.
_STREAMS, _STREAM_TOKENS = 50, 600
_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_FIRST_TOKENS, _AT_A_TIME = 200, 8
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
# Of each twenty streams of agents, those of the other APIs.
_NAMED = {4: MESSAGES, 8: RESPONSES, 14: MESSAGES, 18: RESPONSES}
# What makes random weights call two functions of their own choice.
_CALL = r'<tool_call>\n\{"name": "%s", "arguments": \{"p": "[a-z ]{80,100}"\}\}\n</tool_call>'
_TWO_CALLS = "[a-z ]{9,30}" + _CALL % "f" + "\\n" + _CALL % "g"


def _form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _kinds(number: int) -> list[tuple[str, Asked]]:
    """Return a request of each kind, and what kind it is."""
    text = f"def function_{number}(value, *others):"
    stream, drawn = _USAGE | {"max_tokens": 8}, {"temperature": 1.0}
    tool = {"tools": [TOOL | {"function": {"name": "look", "parameters": {"type": "object"}}}]}
    return [
        ("greedy", chat(text, **stream)),
        ("greedy", completion(text, **stream)),
        ("seeded", chat(text, seed=number, **stream, **drawn)),
        ("seeded", completion(text, seed=number, **stream, **drawn)),
        ("unseeded", chat(text, **stream, **drawn)),
        ("unseeded", completion(text, **stream, **drawn)),
        ("tools", chat(text, **tool, **stream)),
        ("JSON schema", chat(text, response_format=_form(_SCHEMA), **stream)),
        ("logprobs", chat(text, logprobs=True, top_logprobs=2, **stream)),
        ("logprobs", completion(text, logprobs=2, **stream)),
        ("token ids", _generate([300 + number, 400], max_tokens=8)),
    ]


def _generate(ids: list[int], **sampling: Any) -> Asked:
    """Return a greedy stream of token ids."""
    sampling = {"temperature": 0, "ignore_eos": True} | sampling
    return GENERATE, _USAGE | {"model": "tiny", "token_ids": ids, "sampling_params": sampling}


class CutChecks(Checks):
    """What becomes of streams of agents."""

    def check_streams_of_agents_outlive_a_killed_decode_engine(self) -> str:
        """Tools, schemas, penalties, messages, responses: what another engine begins again."""
        return "; ".join(self._cut(list(_of_agents(seed)), f"agents-{seed}") for seed in range(2))

    def _cut(self, asked: list[Asked], name: str) -> str:
        """Kill the decode engine that all these streams are on, and compare what comes of them."""
        rest, victim = self._fleet.decoders
        flags = (*_BOTH, "--batch", str(_STREAMS))
        try:
            with self._fleet.proxy(name, *flags) as proxy:
                proxy.order("/admin/instances/drain", role="decode", url=rest.url)
                streams = [Streaming(proxy.url, *one) for one in asked]
                until(lambda: _may_be_cut(streams), "streams", step_s=0.01)
                proxy.order("/admin/instances", role="decode", url=rest.url)
                with victim.paused():
                    bound = proxy.bound(victim)
                    victim.kill()
                for stream in streams:
                    stream.join()
                cuts = Counter(proxy.line_of(one.request_id)["resumes"] for one in streams)
        finally:
            victim.restart()
        wrong = []
        for one, stream in zip(asked, streams, strict=True):
            try:
                self._compare(*one, stream)
            except AssertionError as error:
                wrong.append(f"{one[0]}: {error}")
        assert len(wrong) <= 1, f"{len(wrong)} of {len(streams)}: {wrong}"
        assert bound > _STREAMS // 2, f"{bound} of {_STREAMS} streams on the engine that was killed"
        exact = len(streams) - len(wrong)
        return f"{exact} of {len(streams)} exact, {cuts[1]} went on elsewhere {wrong or ''}"

    def _compare(self, path: str, body: dict[str, Any], stream: Streaming) -> None:
        """Compare a stream with one engine's."""
        assert (stream.status, stream.error) == (200, None), (stream.status, stream.error)
        right = ask(self._prefiller.url, path, body)
        if path in (MESSAGES, RESPONSES):
            same(path, "\n".join(stream.lines), right, stream=True)
            named = [event["item_id"] for event in stream.events if "item_id" in event]
            items = [event["item"]["id"] for event in stream.events if "item" in event]
            assert set(named) <= set(items), f"{set(named)} are not of {set(items)}"
            assert all(count == 2 for count in Counter(items).values()), items
            return
        assert _offsets(stream.events) == _offsets(right)
        try:
            same(path, stream.events, right, stream=True)
        except AssertionError:
            # A stream of an engine that lags loses thoughts: vLLM 0.32 reads those before a `</think>` in
            # the same event as text. Its whole answer does not.
            if path != "/v1/chat/completions":
                raise
            whole = {name: body[name] for name in body.keys() - _USAGE.keys()}
            assert_equal(essence(stream.events), essence(ask(self._prefiller.url, path, whole)))


class IdChecks(CutChecks):
    """First tokens of prefillers, and streams that go on elsewhere."""

    def check_streams_with_an_early_first_token_are_one_engines(self) -> str:
        asked = [one for number in range(_FIRST_TOKENS // 10) for one in _kinds(number)]
        early: Counter[str] = Counter()
        with self._fleet.proxy("early", *_BOTH) as proxy, ThreadPoolExecutor(_AT_A_TIME) as pool:
            compared = pool.map(lambda one: self._early(proxy, one), asked)
            for (kind, _), is_early in zip(asked, compared, strict=True):
                early[kind] += is_early
        for kind, least in (("greedy", 20), ("seeded", 20), ("unseeded", 20), ("token ids", 10)):
            assert early[kind] > least, f"{kind}: {early[kind]} early first tokens"
        return f"{len(asked)} streams, early: {dict(early)}"

    def _early(self, proxy: Proxy, asked: tuple[str, Asked]) -> bool:
        """Compare the proxy's answer with one engine's; return whether its first token was early."""
        kind, (path, body) = asked
        stream = Streaming(proxy.url, path, body)
        stream.join()
        line = proxy.line_of(stream.request_id)
        seed = {} if line["seed"] is None else {"seed": line["seed"]}
        try:
            same(path, stream.events, ask(self._prefiller.url, path, body | seed), stream=True)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {path}: {body}: {error}") from None
        assert not line["first_token_differences"], line
        return bool(line["early_first_token"])

    def check_streams_outlive_a_killed_decode_engine(self) -> str:
        return self._cut(list(_to_be_cut()), "resume")


def _to_be_cut() -> Iterator[Asked]:
    """Yield greedy streams, whose prompts end at every place within a block."""
    rng = random.Random(11)
    for number in range(_STREAMS):
        values = _USAGE | {"max_tokens": _STREAM_TOKENS, "ignore_eos": True}
        ids = [rng.randrange(300, 900) for _ in range(BLOCK_TOKENS + number)]
        if number % 5 == 3:
            values["stop"] = ["never said at all", "import os", " class A"]
        if number % 10 == 2:
            asked = {"logprobs": 2} if number % 20 == 2 else {}
            yield _generate(ids, max_tokens=_STREAM_TOKENS, **asked)
        elif number % 2:
            # No candidates: of these weights' two often have the same text, and end the stream.
            values |= {"logprobs": True} if number % 5 == 4 else {}
            yield chat(" ".join(f"value_{one}" for one in ids[:number]), **values)
        else:
            values |= {"logprobs": 2} if number % 5 == 4 else {}
            yield completion(ids, **values)


def _of_agents(seed: int) -> Iterator[Asked]:
    """Yield streams of agents, so long that all of them are hit.

    None has a seed: where a prompt is computed in parts, vLLM's CPU build dies of one (`set_offset`). None has a stop
    word: what vLLM says around a `</think>` then depends on how tokens are cut into events.
    """
    rng = random.Random(seed)
    text_of = {"type": "string", "minLength": 60, "maxLength": 90}
    schema = {
        "type": "object",
        "properties": {f"p{i}": text_of for i in range(9)},
        "required": [f"p{i}" for i in range(9)],
        "additionalProperties": False,
    }
    functions = [{"name": name, "parameters": schema} for name in ("f", "g")]
    tools = {"tools": [{"type": "function", "function": one} for one in functions]}
    named = {"tool_choice": {"type": "function", "function": {"name": "g"}}}
    required, endless = {"tool_choice": "required"}, {"ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        tools | required,
        tools | named,
        tools | {"tool_choice": "auto", "structured_outputs": {"regex": _TWO_CALLS}},
        {"response_format": _form(schema)},
        {"frequency_penalty": 0.5, "presence_penalty": 0.2} | endless,
        {"bad_words": ["import", " self"], "logprobs": True} | endless,
        tools | required | {"logprobs": True, "top_logprobs": 2},
        {"echo": True} | endless,
        {"return_token_ids": True} | endless,
    ]
    for number in range(_STREAMS):
        text = " ".join(f"value_{rng.randrange(99)}" for _ in range(number + 1))
        values = _USAGE | {"max_tokens": 400}
        if number % 20 in _NAMED:
            yield _NAMED[number % 20], _named(_NAMED[number % 20], text, schema)
        elif number % 10 == 9:
            yield completion(text, **values, structured_outputs={"json": schema}, logprobs=2)
        else:
            yield chat(text, **values | kinds[number % 10])


def _named(path: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a greedy stream of named events, with a tool that is called."""
    values: dict[str, Any] = {"model": "tiny", "temperature": 0, "stream": True}
    tool: dict[str, Any] = {"name": "f", "strict": True}
    if path == MESSAGES:
        values |= {"messages": [{"role": "user", "content": text}], "max_tokens": 300}
        return values | {"tools": [tool | {"input_schema": schema}], "tool_choice": {"type": "any"}}
    values |= {"input": text, "max_output_tokens": 300, "tool_choice": "required"}
    return values | {"tools": [tool | {"type": "function", "parameters": schema}]}


def _may_be_cut(streams: list[Streaming]) -> bool:
    """Return whether all streams have begun, or the first one is far."""
    events = [len(stream.events) for stream in streams]
    return min(events) > 4 or max(events) > _STREAM_TOKENS // 2


def _offsets(events: list[dict[str, Any]]) -> list[int]:
    """Return the offsets in a completion's log-probabilities."""
    logprobs = [choice.get("logprobs") or {} for event in events for choice in event["choices"]]
    return [offset for logprob in logprobs for offset in logprob.get("text_offset", ())]


# What must hold beside an engine whose KV cache does not fit: it gets nothing, and nothing is
# lost.

_REQUESTS, _PAIRED_AT_A_TIME = 24, 8
_DTYPE = "bfloat16"
_LONG_WAIT = {"max_tokens": 400, "ignore_eos": True}
_FAILURES = "balanceroute_kv_transfer_failures_total"


class PairingChecks(Checks):
    """Engines that do not fit.

    Args:
        fleet: All its engines fit.
        order: Of one of its decode engines.
    """

    def __init__(self, fleet: Fleet, order: Order) -> None:
        super().__init__(fleet)
        self._order = order

    def check_an_engine_with_another_kv_cache_is_never_paired(self) -> str:
        with self._other(f"--kv-cache-dtype={_DTYPE}") as other:
            return self._never_paired(other, _DTYPE)

    # How it is done.

    def _never_paired(self, other: Engine, sign: str) -> str:
        """Run proxies before an engine that does not fit; `sign` is of the reason."""
        decode = [engine.url for engine in (*self._fleet.decoders, other)]
        with self._fleet.proxy(f"pairs {sign}", "--policy", "round-robin", decode=decode) as proxy:
            until(lambda: bool(_unfit(proxy).get(other.url)), "the engine is found unfit")
            reason = _unfit(proxy)[other.url]
            assert sign in reason, reason
            assert list(_unfit(proxy)) == [other.url], _unfit(proxy)
            self._served(proxy)
            assert other.metric(SUCCESSES) == 0, "it was given requests"
            failures = metric(proxy.url, _FAILURES)
            assert failures == 0, f"{failures:.0f} KV transfers failed"
        with self._fleet.proxy(f"held {sign}", decode=[other.url]) as proxy:
            until(lambda: bool(_unfit(proxy).get(other.url)), "the only rank is unfit")
            _refused(proxy, sign)
        with self._fleet.proxy(f"reverse {sign}", prefill=[other.url]) as proxy:
            until(lambda: bool(_unfit(proxy)), "the only prefiller fits no rank")
            _refused(proxy, sign)
        # Otherwise nothing was held back that needed it.
        flags = ("--no-check-pairs", "--retry-attempts", "1")
        with self._fleet.proxy(f"unchecked {sign}", *flags, decode=[other.url]) as proxy:
            _refused(proxy)
            assert metric(proxy.url, _FAILURES), "the engines took such a pair"
        return f"{_REQUESTS} requests exact without it, alone in a role it is refused; {reason}"

    @contextmanager
    def _other(self, *flags: str, **variables: str) -> Iterator[Engine]:
        environment = {**(self._order.environment or {}), SIDE_PORT: str(free_port(2))} | variables
        # Its steps are not those of the fleet's ranks.
        environment.pop("BALANCEROUTE_STEP_TRACE", None)
        flags = (*self._order.flags, *flags)
        order = replace(self._order, name="other", flags=flags, environment=environment)
        with running([order], self._fleet.folder) as (engine,):
            yield engine

    def _served(self, proxy: Proxy) -> None:
        asked = [completion(f"class Pair{number}:", stream=True) for number in range(_REQUESTS)]
        with ThreadPoolExecutor(_PAIRED_AT_A_TIME) as threads:
            ours = list(threads.map(lambda one: ask(proxy.url, *one), asked))
        for one, answer in zip(asked, ours, strict=True):
            self._same(*one, answer)


def _unfit(proxy: Proxy) -> dict[str, str]:
    """Return why engines are not paired, by URL."""
    return {row["url"]: row["unfit"] for row in proxy.instances() if "unfit" in row}


def _refused(proxy: Proxy, sign: str = "") -> None:
    """Ask for what cannot be; the answer names the reason that has `sign`."""
    path, body = completion("def refused():")
    answer = CLIENT.post(f"{proxy.url}{path}", json=body, timeout=60.0)
    assert answer.status_code >= 500, f"{answer.status_code}: {answer.text[:300]}"
    assert sign in answer.text, f"nothing of {sign}: {answer.text[:300]}"


class VersionChecks(PairingChecks):
    """An engine of the CPU build's own version beside those of another one."""

    def check_an_engine_of_another_version_is_never_paired(self) -> str:
        with self._other(PYTHONPATH="") as other:
            seen = self._never_paired(other, VLLM)
            return f"{seen}; {self._replaced(other)}"

    def _replaced(self, other: Engine) -> str:
        """Put another version in the place of the only prefiller while streams run and wait."""
        ours, decode = self._prefiller, [self._fleet.decoders[0].url]
        flags = ("--batch", "2", "--pool-limit", "2")
        before, its_own = (one.metric(SUCCESSES) for one in (ours, other))
        ended = Counter[str]()
        prompts = [[300 + number, *range(400, 460)] for number in range(_REQUESTS)]
        asked = [completion(ids, stream=True, **_LONG_WAIT) for ids in prompts]
        with self._fleet.proxy("replaced", *flags, prefill=[ours.url], decode=decode) as proxy:
            streams = [Streaming(proxy.url, *one) for one in asked]
            until(lambda: sum(bool(one.events) for one in streams) > 1, "streams", step_s=0.01)
            proxy.order("/admin/instances", role="prefill", url=other.url)
            proxy.order("/admin/instances/drain", role="prefill", url=ours.url)
            for stream in streams:
                stream.join()
            assert metric(proxy.url, _FAILURES) == 0, "KV transfers failed"
        for one, stream in zip(asked, streams, strict=True):
            ended[str(stream.status)] += 1
            if stream.status == 200:
                assert stream.error is None, stream.error
                self._same(*one, stream.events)
            else:
                assert stream.status == 503, stream.lines
                assert VLLM in "".join(stream.lines), stream.lines
        # Those that compare are its, too.
        prefills = ours.metric(SUCCESSES) - before - ended["200"]
        assert prefills <= 2 * _REQUESTS, f"{prefills:.0f} prefills of {_REQUESTS} requests"
        assert other.metric(SUCCESSES) == its_own, "the other version was given requests"
        assert ended["200"] > 1, ended
        return f"put in the place of the prefiller: {dict(ended)}"


# Data-parallel groups, which end together.

_IN_GROUPS, _GROUP_TOKENS = 20, 160
# Beyond which a client would have been left alone; a busy machine included.
_SOON_S = 30.0


class GroupChecks(Checks):
    """Two groups of two ranks, of which one rank is killed."""

    _flags = ("--resume", "exact", "--policy", "jsq", "--batch", str(_IN_GROUPS))

    def check_groups_are_what_the_ranks_tell(self) -> str:
        with self._fleet.proxy("told") as proxy:
            groups = self._groups(proxy)
        assert groups == [0, 0, 2, 2], groups
        return f"{groups}"

    def check_streams_of_a_group_go_on_in_another(self) -> str:
        """One rank is killed; vLLM ends the other."""
        dying = self._fleet.decoders[:2]
        try:
            with self._fleet.proxy("groups", *self._flags) as proxy:
                self._groups(proxy)
                streams = begun(proxy, self._asked())
                dying[1].kill()
                return self._judged(proxy, streams, exact=_IN_GROUPS)
        finally:
            restart_together(dying)

    def check_streams_wait_for_their_only_group(self) -> str:
        with self._only("return", "--group-return-s", "600") as (group, proxy, streams):
            group[0].kill()
            restart_together(group)
            return self._judged(proxy, streams, exact=_IN_GROUPS)

    def check_streams_of_the_only_group_are_ended_at_once(self) -> str:
        with self._only("at once") as (group, proxy, streams):
            group[1].kill()
            begin_s = time.monotonic()
            for stream in streams:
                stream.join()
            took_s = time.monotonic() - begin_s
            assert took_s < _SOON_S, f"the last stream ended after {took_s:.0f} s"
            return f"{self._judged(proxy, streams, exact=0)}, the last after {took_s:.1f} s"

    # How it is done.

    def _groups(self, proxy: Proxy) -> list[int]:
        """Return the group of each rank, once all are known."""

        def groups() -> list[Any]:
            return [rank["dp_group"] for rank in proxy.state()["ranks"]]

        until(lambda: None not in groups(), "groups of all ranks")
        return groups()

    @contextmanager
    def _only(
        self, name: str, *flags: str
    ) -> Iterator[tuple[Sequence[Engine], Proxy, list[Streaming]]]:
        """Run a proxy before the second group alone, with streams that have begun."""
        group = self._fleet.decoders[2:]
        decode, flags = [engine.url for engine in group], (*self._flags, *flags, "--dp-size", "2")
        with self._fleet.proxy(name, *flags, decode=decode) as proxy:
            yield group, proxy, begun(proxy, self._asked())

    def _asked(self) -> list[Asked]:
        more: dict[str, Any] = {"stream": True, "max_tokens": _GROUP_TOKENS, "ignore_eos": True}
        return [completion(f"def of_group_{n}(value, *others):", **more) for n in range(_IN_GROUPS)]

    def _judged(self, proxy: Proxy, streams: Sequence[Streaming], *, exact: int) -> str:
        """Compare each stream with what one engine says; one that broke off has to have said so."""
        right, errors, resumed = 0, Counter[str](), 0
        for (path, body), stream in zip(self._asked(), streams, strict=True):
            stream.join()
            whole = ask(self._prefiller.url, path, body)
            if stream.error is None:
                assert_equal(essence(stream.events), essence(whole))
                right += 1
            else:
                assert stream.error != "it ended without a word", stream.lines[-3:]
                errors[stream.error[:200]] += 1
                (said,) = essence(whole)[1]
                assert said["text"].startswith(stream.text), "what it had said is another answer"
            resumed += bool(proxy.line_of(stream.request_id)["resumes"])
        assert right >= exact, f"{right} of {len(streams)} exact; {dict(errors)}"
        return f"{right} of {len(streams)} exact, {resumed} went on; {dict(errors) or 'no error'}"
