"""`balanceroute doctor`: look at engines, send a request through each pair, and print the `serve` line that fits.

After the engines' pages, each pair computes one short prompt as the proxy would have it: the decode engine's own
counters tell whether it pulled the KV cache or computed the prompt again.

A leg of the wrong role ends an engine with vLLM's Mooncake by an assertion (mooncake_connector.py of vLLM 0.32).
So where the pages do not tell the roles, requests are sent with NIXL alone, whose engines may do both.
"""

import argparse
import asyncio
import json
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from balanceroute.proxy.cli.running_engines import (
    CONNECTOR_OF_CLASS,
    MAX_ANSWER_BYTES,
    PAGE_S,
    EngineLook,
    fault_of,
    judge_pairs,
    look_at_all,
    reported_connectors,
    reported_slots,
    several,
)
from balanceroute.proxy.core.errors import ConfigError, shown
from balanceroute.proxy.core.setting import file, flag, number, settings_of, switch, texts
from balanceroute.proxy.core.setting import text as word
from balanceroute.proxy.live.connectors import (
    METASERVER_PATH,
    MissingKvError,
    make_connector,
)
from balanceroute.proxy.live.engines.engine_facts import doubts, misfits
from balanceroute.proxy.live.engines.engine_gauges import MAX_PAGE_BYTES, MetricsPageError, kv_signs
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.security import Secret, engine_context
from balanceroute.proxy.live.settings.checks import own_address
from balanceroute.proxy.live.settings.configure import engine_key_of
from balanceroute.proxy.live.settings.declared import EngineSettings
from balanceroute.proxy.live.settings.engines import BOOTSTRAP_PORT
from balanceroute.proxy.live.settings.scheduling import SchedulingSettings
from balanceroute.proxy.page_client import PageClient, UnansweredError
from balanceroute.proxy.settings import add_flags, read_flags
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.messages import HttpRequest, Reply, ServerLimits, bracketed
from balanceroute.topologies import CONNECTORS, KvFlow

