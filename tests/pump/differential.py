"""Feeds the same bytes to the readers in Python and to the native parser, and compares all that comes of them.

    python -m tests.pump.differential --cases 200000

A case is a stream of an engine, as vLLM writes it or spoiled, cut into segments at random. One client gets
it by way of Python alone. For the other the parser takes what it takes whenever the stream may be lent, and
Python reads the rest. Both must have the same bytes, counts, ids and texts, and hear the same of its end.
"""

import argparse
import ctypes
import json
import random
import re
import sys
import traceback
from collections import Counter
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any, cast

from tests.live.stream_client import Client, counts

from balanceroute.proxy.live.openai.completion_stream import TokenStream
from balanceroute.proxy.live.openai.named_events import NamedEventStream
from balanceroute.proxy.live.openai.token_counts import TokenCounts
from balanceroute.proxy.live.openai.token_ids import GeneratedIds, TokenIds
from balanceroute.proxy.wire.http1.chunked import ChunkedDecoder
from balanceroute.proxy.wire.http1.client_connection import Call, ClientConnection
from balanceroute.proxy.wire.http1.pump import (
    _CHUNKED,
    _NEW,
    Passed,
    _Bytes,
    _Returned,
    _Stream,
    load_library,
)
from balanceroute.proxy.wire.messages import Headers, MalformedError
from balanceroute.proxy.wire.turn_writes import WriteTurn

_DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
TRANSCRIPTS = Path(__file__).parents[1] / "live" / "transcripts"


class _Parsed(Structure):
    _fields_ = (
        *((name, c_uint32) for name in ("reason", "events", "uncounted", "tokens")),
        ("client", _Bytes),
    )


