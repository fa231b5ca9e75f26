"""What must hold of streams that go on elsewhere, and of engines that are not paired as they should be."""

import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from checks.agents import MESSAGES, RESPONSES, told
from checks.fleet import (
    BLOCK_TOKENS,
    CLIENT,
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
    essence,
    free_port,
    metric,
    restart_together,
    running,
    until,
)
from checks.legs import COMPLETIONS, GENERATE, chat, completion, ids_of, said_by

_BOTH = ("--resume", "exact", "--first-token", "prefill")
# So long that all of them have begun before the first one ends, on a busy machine too.
_STREAMS, _STREAM_TOKENS = 50, 600
_STREAM_MEMBERS = {"stream", "stream_options"}
_FIRST_TOKENS, _AT_A_TIME = 200, 8
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    },
}
# Whether an answer is right that goes on with the KV cache of a shorter prompt.
_EXPECTED = {
    "one id more within a block": True,
    "three ids more within a block": False,
    "one id more behind full blocks, all cached": True,
    "one id more behind full blocks, cached in part": False,
    "later, without a transfer": False,
}
# Of each twenty streams of agents, those of the other APIs.
_NAMED = {4: MESSAGES, 8: RESPONSES, 14: MESSAGES, 18: RESPONSES}
# What makes random weights call two functions of their own choice.
_CALL = r'<tool_call>\n\{"name": "%s", "arguments": \{"p": "[a-z ]{80,100}"\}\}\n</tool_call>'
_TWO_CALLS = "[a-z ]{9,30}" + _CALL % "f" + "\\n" + _CALL % "g"
_NAME = re.compile("^(chatcmpl|cmpl|generate-tokens)-")
_REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}