T = TypeVar("T")
PREFILL, DECODE = Role.PREFILL.value, Role.DECODE.value
_MOST_ENGINES, _MOST_PAIRS, _MOST_LINE = 512, 64, 600
_AT_ONCE = 16
# How long an engine may take to show a request that has ended in its counters.
_LOOKS, _LOOK_S = 8, 0.25


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault, its place, and its cure."""

    where: str
    what: str
    cure: str

    def __str__(self) -> str:
        return f"error: {self.where}: {self.what}: {self.cure}"


@dataclass(slots=True)
class PairTrial:
    prefill: str
    decode: str
    connector: str
    pulled: bool | None = None  # None if the decode engine's counters do not show it.
    said: str = ""  # In words.
    fault: str = ""  # Why it failed; empty if it did not.
    cure: str = ""
    left: str = ""  # The KV cache left behind, in words.

    def __str__(self) -> str:
        return f"{self.prefill} -> {self.decode}: {self.fault or self.said}"


@dataclass(slots=True)
class Report:
    looks: list[EngineLook]
    connector: str = ""  # That of the engines; empty if it is not known.
    trials: list[PairTrial] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)  # The command that fits; empty for none.

    def blame(self, where: str, what: str, cure: str) -> None:
        """Add a trouble, once."""
        trouble = Trouble(where, what, cure)
        if trouble not in self.troubles:
            self.troubles.append(trouble)

    def of(self, role: str) -> list[EngineLook]:
        return [look for look in self.looks if look.role == role and not look.seen.fault]

    def json(self) -> str:
        value = {
            "healthy": not self.troubles,
            "engines": [look.row() for look in self.looks],
            "pairs": [asdict(one) for one in self.trials],
            "findings": [asdict(one) for one in self.troubles],
            "notes": self.notes,
            "serve": self.words or None,
        }
        return json.dumps(value, indent=2)

    def text(self) -> str:
        """Return all of it for people. Words of engines cannot control a terminal, and are cut."""
        notes = (f"note: {one}" for one in self.notes)
        found = (*(look.line() for look in self.looks), *self.trials, *notes, *self.troubles)
        lines = [
            "".join(sign if sign.isprintable() else "?" for sign in str(one)[:_MOST_LINE])
            for one in found
        ]
        if self.words:
            lines.append(shlex.join(self.words))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    prefill: tuple[EngineUrl, ...] = texts(
        "those that are prefillers, where they do not tell", own_address, metavar="URL"
    )
    decode: tuple[EngineUrl, ...] = texts(
        "those that are decode engines, where they do not tell", own_address, metavar="URL"
    )
    bootstrap: tuple[EngineUrl, ...] = texts(
        "with mooncake, each prefiller's bootstrap server, in the order of --prefill",
        own_address,
        metavar="URL",
        shown_default="port 8998 of its host",
    )
    connector: str = word("", "the KV connector, where they do not tell", metavar="NAME")
    engine_key_file: Path | None = file(
        "holds the key to send to the engines; else BALANCEROUTE_ENGINE_KEY is the key"
    )
    engine_ca_file: Path | None = file("certificates to trust from https engines")
    requests: bool = switch(True, "send a short request through each pair")
    request_timeout_s: float = number(
        30.0, "for the answer to such a request", 0.1, 600, metavar="S"
    )
    json: bool = flag("print all of it as JSON")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="look at engines, try each pair, and print the serve line that fits",
        usage="%(prog)s URL [URL ...] [option ...]",
        description="Look at engines, send one short request through each pair of prefill and decode, say what "
        "is wrong and what cures it, and print the `balanceroute serve` line that fits.",
        epilog="The status is 0 if nothing is wrong, 1 if something is, 2 if nothing could be looked at.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "url", nargs="*", metavar="URL", help="an engine, as http://HOST:PORT or HOST:PORT"
    )
    add_flags(parser, DoctorSettings)


def run(arguments: argparse.Namespace) -> int:
    flags = read_flags(arguments, DoctorSettings)
    given, key = flags.read(DoctorSettings), engine_key_of(flags, os.environ)
    urls = [_address(one) for one in arguments.url]
    stated = [*given.prefill, *given.decode]
    if both := set(given.prefill) & set(given.decode):
        raise ConfigError(f"--decode: {min(both)} is named by --prefill too")
    if given.connector and given.connector not in CONNECTORS:
        raise ConfigError(f"--connector is {given.connector!r}, must be of {', '.join(CONNECTORS)}")
    if given.bootstrap and len(given.bootstrap) != len(given.prefill):
        counts = f"{len(given.bootstrap)} for {len(given.prefill)} of --prefill"
        raise ConfigError(f"--bootstrap: {counts}, must be one for each")
    every = [*urls, *(url for url in stated if url not in urls)]
    if not 1 <= len(every) <= _MOST_ENGINES:
        reason = f"{len(every)} engines are named, must be from 1 to {_MOST_ENGINES}"
        raise ConfigError(f"URL: {reason}, as HOST:PORT ..")
    report = asyncio.run(diagnose(every, given, key))
    sys.stdout.write(f"{report.json() if given.json else report.text()}\n")
    return int(bool(report.troubles))


def _address(text: str) -> EngineUrl:
    try:
        return own_address(text if "://" in text else f"http://{text}")
    except ConfigError as error:
        raise ConfigError(f"URL {error}") from None


async def diagnose(
    urls: Sequence[EngineUrl], given: DoctorSettings, key: Secret | None = None
) -> Report:
    """Look at engines, with the key that they want, and try their pairs.

    Raises:
        ConfigError: The certificates cannot be used.
    """
    try:
        tls = engine_context(given.engine_ca_file, insecure=False)
    except ConfigError as error:
        raise ConfigError(f"--engine-ca-file {error}") from None
    bearer = None if key is None else key.value
    client = PageClient(tls, timeout_s=PAGE_S, bearer=bearer, ca_setting="--engine-ca-file")
    async with client as pages:
        looks = await look_at_all(
            pages, dict.fromkeys(urls), dict(zip(given.prefill, given.bootstrap, strict=False))
        )
        report = Report(looks)
        for url in {one for one in urls if urls.count(one) > 1}:
            report.blame(url.base, "is named twice", "name it once")
        await _blame_same(report)
        for look in looks:
            if look.seen.fault:
                report.blame(look.name, *fault_of(look.seen.fault))
        assign_roles(report, given)
        report.connector = given.connector or connector_of(report)
        _judge(report)
        if given.requests:
            await _try_pairs(pages, report, given)
    _advise(report, given)
    return report


async def _blame_same(report: Report) -> None:
    """Find engines that are named twice in other words: by another name of the same address."""
    loop = asyncio.get_running_loop()
    places: dict[object, EngineLook] = {}
    for look in report.looks:
        if look.seen.fault:
            continue
        try:
            async with asyncio.timeout(PAGE_S):
                found = await loop.getaddrinfo(
                    look.url.host, look.url.port, type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError):
            continue
        first = places.setdefault(found[0][4][:2], look)
        if first is not look:
            report.blame(look.name, f"is the same engine as {first.name}", "name it once")


def assign_roles(report: Report, given: DoctorSettings) -> None:
    """Set the engines' roles: by flags, configuration, bootstrap servers, counters, and order."""
    open_ones: list[EngineLook] = []
    servers = [one.identity.bootstrap_address for one in report.looks if one.identity is not None]
    for look in report.looks:
        look.role, look.by = _role_of(look, given, servers)
        if not (look.role or look.seen.fault):
            open_ones.append(look)
    taken = {look.role for look in report.looks}
    for place, look in enumerate(open_ones if len(report.looks) > 1 else ()):
        feeds = PREFILL not in taken and (place == 0 or DECODE in taken)
        look.role, look.by = PREFILL if feeds else DECODE, "order"