def load() -> ctypes.CDLL:
    """Return the library, with the functions of the parser alone."""
    library = load_library()
    for name, result, *arguments in (
        ("br_parser_new", c_void_p, POINTER(_Stream)),
        ("br_parser_feed", c_int32, c_void_p, c_char_p, c_size_t, POINTER(_Parsed)),
        ("br_parser_end", c_int32, c_void_p, POINTER(_Returned)),
        ("br_parser_free", None, c_void_p),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


# The two ways.


class _EagerCounts(TokenCounts):
    """Reads each count at once: of a count that falls nobody could tell which was looked at."""

    def take_line(self, event: bytes) -> bytes:
        """See `TokenCounts`."""
        passed = super().take_line(event)
        self.read_tokens()
        return passed


class _Pool:
    """The connection's pool, and its transport."""

    def __init__(self) -> None:
        self.turn = WriteTurn(cast("Any", self))
        self.stale = 0
        self.closed = False

    def call_soon(self, *_: object) -> None:
        """Never: nothing is written."""

    def write(self, data: bytes) -> None:
        """Take the request."""

    def is_closing(self) -> bool:
        """Return whether it was closed."""
        return self.closed

    def abort(self) -> None:
        """Close."""
        self.closed = True

    def get_write_buffer_size(self) -> int:
        """Return nothing: all was written."""
        return 0

    def close_idle(self) -> None:
        """Close nothing: there is none."""

    def release(self, connection: ClientConnection) -> None:
        """Keep the connection."""


class _Client(Client):
    """A client of an engine that writes chunks."""

    def stream_started(self, status: int, headers: Headers) -> None:
        """Note the first event."""
        super().stream_started(status, headers[:1])

    def stream_remarked(self, headers: Headers, event: bytes) -> None:
        """Note a comment before it."""
        super().stream_remarked(headers[:1], event)


class Receiver:
    """A client, and the engine's connection before it.

    Args:
        options: Of the case.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        kind, told = options["kind"], options["counts"]
        asked = None if told is None else _EagerCounts(counts(told[0], **told[1]).asked)
        ids = TokenIds() if options["ids"] else None
        self.client = _Client(
            openai=kind != "named",
            sequences=options["sequences"],
            cached_tokens=options["cached"],
            keep_text=options["text"],
            counts=asked,
            ids=ids,
        )
        if kind == "generate":
            self._use_tokens(options)
        self.connection = ClientConnection(cast("Any", _Pool()), 65_536)
        self.connection.connection_made(cast("Any", self.connection._pool))
        leg = self.client.leg
        call = Call(b"", b"", leg, head_only=False, repeatable=True, lines=leg)
        self.connection.begin(call)

    def _use_tokens(self, options: dict[str, Any]) -> None:
        client = self.client
        client.reader = TokenStream(
            1,
            resumes=False,
            usage=client.usage,
            asks_total=False,
            counts=None,
            transcript=client.transcript if options["text"] else None,
            ids=GeneratedIds(b"[1,2]") if options["ids"] else None,
            expensive=lambda: None,
            may_abort=lambda: False,
        )
        client.leg.reader = client.reader
        client.leg._take_token = client.reader.take_token

    def feed(self, data: bytes) -> None:
        """Have Python read the next bytes."""
        if self.connection._call is not None:
            self.connection.data_received(data)

    def end(self) -> None:
        """Have the engine close."""
        if self.connection._call is not None:
            self.connection.eof_received()

    def state(self) -> dict[str, Any]:
        """Return all that came of the stream."""
        client, reader = self.client, self.client.reader
        state: dict[str, Any] = {
            "received": client.received,
            "turns": [turn for turn in client.turns if turn != "wrote"],
            "errors": [(one.kind, str(one)) for one in client.errors],
            "first errors": client.first_errors,
            "tokens": reader.read_tokens(),
            "usage": (reader.usage_tokens, reader.prompt_tokens),
            "flags": (
                reader.over,
                reader.aborted,
                reader.done,
                reader.handed_back,
                reader.complete,
            ),
            "text": client.transcript.text,
            "is whole": client.transcript.is_whole,
            # Behind what ends it nothing is looked at.
            "tail": b"" if reader.over else bytes(client.leg._scanner.tail),
        }
        if isinstance(reader, NamedEventStream):
            return state | {"said": reader.past_opening}
        state |= {"finished": reader.finished, "begun": reader._has_begun}
        if reader._counts is not None:
            state["told"] = reader._counts.reported
        if reader._ids is not None:
            ids = reader._ids
            state |= {
                "ids": (ids.prompt, ids.kept, ids.seen, ids.behind, ids.lost, ids.usable, ids.begun)
            }
        return state


class Lender(Receiver):
    """Lends the stream to the parser whenever that may have it.

    Args:
        library: The library.
        options: Of the case.
        rng: Decides when it is taken back early.
    """

    def __init__(self, library: ctypes.CDLL, options: dict[str, Any], rng: random.Random) -> None:
        super().__init__(options)
        ids, text = "ids" * options["ids"], "text" * options["text"]
        self.kind = " ".join(filter(None, (options["kind"], ids, text)))
        self._library = library
        self._rng = rng
        self._parser: int | None = None
        self._passed = Passed(0, 0, 0)
        self.events = self.lent = 0
        self.reasons: Counter[int] = Counter()

    def feed(self, data: bytes) -> None:
        """Have the parser read the next bytes if it has the stream, else Python."""
        if self._parser is None:
            super().feed(data)
            self._lend()
            return
        parsed = _Parsed()
        assert not self._library.br_parser_feed(self._parser, data, len(data), byref(parsed))
        self.events += parsed.events
        events, counts = self._passed.events + parsed.events, self._passed.uncounted
        self._passed = Passed(events, parsed.tokens, counts + parsed.uncounted)
        self._write(parsed.client.copied())
        if parsed.reason or self._rng.random() < 0.02:
            self.reasons[parsed.reason] += 1
            self.take_back()

    def end(self) -> None:
        """Have the engine close."""
        self.take_back()
        super().end()

    def take_back(self) -> None:
        """Go on in Python."""
        if self._parser is None:
            return
        returned = _Returned()
        assert not self._library.br_parser_end(self._parser, byref(returned))
        self.client.reader.take_passed(
            self._passed._replace(
                texts=returned.texts.copied(),
                last=returned.last.copied(),
                ids=returned.ids.copied(),
                new_ids=returned.new_ids.copied() if returned.flags & _NEW else None,
                behind=returned.behind.copied(),
            )
        )
        left = returned.engine.copied()
        self._library.br_parser_free(self._parser)
        self._parser = None
        if left:
            super().feed(left)

    def _write(self, chunk: bytes) -> None:
        if chunk:
            size, _, rest = chunk.partition(b"\r\n")
            assert rest[-2:] == b"\r\n"
            assert size == b"%x" % (len(rest) - 2)
            self.client.write(rest[:-2])

    def _lend(self) -> None:
        connection, reader = self.connection, self.client.reader
        lendable = connection._call is not None and self.client.leg.takes_lines
        form = reader.form if lendable and not connection._decoder.is_within else None
        if form is None:
            return
        made = _Stream(
            -1, -1, form.kind, form.flags | _CHUNKED, form.tokens, 65_536, 16_384, 0, 0, 0
        )
        self._parser = self._library.br_parser_new(byref(made))
        assert self._parser
        self._passed = Passed(0, form.tokens, 0)
        self.lent += 1


# The streams.

TEXTS = (
    *(
        " the",
        "a",
        "é",
        "\u4f60",
        "\U0001f600",
        '"',
        "\\",
        "\n",
        "\n\n",
        '},{"usage":{',
        "\ud83d",
        "",
    ),
    *(
        '"token_ids":[',
        "]",
        "},",
        "data: [DONE]",
        "\r\n",
        "null",
        '"finish_reason":null',
        "word" * 40,
    ),
)


def _dumps(value: object, rng: random.Random) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=rng.random() < 0.3)


class Writer:
    """Writes the events of one stream, as an engine does or might."""

    def __init__(self, rng: random.Random, options: dict[str, Any]) -> None:
        self._rng = rng
        self._options = options
        self._tokens = 0
        self._usage = rng.choice(
            ["usual", "usual", "newer", "none", "null", "first", "nested", "spaced", "wrong"]
        )

    def events(self) -> list[bytes]:
        """Return the events of a whole stream, mostly."""
        rng, kind = self._rng, self._options["kind"]
        count = rng.choice([3, 5, 8, 12, 20])
        if kind == "named":
            return self._named(count)
        events = []
        if kind == "chat":
            events.append(self._opening())
        events += [self._token() for _ in range(count)]
        if rng.random() < 0.2:
            odd = [
                b": ping\n\n",
                self._opening(),
                b"data: {}\n\n",
                b"data: [1\n\n",
                b"\n",
                b"event: x\n" + self._token(),
            ]
            odd.append(b'data: {"error":{"message":"boom","code":500}}\n\n')
            events.insert(rng.randrange(2, len(events)), rng.choice(odd))
        if rng.random() < 0.9:
            events.append(self._token(finish=rng.choice(["stop", "length", "abort"])))
            if rng.random() < 0.6:
                events.append(self._data({"choices": [], "usage": self._counts()}))
            events.append(b"data: [DONE]\n\n")
        return events

    def _counts(self) -> dict[str, int]:
        tokens = self._tokens
        if self._usage == "wrong":
            tokens = self._rng.choice([0, -3, 10**9, 10**10, tokens])
        return {"prompt_tokens": 7, "total_tokens": 7 + self._tokens, "completion_tokens": tokens}

    def _data(self, message: dict[str, Any]) -> bytes:
        return (
            b"data: "
            + _dumps({"id": "c", **message}, self._rng).encode("utf-8", "replace")
            + b"\n\n"
        )

    def _opening(self) -> bytes:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        more = {"prompt_token_ids": [1, 22], "prompt_text": None} if self._options["ids"] else {}
        return self._data({"choices": [choice], **more})

    def _ids(self, drawn: int) -> object:
        if not self._options["ids"] and self._options["kind"] != "generate":
            return None
        if drawn and self._rng.random() < 0.02:
            return [self._rng.choice(["7", None, -7, 7.5, [7], {"id": 7}])] * drawn
        return [self._rng.randrange(10**6) for _ in range(drawn)]

    def _token(self, finish: str | None = None) -> bytes:
        rng, kind = self._rng, self._options["kind"]
        drawn = rng.choice([1, 1, 1, 1, 1, 1, 2, 3, 0])
        text = rng.choice(TEXTS) if drawn or rng.random() < 0.5 else ""
        first, self._tokens = not self._tokens, self._tokens + drawn
        choice: dict[str, Any] = {"index": rng.choice([0] * 9 + [1])}
        if kind == "generate":
            choice |= {"logprobs": None, "finish_reason": finish, "token_ids": self._ids(drawn)}
            return self._data({"usage": None, "choices": [choice]})
        if kind == "chat":
            delta: dict[str, Any] = {"content": text} if text else {}
            if rng.random() < 0.05:
                delta = rng.choice(
                    [
                        {"reasoning": text},
                        {"tool_calls": [{"index": 0, "function": {"arguments": text}}]},
                        {"content": ""},
                    ]
                )
            choice["delta"] = delta
        else:
            choice["text"] = text
        choice["logprobs"] = (
            {"content": [{"token": text, "bytes": [1]}]} if rng.random() < 0.1 else None
        )
        choice["finish_reason"] = finish
        if kind == "completion":
            choice |= {
                "stop_reason": None,
                "prompt_token_ids": [1, 22] if first and self._options["ids"] else None,
            }
        choice["token_ids"] = self._ids(drawn)
        message: dict[str, Any] = {"choices": [choice]}
        shown = self._options["counts"] is not None or rng.random() < 0.1
        style = self._usage if rng.random() < 0.95 else rng.choice(["none", "usual", "nested"])
        if shown and style in ("usual", "newer", "wrong", "spaced"):
            message["usage"] = self._counts()
        elif shown and style == "null":
            message["usage"] = None
        elif shown and style == "nested":
            message["usage"] = {
                **self._counts(),
                "completion_tokens_details": {"reasoning_tokens": 0},
            }
        elif shown and style == "first":
            message = {"usage": self._counts(), **message}
        if style == "newer":
            message["kv_transfer_params"] = None
        event = self._data(message)
        return event.replace(b'"usage":{', b'"usage" : {') if style == "spaced" else event

    def _named(self, count: int) -> list[bytes]:
        rng = self._rng
        names = rng.choice(
            [
                ("message_start", "content_block_delta", "message_delta", "message_stop"),
                (
                    "response.created",
                    "response.output_text.delta",
                    "response.output_text.done",
                    "response.completed",
                ),
            ]
        )
        events = [self._event(names[0], {"message": {}})]
        for _ in range(count):
            name = (
                names[1]
                if rng.random() < 0.95
                else rng.choice(
                    ["ping", "content_block_stop", "response.reasoning_text.delta", "x"]
                )
            )
            kind = rng.choices(_DELTAS, (6, 3, 3, 1))[0]
            delta = {"type": kind} if name == "content_block_delta" else {}
            events.append(self._event(name, {"delta": {**delta, "text": rng.choice(TEXTS)}}))
        if rng.random() < 0.9:
            usage = {"output_tokens": count, "input_tokens": 3}
            ending = {"stop_reason": rng.choice(["end_turn", None])}
            events.append(self._event(names[2], {"usage": usage, "delta": ending}))
            events.append(
                self._event(names[3], {"response": {"usage": usage, "status": "completed"}})
            )
        return events

    def _event(self, name: str, members: dict[str, Any]) -> bytes:
        data = _dumps({"type": name, **members}, self._rng)
        return f"event: {name}\ndata: {data}\n\n".encode("utf-8", "replace")


_DELTAS = ("text_delta", "thinking_delta", "input_json_delta", "signature_delta")


def _recorded() -> list[tuple[str, list[bytes]]]:
    """Return the streams of real engines: of a chat or a completion, and the events."""
    found = []
    for path in sorted(TRANSCRIPTS.glob("*stream*.resp")) + sorted(
        TRANSCRIPTS.glob("*decode_before*.resp")
    ):
        events = re.findall(rb"data: [^\n]*\n\n", path.read_bytes())
        if len(events) > 3:
            kind = "chat" if b"chat.completion.chunk" in events[0] else "completion"
            found.append((kind, events))
    return found


def _in_chunks(rng: random.Random, events: list[bytes]) -> list[bytes]:
    """Return the events in chunks, mostly each in its own."""
    body, at, chunks = b"".join(events), 0, []
    style = rng.choice(["each", "each", "each", "some", "any"])
    sizes = [len(event) for event in events]
    while at < len(body):
        if style == "any":
            size = rng.choice([1, 50, 300, 5_000])
        else:
            size = sizes.pop(0)
            while style == "some" and sizes and rng.random() < 0.4:
                size += sizes.pop(0)
        piece = body[at : at + size]
        at += size
        form = rng.choice(
            [b"%x\r\n"] * 12 + [b"%X\r\n", b"0%x\r\n", b"00000%x\r\n", b"%x;a=b\r\n", b"%x \r\n"]
        )
        chunks.append(form % len(piece) + piece + b"\r\n")
    if rng.random() < 0.8:
        chunks.append(
            rng.choice([b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\na: b\r\n\r\n", b"0\r\n\r\nHTTP/1.1 200"])
        )
    return chunks


def _spoiled(rng: random.Random, body: bytes) -> bytes:
    """Return the bytes with something wrong."""
    at = rng.randrange(len(body))
    match rng.randrange(7):
        case 0:
            return body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
        case 1:
            return (
                body[:at]
                + rng.choice([b"\n", b"\r", b"\r\n", b"\n\n", b"}", b'"', b"]", b"\0"])
                + body[at:]
            )
        case 2:
            return body[:at] + body[at + rng.randrange(1, 30) :]
        case 3:
            return body[:at]
        case 4:
            end = min(len(body), at + rng.randrange(1, 400))
            return body[:end] + body[at:end] + body[end:]
        case 5:
            return (
                body.replace(b"\n\n", b"\r\n\r\n")
                if rng.random() < 0.3
                else body.replace(b":null", b": null")
            )
        case _:
            return (
                body[:at]
                + rng.choice(
                    [
                        b'"usage":{',
                        b'],"usage":{"prompt_tokens":',
                        b'"token_ids":[',
                        b'"finish_reason":null',
                        b'"completion_tokens":5',
                    ]
                )
                + body[at:]
            )


def _segments(rng: random.Random, chunks: list[bytes], body: bytes) -> list[bytes]:
    if rng.random() < 0.6 and b"".join(chunks) == body:
        return chunks
    largest = rng.choice([1, 3, 40, 400, 4_000, 100_000])
    segments, at = [], 0
    while at < len(body):
        size = rng.randint(1, largest)
        segments.append(body[at : at + size])
        at += size
    return segments


RECORDED = _recorded()


def draw(seed: int) -> tuple[dict[str, Any], list[bytes]]:
    """Return what the client of a case wants, and what its engine sends."""
    rng = random.Random(seed)
    events: list[bytes] = []
    options: dict[str, Any] = {
        "kind": rng.choice(["chat", "chat", "completion", "named", "generate"])
    }
    if rng.random() < 0.15:
        options["kind"], events = rng.choice(RECORDED)
    of_text = options["kind"] in ("chat", "completion")
    asked = [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
    each = {"each": rng.random() < 0.8}
    options["sequences"] = rng.choice([1, 1, 1, 2]) if of_text else 1
    options["counts"] = None
    if of_text and options["sequences"] == 1 and rng.random() < 0.7:
        options["counts"] = rng.choice(asked), each
    options["cached"] = rng.choice([None, None, 5])
    options["text"] = rng.random() < 0.3
    options["ids"] = options["kind"] != "named" and options["sequences"] == 1 and rng.random() < 0.4
    events = events or Writer(rng, options).events()
    chunks = _in_chunks(rng, events)
    body = b"".join(chunks)
    for _ in range(rng.choice([0, 0, 0, 0, 0, 1, 1, 3])):
        body = _spoiled(rng, body) or b"0"
    return options, [HEAD, *_segments(rng, chunks, body)]


def _is_broken(body: bytes) -> bool:
    """Return whether chunks do not end where their sizes say."""
    try:
        ChunkedDecoder().feed(body)
    except MalformedError:
        return True
    return False


def compare(library: ctypes.CDLL, seed: int) -> Lender:
    """Run the case of a seed both ways.

    Raises:
        AssertionError: What comes of it differs.
    """
    options, segments = draw(seed)
    alone, lender = Receiver(options), Lender(library, options, random.Random(seed + 1))
    for segment in segments:
        alone.feed(segment)
        lender.feed(segment)
    alone.end()
    lender.end()
    expected, found = alone.state(), lender.state()
    if _is_broken(b"".join(segments[1:])):
        # How much of a segment is passed on in which the framing breaks depends on where that begins. Behind
        # an answer that was whole before, the proxy has written what ends it.
        received = (one["received"].removesuffix(_DONE) for one in (expected, found))
        shorter, longer = sorted(received, key=len)
        assert longer.startswith(shorter), f"seed {seed}, {options}: {shorter!r} {longer!r}"
        return lender
    differing = {
        name: (expected[name], found[name]) for name in expected if expected[name] != found[name]
    }
    assert not differing, f"seed {seed}, {options}: {differing}"
    return lender


def main() -> int:
    """Compare, and print what was; return 1 if anything differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    library = load()
    wrong = 0
    events: Counter[str] = Counter()
    reasons: Counter[int] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.cases):
        try:
            lender = compare(library, seed)
        except AssertionError as error:
            wrong += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            sys.stdout.write(f"seed {seed}: {where.line}: {str(error)[:3000]}\n")
            sys.stdout.flush()
            if wrong > 4:
                break
            continue
        events[lender.kind] += lender.events
        reasons += lender.reasons
    told = f"{arguments.cases} cases, back because {dict(reasons)}, {wrong} differ, events {dict(events)}"
    sys.stdout.write(f"{told}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