def _kinds(number: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return a request of each kind: its kind, path and body."""
    text = f"def function_{number}(value, *others):"
    stream = {"stream": True, "max_tokens": 8, "stream_options": {"include_usage": True}}
    drawn = stream | {"temperature": 1.0}
    return [
        ("greedy", *chat(text, **stream)),
        ("greedy", *completion(text, **stream)),
        ("seeded", *chat(text, seed=number, **drawn)),
        ("seeded", *completion(text, seed=number, **drawn)),
        ("unseeded", *chat(text, **drawn)),
        ("unseeded", *completion(text, **drawn)),
        ("tools", *chat(text, tools=[_TOOL], **stream)),
        ("JSON schema", *chat(text, response_format=_SCHEMA, **stream)),
        ("logprobs", *chat(text, logprobs=True, top_logprobs=2, **stream)),
        ("logprobs", *completion(text, logprobs=2, **stream)),
    ]


def _generate(ids: list[int], **sampling: Any) -> tuple[str, dict[str, Any]]:
    """Return a greedy stream of token ids."""
    sampling = {"temperature": 0, "ignore_eos": True} | sampling
    body = {"model": "tiny", "token_ids": ids, "sampling_params": sampling, "stream": True}
    return GENERATE, body | {"stream_options": {"include_usage": True}}


class CutChecks(Checks):
    """What becomes of streams of agents."""

    def check_streams_of_agents_outlive_a_killed_decode_engine(self) -> str:
        """Tools, schemas, penalties, messages, responses: what another engine begins again."""
        return "; ".join(self._cut(list(_of_agents(seed)), f"agents-{seed}") for seed in range(2))

    def _cut(self, asked: list[tuple[str, dict[str, Any]]], name: str) -> str:
        """Kill the decode engine that all these streams are on, and compare what comes of them."""
        rest, victim = self._fleet.decoders
        flags = (*_BOTH, "--batch", str(_STREAMS))
        with self._revived(victim), self._fleet.proxy(name, *flags) as proxy:
            proxy.order("/admin/instances/drain", role="decode", url=rest.url)
            streams = [Streaming(proxy.url, *one) for one in asked]
            until(lambda: _may_be_cut(streams), "streams", step_s=0.01)
            proxy.order("/admin/instances", role="decode", url=rest.url)
            with victim.paused():
                bound = proxy.bound(victim)
                victim.kill()
            for stream in streams:
                stream.join()
            lines = [proxy.line_of(stream.request_id) for stream in streams]
        wrong, cuts = [], Counter(line["resumes"] for line in lines)
        for (path, body), stream in zip(asked, streams, strict=True):
            try:
                assert stream.error is None, stream.error
                if path in (MESSAGES, RESPONSES):
                    self._compare_named(path, body, stream)
                    continue
                assert len(names_of(stream.events)) == 1
                right = ask(self._prefiller.url, path, body)
                if path == GENERATE:
                    assert ids_of(stream.events) == ids_of(right)
                    assert_equal(said_by(stream.events), said_by(right))
                    continue
                assert _offsets(stream.events) == _offsets(right)
                try:
                    assert_equal(essence(stream.events), essence(right))
                except AssertionError:
                    # A stream of an engine that lags loses thoughts: vLLM 0.32 reads those before a
                    # `</think>` in the same event as text. Its whole answer does not.
                    whole = {name: body[name] for name in body.keys() - _STREAM_MEMBERS}
                    right = ask(self._prefiller.url, path, whole)
                    assert_equal(essence(stream.events), essence(right))
            except AssertionError as error:
                wrong.append(f"{path}: {error}")
        assert len(wrong) <= 1, f"{len(wrong)} of {len(streams)}: {wrong}"
        assert bound > _STREAMS // 2, f"{bound} of {_STREAMS} streams on the engine that was killed"
        exact = len(streams) - len(wrong)
        return f"{exact} of {len(streams)} exact, {cuts[1]} went on elsewhere {wrong or ''}"

    def _compare_named(self, path: str, body: dict[str, Any], stream: Streaming) -> None:
        answer = CLIENT.post(f"{self._prefiller.url}{path}", json=body, timeout=120.0)
        said = told("\n".join(stream.lines), stream=True)
        assert said == told(answer.text, stream=True), f"{said} and {answer.text}"
        named = [event["item_id"] for event in stream.events if "item_id" in event]
        items = [event["item"]["id"] for event in stream.events if "item" in event]
        assert set(named) <= set(items), f"{set(named)} are not of {set(items)}"
        assert all(count == 2 for count in Counter(items).values()), items

    @contextmanager
    def _revived(self, engine: Engine) -> Iterator[None]:
        """Start an engine again that was killed meanwhile."""
        try:
            yield
        finally:
            engine.restart()


class IdChecks(CutChecks):
    """First tokens of prefillers, and streams that go on elsewhere."""

    def check_streams_with_an_early_first_token_are_one_engines(self) -> str:
        asked = [one for number in range(_FIRST_TOKENS // 10) for one in _kinds(number)]
        asked += [
            ("token ids", *_generate([300 + number, 400], max_tokens=8)) for number in range(20)
        ]
        early: Counter[str] = Counter()
        with self._fleet.proxy("early", *_BOTH) as proxy, ThreadPoolExecutor(_AT_A_TIME) as pool:
            compared = pool.map(lambda one: self._compare(proxy, *one), asked)
            for (kind, _, _), line in zip(asked, compared, strict=True):
                early[kind] += bool(line["early_first_token"])
                assert not line["first_token_differences"], line
        for kind in ("greedy", "seeded", "unseeded"):
            assert early[kind] > _FIRST_TOKENS // 10, f"{kind}: {early[kind]} early first tokens"
        assert early["token ids"] > 10, f"token ids: {early['token ids']} early first tokens"
        return f"{len(asked)} streams, early: {dict(early)}"

    def _compare(self, proxy: Proxy, kind: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Compare the proxy's answer with one engine's; return the log's line."""
        answer = ask(proxy.url, path, body)
        (name,) = names_of(answer)
        line = proxy.line_of(_NAME.sub("", name))
        if line["seed"] is not None:
            body = body | {"seed": line["seed"]}
        try:
            right = ask(self._prefiller.url, path, body)
            assert_equal(essence(answer), essence(right))
            assert path != GENERATE or ids_of(answer) == ids_of(right)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {path}: {body}: {error}") from None
        return line

    def check_streams_outlive_a_killed_decode_engine(self) -> str:
        return self._cut(list(_to_be_cut()), "resume")

    def check_less_careful_proxies_would_fail(self) -> str:
        """Walk into the traps. The last one kills the engine, and the spoilt cache with it."""
        victim = self._fleet.decoders[1]
        with self._revived(victim):
            return self._walk_into_traps(victim)

    def _walk_into_traps(self, victim: Engine) -> str:
        rng = random.Random(5)
        prompts = [[rng.randrange(300, 900) for _ in range(3 * BLOCK_TOKENS)] for _ in range(5)]
        short, fewer, cached, spoilt, deadly = prompts
        del short[-1], fewer[BLOCK_TOKENS + 5 :]
        right = [_ids(self._prefiller, ids) for ids in prompts]

        def continues(place: int, more: int = 1) -> bool:
            """Return whether a continuation with the KV cache of the prompt alone is right."""
            said = _naive(self._prefiller, victim, prompts[place], right[place][:more])
            return said == right[place][more:]

        seen = {"one id more within a block": continues(0)}
        seen["three ids more within a block"] = continues(1, 3)
        _ids(victim, [*cached, 299])
        seen["one id more behind full blocks, all cached"] = continues(2)
        _ids(victim, [*spoilt[:BLOCK_TOKENS], 299])
        seen["one id more behind full blocks, cached in part"] = continues(3)
        later = [*spoilt, 299]
        seen["later, without a transfer"] = _ids(victim, later) == _ids(self._prefiller, later)
        again = self._says_the_prompt_again(victim)
        _naive(self._prefiller, victim, deadly, right[4][:1], dies=True)
        assert seen == _EXPECTED, f"right: {seen}"
        return f"as ever: right are {seen}; a prompt is said again at {again} cuts; one more dies"

    def _says_the_prompt_again(self, engine: Engine) -> int:
        """Continue an answer behind each of its ids; return how often its prompt is said again."""
        prompt = "for letter in 'äöüß€漢字🙂🚀':"
        values = {"temperature": 1.2, "max_tokens": 60, "ignore_eos": True, "seed": 3}
        path, body = completion(prompt, return_token_ids=True, **values)
        (whole,) = ask(engine.url, path, body)["choices"]
        again = 0
        for cut in range(1, len(whole["token_ids"])):
            ids = whole["prompt_token_ids"] + whole["token_ids"][:cut]
            rest = completion(ids, max_tokens=2)
            said = ask(engine.url, *rest)["choices"][0]["text"]
            again += said.startswith(prompt)
        assert again, "no cut was within a character"
        return again


def _to_be_cut() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield greedy streams, whose prompts end at every place within a block."""
    rng = random.Random(11)
    more: dict[str, Any] = {"stream": True, "max_tokens": _STREAM_TOKENS, "ignore_eos": True}
    more["stream_options"] = {"include_usage": True}
    for number in range(_STREAMS):
        values = dict(more)
        if number % 10 == 2:
            ids = [rng.randrange(300, 900) for _ in range(BLOCK_TOKENS + number)]
            asked: dict[str, Any] = {"logprobs": 2} if number % 20 == 2 else {}
            yield _generate(ids, max_tokens=_STREAM_TOKENS, **asked)
            continue
        if number % 5 == 3:
            values["stop"] = ["never said at all", "import os", " class A"]
        if number % 2:
            text = " ".join(f"value_{rng.randrange(99)}" for _ in range(number))
            if number % 5 == 4:
                # No candidates: of these weights' two often have the same text, and end the stream.
                values["logprobs"] = True
            yield chat(text, **values)
        else:
            if number % 5 == 4:
                values["logprobs"] = 2
            length = BLOCK_TOKENS + number
            yield completion([rng.randrange(300, 900) for _ in range(length)], **values)


def _of_agents(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield streams of agents, so long that all of them are hit.

    None has a seed: where a prompt is computed in parts, vLLM's CPU build dies of one (`set_offset`). None has a stop
    word: what vLLM says around a `</think>` then depends on how tokens are cut into events.
    """
    rng = random.Random(seed)
    stream = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 400}
    text_of = {"type": "string", "minLength": 60, "maxLength": 90}
    schema = {
        "type": "object",
        "properties": {f"p{i}": text_of for i in range(9)},
        "required": [f"p{i}" for i in range(9)],
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": n, "parameters": schema}} for n in ("f", "g")
    ]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    kinds: list[dict[str, Any]] = [
        {"tools": tools, "tool_choice": "required"},
        {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"tools": tools, "tool_choice": "auto", "structured_outputs": {"regex": _TWO_CALLS}},
        {"response_format": form},
        {"frequency_penalty": 0.5, "presence_penalty": 0.2, "ignore_eos": True},
        {"bad_words": ["import", " self"], "ignore_eos": True, "logprobs": True},
        {"tools": tools, "tool_choice": "required", "logprobs": True, "top_logprobs": 2},
        {"echo": True, "ignore_eos": True},
        {"return_token_ids": True, "ignore_eos": True},
    ]
    for number in range(_STREAMS):
        text = " ".join(f"value_{rng.randrange(99)}" for _ in range(number + 1))
        if number % 20 in _NAMED:
            yield _NAMED[number % 20], _named(_NAMED[number % 20], text, schema)
        elif number % 10 == 9:
            yield completion(text, **stream, structured_outputs={"json": schema}, logprobs=2)
        else:
            yield chat(text, **stream | kinds[number % 10])