def _role_of(look: EngineLook, given: DoctorSettings, servers: Sequence[str]) -> tuple[str, str]:
    """Return an engine's role and how it is known; nothing if it is not."""
    signs, identity = look.seen.signs, look.identity
    if look.url in given.prefill or look.url in given.decode:
        return PREFILL if look.url in given.prefill else DECODE, "flag"
    if look.kv_role in ("kv_producer", "kv_consumer"):
        return PREFILL if look.kv_role == "kv_producer" else DECODE, "configuration"
    # Of several engines on a host any may be the one behind it.
    if identity is not None and servers.count(identity.bootstrap_address) == 1:
        return PREFILL, "bootstrap server"
    if signs.pulls or signs.pulled:
        return DECODE, "counters"
    if signs.ended and signs.output == signs.ended:
        return PREFILL, "counters"
    return "", ""


def connector_of(report: Report) -> str:
    """Return the connector that the engines report; empty for none, or if they contradict each other."""
    found = reported_connectors(report.looks)
    if len(found) > 1:
        what = f"have several connectors: {several(found)}"
        report.blame("the engines", what, "start all with one")
        return ""
    return next(iter(found), "")


def _judge(report: Report) -> None:
    """Blame engines and pairs for faults that their pages show."""
    for look in report.looks:
        if not look.seen.fault:
            _judge_engine(report, look)
    for role in (PREFILL, DECODE):
        if not report.of(role) and not all(look.seen.fault for look in report.looks):
            cure = f"name one, by --{role} URL if it does not tell"
            report.blame("the engines", f"no {role} engine is among them", cure)
    roles = report.of(PREFILL), report.of(DECODE)
    for finding in judge_pairs(report.connector, *([one.seen for one in role] for role in roles)):
        if finding.level == "error":
            report.blame(finding.key, finding.reason, "start both alike")
        else:
            report.notes.append(f"{finding.key}: {finding.reason}")
    for prefill, decode in product(*roles):
        if not set(prefill.models()) & set(decode.models()):
            names = " and ".join(", ".join(one.models()) for one in (prefill, decode))
            where = f"{prefill.name} and {decode.name}"
            report.blame(where, f"serve other models: {names}", "start both with one model")
    slots = reported_slots(report.of(DECODE))
    if len(slots) > 1:
        what = f"have several max_num_seqs: {several(slots)}"
        report.blame("the decode engines", what, "start all with one --max-num-seqs")


def _judge_engine(report: Report, look: EngineLook) -> None:
    if look.foreign:
        cure = f"start it with --kv-transfer-config and one of {', '.join(CONNECTOR_OF_CLASS)}"
        report.blame(look.name, f"runs {look.foreign}: no connector that this proxy serves", cure)
    if not look.models():
        report.blame(look.name, "serves no model", "its log tells why")
    role, seen = Role(look.role or PREFILL), look.seen
    facts = seen.version, seen.models, seen.signs
    for doubt in doubts(role, report.connector, *facts, wanted=(), ranks=()):
        if doubt.endswith("?"):
            report.notes.append(f"{look.name}: {doubt}")
        else:
            cure = "start it with --kv-transfer-config, as docs/engines.md shows"
            report.blame(look.name, doubt, cure)