def _named(path: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a greedy stream of named events, with a tool that is called."""
    values: dict[str, Any] = {"model": "tiny", "temperature": 0, "stream": True}
    if path == MESSAGES:
        tool = {"name": "f", "input_schema": schema, "strict": True}
        values |= {"messages": [{"role": "user", "content": text}], "max_tokens": 300}
        return values | {"tools": [tool], "tool_choice": {"type": "any"}}
    tool = {"type": "function", "name": "f", "parameters": schema, "strict": True}
    values |= {"input": text, "max_output_tokens": 300}
    return values | {"tools": [tool], "tool_choice": "required"}


def _may_be_cut(streams: list[Streaming]) -> bool:
    """Return whether all streams have begun, or the first one is far."""
    events = [len(stream.events) for stream in streams]
    return min(events) > 4 or max(events) > _STREAM_TOKENS // 2


def names_of(events: list[dict[str, Any]]) -> set[str]:
    """Return the ids of a stream's answer, of which there should be one."""
    return {event.get("id") or event["request_id"] for event in events}


def _offsets(events: list[dict[str, Any]]) -> list[int]:
    """Return the offsets that a completion's log-probabilities tell."""
    logprobs = [choice.get("logprobs") or {} for event in events for choice in event["choices"]]
    return [offset for told in logprobs for offset in told.get("text_offset", ())]


def _ids(engine: Engine, prompt: list[int], tokens: int = 12) -> list[int]:
    """Return the ids of what an engine says alone."""
    path, body = completion(prompt, max_tokens=tokens, return_token_ids=True, ignore_eos=True)
    ids: list[int] = ask(engine.url, path, body)["choices"][0]["token_ids"]
    return ids


def _naive(
    prefiller: Engine, decoder: Engine, prompt: list[int], more: list[int], *, dies: bool = False
) -> list[int]:
    """Continue behind `more` with the KV cache of `prompt` alone; return the ids."""
    path, body = completion(prompt, max_tokens=1, kv_transfer_params=_REMOTE)
    params = ask(prefiller.url, path, body)["kv_transfer_params"]
    body = completion(prompt + more, max_tokens=12 - len(more), ignore_eos=True)[1]
    body |= {"return_token_ids": True, "kv_transfer_params": params}
    answer = CLIENT.post(f"{decoder.url}{COMPLETIONS}", json=body, timeout=60.0)
    if dies:
        assert answer.status_code == 500, f"{answer.status_code}: {answer.text[:300]}"
        return []
    assert answer.status_code == 200, answer.text[:300]
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


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
        before, others = (one.metric(SUCCESSES) for one in (ours, other))
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
        assert other.metric(SUCCESSES) == others, "the other version was given requests"
        assert ended["200"] > 1, ended
        return f"put in the place of the prefiller: {dict(ended)}"


# Data-parallel groups, which end together.

_IN_GROUPS, _GROUP_TOKENS = 20, 160
# Beyond which a client would have been left alone; a busy machine included.
_SOON_S = 30.0


class GroupChecks(Checks):
    """Two groups of two ranks, of which one rank is killed."""

    def check_groups_are_what_the_ranks_tell(self) -> str:
        with self._fleet.proxy("told") as proxy:
            until(lambda: None not in self._groups(proxy), "groups of all ranks")
            groups = self._groups(proxy)
        assert groups == [0, 0, 2, 2], groups
        return f"{groups}"

    def check_streams_of_a_group_go_on_in_another(self) -> str:
        """One rank is killed; vLLM ends the other."""
        dying = self._fleet.decoders[:2]
        try:
            with self._fleet.proxy("groups", *self._flags) as proxy:
                until(lambda: None not in self._groups(proxy), "groups of all ranks")
                streams = self._begun(proxy)
                dying[1].kill()
                return self._judged(proxy, streams, exact=_IN_GROUPS)
        finally:
            restart_together(dying)

    def check_streams_wait_for_their_only_group(self) -> str:
        group = self._fleet.decoders[2:]
        flags = (*self._flags, "--group-return-s", "600", "--dp-size", "2")
        with self._only(group, "return", flags) as (proxy, streams):
            group[0].kill()
            restart_together(group)
            return self._judged(proxy, streams, exact=_IN_GROUPS)

    def check_streams_of_the_only_group_are_ended_at_once(self) -> str:
        group = self._fleet.decoders[2:]
        with self._only(group, "at once", (*self._flags, "--dp-size", "2")) as (proxy, streams):
            group[1].kill()
            begin_s = time.monotonic()
            for stream in streams:
                stream.join()
            took_s = time.monotonic() - begin_s
            assert took_s < _SOON_S, f"the last stream ended after {took_s:.0f} s"
            return f"{self._judged(proxy, streams, exact=0)}, the last after {took_s:.1f} s"

    # How it is done.

    _flags = ("--resume", "exact", "--policy", "jsq", "--batch", str(_IN_GROUPS))

    def _groups(self, proxy: Proxy) -> list[int | None]:
        return [rank["dp_group"] for rank in proxy.state()["ranks"]]

    @contextmanager
    def _only(
        self, group: Sequence[Engine], name: str, flags: Sequence[str]
    ) -> Iterator[tuple[Proxy, list[Streaming]]]:
        decode = [engine.url for engine in group]
        with self._fleet.proxy(name, *flags, decode=decode) as proxy:
            yield proxy, self._begun(proxy)

    def _asked(self, number: int) -> tuple[str, dict[str, Any]]:
        text = f"def of_group_{number}(value, *others):"
        return completion(text, stream=True, max_tokens=_GROUP_TOKENS, ignore_eos=True)

    def _begun(self, proxy: Proxy) -> list[Streaming]:
        streams = [Streaming(proxy.url, *self._asked(n)) for n in range(_IN_GROUPS)]
        until(lambda: all(len(one.events) > 1 for one in streams), "streams", limit_s=120.0)
        return streams

    def _judged(self, proxy: Proxy, streams: Sequence[Streaming], *, exact: int) -> str:
        """Compare each stream with what one engine says; one that broke off has to have said so."""
        right, told, resumed = 0, Counter[str](), 0
        for number, stream in enumerate(streams):
            stream.join()
            path, body = self._asked(number)
            whole = ask(self._prefiller.url, path, body)
            if stream.error is None:
                assert_equal(essence(stream.events), essence(whole))
                right += 1
            else:
                assert stream.error != "it ended without a word", stream.lines[-3:]
                told[stream.error[:200]] += 1
                (said,) = essence(whole)[1]
                assert said["text"].startswith(stream.text), "what it had said is another answer"
            resumed += bool(proxy.line_of(stream.request_id)["resumes"])
        assert right >= exact, f"{right} of {len(streams)} exact; {dict(told)}"
        return f"{right} of {len(streams)} exact, {resumed} went on; {dict(told) or 'no error'}"