async def _try_pairs(pages: PageClient, report: Report, given: DoctorSettings) -> None:
    """Send a request through the pairs, or through so many that each engine is in one."""
    # One of another connector may end at a request that its own proxy would have sent otherwise.
    prefillers, decoders = (
        [look for look in report.of(role) if not look.foreign] for role in (PREFILL, DECODE)
    )
    if not (prefillers and decoders):
        return
    if report.connector != "nixl" and any(one.by == "order" for one in prefillers + decoders):
        cure = "say --prefill and --decode: a request in the wrong role may end an engine"
        report.blame("the engines", "do not tell their roles", cure)
        return
    pairs = [(one, other) for one in prefillers for other in decoders]
    if len(pairs) > _MOST_PAIRS:
        count = min(max(len(prefillers), len(decoders)), _MOST_PAIRS)
        report.notes.append(f"{count} of {len(pairs)} pairs were tried")
        pairs = [
            (prefillers[i % len(prefillers)], decoders[i % len(decoders)]) for i in range(count)
        ]
    report.trials = await _try_each(pages, report, pairs, given)
    left = [trial.left for trial in report.trials]
    guessed = {look.name for look in prefillers + decoders if look.by == "order"}
    if guessed and all(trial.fault for trial in report.trials):
        swapped = [(other, one) for one, other in pairs]
        trials = await _try_each(pages, report, swapped, given)
        left += [trial.left for trial in trials]
        if not any(trial.fault for trial in trials):
            for look in prefillers + decoders:
                look.role = PREFILL if look.role == DECODE else DECODE
            report.trials = trials
    report.notes += dict.fromkeys(filter(None, left))
    if guessed:
        report.notes.append(
            f"{', '.join(sorted(guessed))}: the roles are taken by their order: these engines may do both"
        )
    for trial in report.trials:
        if trial.fault:
            report.blame(f"{trial.prefill} -> {trial.decode}", trial.fault, trial.cure)
    found = {trial.connector for trial in report.trials if trial.connector and not trial.fault}
    if not report.connector and len(found) == 1:
        report.connector = found.pop()


async def _try_each(
    pages: PageClient,
    report: Report,
    pairs: Sequence[tuple[EngineLook, EngineLook]],
    given: DoctorSettings,
) -> list[PairTrial]:
    """Try pairs: those of one decode engine in turn, as its counters cover all of them."""
    turns = asyncio.Semaphore(_AT_ONCE)
    own = {decode.name: asyncio.Lock() for _, decode in pairs}
    same = pages, report.connector, given.request_timeout_s, [other for _, other in pairs]

    async def one(prefill: EngineLook, decode: EngineLook) -> PairTrial:
        async with own[decode.name], turns:
            return await _to_its_end(_Attempt(*same, prefill, decode).run())

    return [*await asyncio.gather(*(one(*pair) for pair in pairs))]


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait for work, and where that is cancelled too: no KV cache is left without its pull."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


class _LegError(Exception):
    """A leg that failed: the fault, and its cure."""


@dataclass(slots=True)
class _Attempt:
    """Sends a short request through a pair, as the proxy would."""

    pages: PageClient
    connector: str  # Empty if unknown, but one of those whose prefill answers identify it.
    timeout_s: float  # For one leg.
    decoders: Sequence[EngineLook]  # Any of them may pull in place of one that failed.
    prefill: EngineLook
    decode: EngineLook
    trial: PairTrial = field(init=False)
    body: Mapping[str, object] = field(init=False)  # Without what makes it a leg.
    before: float | None = None  # The decode engine's counters before.

    async def run(self) -> PairTrial:
        prefill, decode = self.prefill, self.decode
        trial = self.trial = PairTrial(prefill.name, decode.name, self.connector)
        models = [name for name in prefill.models() if name in decode.models()]
        facts = prefill.seen.facts, decode.seen.facts
        if not models or any(one.refused for one in misfits(self.connector, *facts)):
            trial.said = "not tried: they do not fit"
            return trial
        self.body = {"model": models[0], "prompt": _prompt(prefill, decode), "temperature": 0.0}
        first = self.connector and CONNECTORS[self.connector].flow is KvFlow.DECODE_FIRST
        began_s = time.perf_counter()
        try:
            self.before = await self._brought(decode)
            tokens = await (self._decode_first() if first else self._prefill_first())
        except _LegError as error:
            trial.fault, trial.cure = error.args
            return trial
        if trial.pulled is None:
            trial.said = "answered; the decode engine's counters do not tell whether it pulled"
        elif trial.pulled:
            taken_s = time.perf_counter() - began_s
            trial.said = (
                f"pulled the KV cache of {tokens} tokens ({trial.connector}), {taken_s:.2f} s"
            )
        else:
            trial.fault = f"the decode engine computed the prompt of {tokens} tokens again"
            trial.cure = "both need --kv-transfer-config of one connector: their logs tell"
        return trial

    async def _prefill_first(self) -> int:
        """Send the prefill leg, then the decode leg; return the prompt's tokens."""
        prefill, decode, trial = self.prefill, self.decode, self.trial
        connector, transfer = make_connector(self.connector or "nixl"), secrets.token_hex(16)
        if connector.facts.flow is KvFlow.NAMED and prefill.identity is None:
            raise _LegError(
                f"no bootstrap server answers for {prefill.name}",
                "say --prefill and --bootstrap, and start it with VLLM_MOONCAKE_BOOTSTRAP_PORT",
            )
        params = json.loads(connector.prefill_params(transfer))
        # Without a name for the transfer, vLLM's Mooncake would do nothing; other connectors ignore it.
        params["transfer_id"] = transfer
        answer = await self._leg(prefill, params, 1)
        tokens, returned = _prompt_tokens(answer), answer.get("kv_transfer_params")
        trial.connector = trial.connector or _connector_of_answer(returned)
        try:
            params = connector.decode_params(transfer, returned, prefill.identity)
        except MissingKvError as error:
            cure = "start the prefiller with --kv-transfer-config, kv_role kv_producer or kv_both"
            raise _LegError(str(error), f"{cure}, or say --connector") from None
        try:
            await self._leg(decode, params, 2)
            trial.pulled = await self._has_pulled(decode, self.before, tokens)
        except _LegError:
            trial.left = await self._release(params, tokens)
            raise
        if trial.pulled is False:
            trial.left = await self._release(params, tokens)
        return tokens

    async def _decode_first(self) -> int:
        """Send the decode leg, and the prefill leg when the rank calls for it; return the prompt's tokens."""
        transfer = secrets.token_hex(16)
        called: asyncio.Future[Mapping[str, object]] = asyncio.get_running_loop().create_future()

        def take(request: HttpRequest, reply: Reply) -> None:
            try:
                params = json.loads(request.body)
            except (ValueError, RecursionError):
                params = None
            mine = request.path == METASERVER_PATH + transfer.encode()
            good = mine and isinstance(params, dict)
            reply.send(200 if good else 404, [(b"content-type", b"application/json")], b"{}")
            if good and not called.done():
                called.set_result(params)

        server = Server(take, limits=ServerLimits())
        host = _own_address(self.decode.url)
        await server.start(host, 0)
        try:
            callback = f"http://{bracketed(host)}:{server.port}"
            connector = make_connector(self.connector, callback=callback)
            params = connector.decode_params(transfer, None, None)
            waiting = asyncio.ensure_future(self._leg(self.decode, params, 2))
            first: set[asyncio.Future[Any]] = {waiting, called}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if called.done():
                try:
                    await self._leg(self.prefill, called.result(), 1)
                except _LegError:
                    waiting.cancel()
                    raise
            answer = await waiting
        finally:
            server.close()
        tokens = _prompt_tokens(answer)
        self.trial.pulled = await self._has_pulled(self.decode, self.before, tokens)
        return tokens

    async def _leg(
        self, look: EngineLook, params: Mapping[str, object], tokens: int
    ) -> dict[str, Any]:
        """Send one leg; return its answer. Raises _LegError: it failed."""
        limits = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "stream": False}
        whole = {**self.body, **limits, "kv_transfer_params": params}
        try:
            answer = await self.pages.ask(
                "POST",
                f"{look.name}/v1/completions",
                json=whole,
                timeout_s=self.timeout_s,
                max_bytes=MAX_ANSWER_BYTES,
            )
            reply = answer.json()
        except UnansweredError as error:
            raise _LegError(f"{look.name}: {error}", fault_of(str(error))[1]) from None
        except ValueError:
            raise _LegError(f"{look.name} answered no JSON", "its log tells why") from None
        if answer.status != 200 or not isinstance(reply, dict):
            reason = shown(_message(reply))
            cure = fault_of(f"status {answer.status}")[1]
            raise _LegError(f"{look.name}: status {answer.status}: {reason}", cure)
        return reply

    async def _release(self, params: Mapping[str, object], tokens: int) -> str:
        """Have another engine pull a KV cache that one did not; return what is left behind, in words."""
        for other in self.decoders:
            if other is self.decode or self.body["model"] not in other.models():
                continue
            try:
                before = await self._brought(other)
                await self._leg(other, params, 1)
                if await self._has_pulled(other, before, tokens):
                    return ""
            except _LegError:
                pass
            break
        lease_s = self.prefill.lease_s or CONNECTORS[self.connector or "nixl"].lease_s
        until = "" if lease_s is None else f", by default {lease_s:g} s"
        return (
            f"{self.prefill.name} keeps a KV cache of {tokens} tokens until its lease ends{until}"
        )

    async def _brought(self, look: EngineLook) -> float | None:
        """Return how many tokens an engine has pulled. Raises _LegError: it does not answer."""
        try:
            page = await self.pages.page(f"{look.name}/metrics", max_bytes=MAX_PAGE_BYTES)
            return kv_signs(page).brought
        except (UnansweredError, MetricsPageError) as error:
            raise _LegError(f"{look.name}/metrics: {error}", "its log tells why") from None

    async def _has_pulled(self, look: EngineLook, before: float | None, tokens: int) -> bool | None:
        """Return whether an engine has pulled a prompt since; None if its counters do not show it."""
        if before is None:
            return None
        # A count of pulls grows by one, one of tokens by all but those of the prompt's last block.
        least = 1 if look.seen.signs.pulled is None else max(1, tokens // 2)
        for _ in range(_LOOKS):
            if ((await self._brought(look)) or 0.0) - before >= least:
                return True
            await asyncio.sleep(_LOOK_S)
        return False


def _prompt(prefill: EngineLook, decode: EngineLook) -> str:
    """Return a prompt of some blocks that no prefix cache has."""
    sizes = [size for one in (prefill, decode) for size in one.seen.facts.block_tokens]
    longest = [model.max_model_len or 0 for one in (prefill, decode) for model in one.seen.models]
    count = min(2 * max(sizes, default=16), max(min(longest, default=0) // 8, 16), 2048)
    return " ".join(secrets.token_hex(2) for _ in range(count))


def _prompt_tokens(answer: Mapping[str, Any]) -> int:
    usage = answer.get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return tokens if type(tokens) is int and tokens > 0 else 0


def _connector_of_answer(returned: object) -> str:
    """Return the connector that writes such parameters into a prefill answer; empty if none does."""
    if not isinstance(returned, dict):
        return ""
    if "last_token_id" not in returned:
        return "nixl"
    return "mooncake-ascend" if "remote_block_size" in returned else "mooncake-hybrid"


def _message(answer: object) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    said = error.get("message") if isinstance(error, dict) else error
    return str(said)[:200]


def _own_address(url: EngineUrl) -> str:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            url.host, url.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(place)
            return str(way.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _advise(report: Report, given: DoctorSettings) -> None:
    """Find the command that serves these engines, without flags for defaults."""
    prefillers, decoders = report.of(PREFILL), report.of(DECODE)
    if not (prefillers and decoders):
        return
    if not report.connector:
        report.notes.append("the connector is not known: say it by --connector")
        return
    words = ["balanceroute", "serve"]
    if report.connector != _default(EngineSettings, "connector"):
        words += ["--connector", report.connector]
    slots = reported_slots(decoders)
    if not slots:
        report.notes.append("max_num_seqs is not told: add --batch with that of the decode engines")
    elif min(slots) != _default(SchedulingSettings, "batch"):
        words += ["--batch", str(min(slots))]
    leases = [look.lease_s for look in prefillers if look.lease_s is not None]
    if leases and min(leases) != CONNECTORS[report.connector].lease_s:
        words += ["--lease-s", f"{min(leases):g}"]
    words += ["--prefill", *(look.name for look in prefillers)]
    servers = [look.identity.bootstrap_address for look in prefillers if look.identity is not None]
    usual = [EngineUrl("http", look.url.host, BOOTSTRAP_PORT).base for look in prefillers]
    if CONNECTORS[report.connector].flow is KvFlow.NAMED and servers != usual:
        words += ["--bootstrap", *servers]
    # Requests name the ranks of a server from 0 on, whatever its metrics call them.
    several = ((look.name, "@discover" if len(look.ranks) > 1 else "") for look in decoders)
    words += ["--decode", *(f"{name}{ranks}" for name, ranks in several)]
    for name, path in (("key", given.engine_key_file), ("ca", given.engine_ca_file)):
        if path is not None:
            words += [f"--engine-{name}-file", str(path)]
    report.words = words


def _default(section: type, name: str) -> object:
    return next(one.default for one in settings_of(section) if one.name == name)
