"""The answer that the client of a stream has, so that another engine can begin it again.

Some answers cannot go on behind their ids: an engine's grammar, its penalties, and its parsers of reasoning
and tool calls begin anew with each request. The proxy asks for such an answer once more from its beginning. It
compares what comes with what the client has, leaves that out, and goes on only if both are the same.

How an engine cuts an answer into events differs from run to run. So the proxy compares each growing value
(text, arguments, lists of ids and log-probabilities) as a whole, by its place in its choice. The client keeps
the ids of calls, items and responses that the first engine drew.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.openai.answer import ABORT, dump_compact
from balanceroute.proxy.live.openai.stream_reader import DONE, choices_of, decoded
from balanceroute.proxy.wire.sse import event_data

# Characters, and entries of lists, of one stream: more than any context has.
_MOST_KEPT = 1 << 20
_PLACE = 64  # Of each place where something stands.
_MOST_PIECES = 256
_MOST_AHEAD = 64  # Events of a choice with something new, before all of it has come again.
_MOST_DEPTH = 16
# Members that an engine writes once: what something is.
_SAID_ONCE = frozenset({"id", "role", "type"})
# What stands there, or null, if a part of an event has nothing new.
_STAYS = frozenset({"delta", "text", "token_ids"})
_NULL = frozenset({"logprobs", "prompt_token_ids"})
# Members with an entry for each token, beside the text.
_BESIDE = ("logprobs", "token_ids")
_SAYS = ("delta", "text", *_BESIDE)
_FINISH = "finish_reason"
_REASONS = frozenset({_FINISH, "stop_reason", "matched_stop"})

# A chat's piece of text without escapes, as vLLM writes it: to parse the event costs three times as much.
_PLAIN_CHOICE = b'"choices":[{"index":0,"delta":{"'
_PLAIN = re.compile(
    re.escape(_PLAIN_CHOICE)
    + rb'(content|reasoning)":"([^"\\]++)"\},"logprobs":null,"finish_reason":null'
    rb'(?:,"token_ids":null)?+\}\]'
)

Path = tuple[str | int, ...]


class DiffersError(BalanceRouteError):
    """The answer that was begun again is another one."""


class _Grown(Struct, eq=False):
    """A text, or a list, of which the client has `whole`, and behind it `pieces`."""

    whole: Any
    pieces: list[Any]
    at: int = 0  # How much of it has been said again.

    def add(self, value: Any) -> None:
        self.pieces.append(value)
        if len(self.pieces) >= _MOST_PIECES:
            self._join()
            self.at = len(self.whole)

    def begin_again(self) -> bool:
        """Wait for all of it; return whether that is anything."""
        self._join()
        self.at = 0
        return bool(self.whole)

    def repeat(self, value: Any) -> int:
        """Return how much of `value` comes again. Raises DiffersError: it is something else."""
        again = min(len(value), self.left())
        if self.whole[self.at : self.at + again] != value[:again]:
            raise DiffersError
        self.at += again
        return again

    def left(self) -> int:
        """Return how much of it has yet to come again, by `begin_again`."""
        return len(self.whole) - self.at

    def _join(self) -> None:
        if self.pieces:
            if isinstance(self.whole, str):
                self.whole += "".join(self.pieces)
            else:
                self.whole += [one for piece in self.pieces for one in piece]
            self.pieces = []


class Delivered:
    """The answer that the client of one stream has.

    Attributes:
        lost: Whether it is no longer known what the client has, so that nothing can be compared.
        repeating: Whether an engine repeats what the client has.
    """

    __slots__ = ("_grown", "_left", "_once", "_room", "lost")

    def __init__(self) -> None:
        self.lost = False
        self._room = _MOST_KEPT
        # By the choice, and then by the place in it.
        self._grown: dict[int, dict[Path, _Grown]] = {}
        self._once: dict[Path, Any] = {}
        self._left: dict[int, int] = {}  # What has yet to come again, of each choice.

    @property
    def repeating(self) -> bool:
        """Whether an engine repeats what the client has."""
        return bool(self._left)

    def begin_again(self) -> None:
        """Expect everything from an engine that begins the answer again."""
        left = {
            choice: sum([grown.begin_again() for grown in all_grown.values()])
            for choice, all_grown in self._grown.items()
        }
        self._left = {choice: count for choice, count in left.items() if count}

    def deliver(self, event: bytes) -> bytes:
        """Note an event that goes to the client; return it as the client is to have it."""
        raise NotImplementedError

    def leave_out(self, event: bytes, *, may_abort: bool = False) -> bytes:
        """Return what of an event the client does not have; empty if it has all.

        Args:
            event: Of an engine that has begun the answer again.
            may_abort: Whether the proxy has ordered it to give the answer up, so that it may end before it
                brings anything new.

        Raises:
            DiffersError: It does not go on with what the client has.
        """
        raise NotImplementedError

    def _grow(self, choice: int, path: Path, value: Any) -> None:
        self._take_room(len(value))
        if self.lost:
            return
        all_grown = self._grown.setdefault(choice, {})
        grown = all_grown.get(path)
        if grown is None:
            self._take_room(_PLACE)
            grown = all_grown[path] = _Grown("" if isinstance(value, str) else [], [])
        grown.add(value)

    def _say_once(self, path: Path, value: Any) -> Any:
        """Return what the client has there, which is `value` if it has nothing yet."""
        if path not in self._once:
            self._take_room(_PLACE + len(value))
        return self._once.setdefault(path, value)

    def _take_room(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            self._lose()

    def _lose(self) -> None:
        """Keep nothing any more. A stream that is repeating then ends: what of it is new is unknown."""
        self.lost = True
        self._grown.clear()
        self._once.clear()

    def _repeat(self, choice: int, path: Path, value: Any) -> int:
        """Return how much of a value that grows comes again.

        Raises:
            DiffersError: The client has something else there.
        """
        if self.lost:
            raise DiffersError
        grown = self._grown.get(choice, {}).get(path)
        if grown is None or not grown.left():
            return 0
        again = grown.repeat(value)
        if not grown.left():
            self._left[choice] -= 1
            if not self._left[choice]:
                del self._left[choice]
        return again

    def _stop_repeating(self, choice: int) -> None:
        self._left.pop(choice, None)
        for grown in self._grown.get(choice, {}).values():
            grown.at = len(grown.whole)


class DeliveredChoices(Delivered):
    """That of a stream whose events have choices: chats, completions, and ids.

    Parsers of tool calls withhold text, log-probabilities come at once. So one of them may bring something new
    while the engine still repeats the other one: the new part waits.
    """

    __slots__ = ("_ahead",)

    def __init__(self) -> None:
        super().__init__()
        self._ahead: dict[int, list[bytes]] = {}  # Events that wait, of each choice.

    def begin_again(self) -> None:
        super().begin_again()
        self._ahead.clear()

    def deliver(self, event: bytes) -> bytes:
        if self.lost:
            return event
        plain = _PLAIN.match(event, max(0, event.find(_PLAIN_CHOICE)))
        if plain is not None:
            name = "content" if plain[1] == b"content" else "reasoning"
            self._grow(0, ("delta", name), plain[2].decode("utf-8", "replace"))
            return event
        data = event_data(event)
        message = decoded(data)
        if message is None:
            self.lost = bool(data and data != DONE)
            return event
        changed = False
        for choice in choices_of(message):
            changed |= self._note_members(_index(choice), (), choice)
            if choice.get(_FINISH) is not None:
                self._grow(_index(choice), (_FINISH,), [choice[_FINISH]])
        return b"data: %b\n\n" % dump_compact(message) if changed else event

    def leave_out(self, event: bytes, *, may_abort: bool = False) -> bytes:
        data = event_data(event)
        if not data:
            return b""  # A comment, for example.
        message = decoded(data)
        if message is None or not choices_of(message):
            if self.repeating:
                raise DiffersError  # The end, or an unreadable event.
            return event
        going_on: list[bytes] = []
        for choice in choices_of(message):
            index = _index(choice)
            says_more = self._leave_out(index, (), choice)
            if may_abort and choice.get(_FINISH) == ABORT:
                says_more = (_FINISH,) not in self._grown.get(index, {})
                self._stop_repeating(index)
            elif choice.get(_FINISH) is not None:
                says_more |= not self._repeat(index, (_FINISH,), [choice[_FINISH]])
            new = [b"data: %b\n\n" % dump_compact(message | {"choices": [choice]})] * says_more
            if index not in self._left:
                going_on += self._ahead.pop(index, []) + new
            elif new:
                self._ahead.setdefault(index, []).extend(new)
                if not self._may_wait(index, choice):
                    raise DiffersError
        return b"".join(going_on)

    def _may_wait(self, index: int, new: Mapping[str, Any]) -> bool:
        """Return whether the new part of a choice is text, and the part yet to be repeated is not, or the reverse."""
        if new.get(_FINISH) is not None or len(self._ahead[index]) > _MOST_AHEAD:
            return False
        left = {place[0] in _BESIDE for place, one in self._grown[index].items() if one.left()}
        said = {name in _BESIDE for name in _SAYS if _says_anything(new.get(name))}
        return not left & said

    def _note_members(self, index: int, path: Path, members: dict[str, Any]) -> bool:
        """Note what an object says; return whether a member of it was put right."""
        changed = False
        if len(path) > _MOST_DEPTH:
            self._lose()
            return False
        for name, value in members.items():
            if not value or name in _REASONS:
                continue
            place = (*path, name)
            if isinstance(value, dict):
                changed |= self._note_members(index, place, value)
            elif isinstance(value, list) and _are_parts(value):
                for part in value:
                    changed |= self._note_members(index, (*place, _index(part)), part)
            elif isinstance(value, list):
                self._grow(index, place, list(map(_comparable, value)))
            elif isinstance(value, str) and name not in _SAID_ONCE:
                self._grow(index, place, value)
            elif isinstance(value, str):
                members[name] = self._said_once(index, place, value)
                changed |= members[name] != value
        return changed

    def _said_once(self, index: int, place: Path, value: str) -> str:
        """Return a member that is said once as the client has it: no engine draws another id for it."""
        path, constant = (index, *place), _constant(place[-1], value)
        if path not in self._once:
            self._grow(index, place, [constant])
        first: str = self._say_once(path, value)
        return value if constant else first

    def _leave_out(self, index: int, path: Path, members: dict[str, Any]) -> bool:
        """Take out of an object what the client has; return whether it says anything else."""
        if len(path) > _MOST_DEPTH:
            raise DiffersError
        says_more = False
        for name, value in list(members.items()):
            place = (*path, name)
            if name in _REASONS or not isinstance(value, str | dict | list):
                continue
            if isinstance(value, dict):
                new = self._leave_out(index, place, value)
            elif isinstance(value, list):
                new = self._leave_out_of_list(index, place, members)
            elif name in _SAID_ONCE:
                new = (index, *place) not in self._once
                if not new:
                    self._repeat(index, place, [_constant(name, value)])
            else:
                members[name] = value[self._repeat(index, place, value) :]
                new = bool(members[name])
            says_more |= new
            if not new and name in _NULL:
                members[name] = None
            elif not new and value and name not in _STAYS:
                del members[name]
        return says_more

    def _leave_out_of_list(self, index: int, place: Path, members: dict[str, Any]) -> bool:
        name = place[-1]
        assert isinstance(name, str)
        value = members[name]
        if _are_parts(value):
            members[name] = [
                part for part in value if self._leave_out(index, (*place, _index(part)), part)
            ]
        else:
            again = self._repeat(index, place, list(map(_comparable, value)))
            members[name] = value[again:]
        return bool(members[name])


def _constant(name: str | int, value: str) -> str:
    """Return the part of a member written once that is the same in each run."""
    return "" if name == "id" else value


def _index(part: Mapping[str, Any]) -> int:
    index = part.get("index")
    return index if type(index) is int else 0


def _says_anything(value: object) -> bool:
    return any(map(_says_anything, value.values())) if isinstance(value, dict) else bool(value)


def _are_parts(value: list[Any]) -> bool:
    """Return whether a list has parts that grow, each with its number, as tool calls do."""
    return bool(value) and all(
        isinstance(part, dict) and type(part.get("index")) is int for part in value
    )


def _comparable(entry: object) -> object:
    """Return what of a list's entry is the same in each run: no number with a fraction is."""
    if isinstance(entry, dict):
        return entry.get("token")
    return entry if isinstance(entry, str | int) else None


class DeliveredEvents(Delivered):
    """The same of a stream of named events: /v1/messages and /v1/responses.

    Pieces of a text are joined by the block or item that they belong to. Any other event comes once, and has
    to come again with the same content, but for what engines draw or measure.

    An engine that the proxy has ordered to give the answer up may end it before it has repeated everything: it
    closes the parts it has begun, with less text. Then `leave_out` closes those that the client has, with all text.
    """

    __slots__ = ("_added", "_again", "_created_at", "_given_up", "_number", "_renamed")

    def __init__(self) -> None:
        super().__init__()
        self._again = False
        self._renamed: dict[bytes, bytes] = {}  # As JSON.
        self._number = -1  # Of the last event, where they are numbered.
        self._created_at = b""
        self._added: list[dict[str, Any]] = []  # What begins items and their parts.
        self._given_up: int | None = None  # The item within which an engine gave the answer up.

    def begin_again(self) -> None:
        super().begin_again()
        self._again = self._again or self.repeating
        self._renamed.clear()

    def deliver(self, event: bytes) -> bytes:
        data = event_data(event)
        message = None if self.lost else decoded(data)
        if message is None:
            self.lost = self.lost or bool(data and data != DONE)
            return event
        if message.get("type") in _IDLE:
            return event
        if self._again:
            event = self._as_begun(event)
        elif type(message.get("sequence_number")) is int:
            self._number = message["sequence_number"]
        place, growing = _place(message), _growing(message)
        if growing is not None:
            self._grow(0, (*place, growing[1]), growing[0][growing[1]])
        else:
            self._grow(0, place, [_digest(message)])
            if str(message.get("type")).endswith(_ADDED):
                self._take_room(len(event))
                self._added.append(message)
            ids = list(_drawn(message))
            if ids:
                self._say_once(place, ids)
                self._created_at = self._created_at or _created_at(message)
        return event

    def leave_out(self, event: bytes, *, may_abort: bool = False) -> bytes:
        data = event_data(event)
        if not data:
            return b""
        message = decoded(data)
        if message is None:
            if self.repeating:
                raise DiffersError
            return event
        if message.get("type") in _IDLE:
            return b""
        try:
            return self._leave_out(event, message)
        except DiffersError:
            if not may_abort or self.lost:
                raise
        return self._give_up(event, message)

    def _leave_out(self, event: bytes, message: dict[str, Any]) -> bytes:
        place, growing = _place(message), _growing(message)
        if growing is not None:
            members, name = growing
            again = self._repeat(0, (*place, name), members[name])
            if again:
                members[name] = members[name][again:]
                event = _NAMED % (str(message.get("type")).encode(), dump_compact(message))
            if not members[name]:
                return b""
        elif self._repeat(0, place, [_digest(message)]):
            for old, new in zip(_drawn(message), self._once.get(place, ()), strict=False):
                if old != new:
                    self._renamed[dump_compact(old)] = dump_compact(new)
            return b""
        if self.repeating:
            raise DiffersError
        return event

    def _give_up(self, event: bytes, message: dict[str, Any]) -> bytes:
        """Return what ends the answer for the client as an engine ends it too soon.

        Raises:
            DiffersError: It says something else, or ends it of itself.
        """
        kind, delta, response = (message.get(name) for name in ("type", "delta", "response"))
        if isinstance(delta, dict) and delta.get("type") == "signature_delta":
            return event
        if isinstance(kind, str) and kind.endswith(_CLOSES):
            if self._given_up is None:
                self._given_up = _number(message, "output_index")
            return b""  # In the end, and with the client's text.
        if kind == "message_delta" and isinstance(delta, dict) and delta.get("stop_reason") is None:
            closing = self._open_blocks()
        elif kind == "response.completed" and isinstance(response, dict):
            items, said = self._items(), response.get("output")
            whole = said[: self._given_up] if isinstance(said, list) else []
            response["output"] = [*whole, *(item.whole() for item in items[len(whole) :])]
            closing = [one for item in items for one in item.closing()]
            event = _NAMED % (kind.encode(), dump_compact(message))
        else:
            raise DiffersError
        self._stop_repeating(0)
        grown = self._grown.get(0, {})
        missing = [one for one in closing if _place(one) not in grown]
        return b"".join(
            [*(_NAMED % (one["type"].encode(), dump_compact(one)) for one in missing), event]
        )

    def _open_blocks(self) -> list[dict[str, Any]]:
        begun = [place[-2] for place in self._grown.get(0, {}) if place[0] == "content_block_start"]
        return [{"type": "content_block_stop", "index": index} for index in begun]

    def _items(self) -> list["_Item"]:
        """Return the items of a response, as far as the client has them."""
        items: dict[int, _Item] = {}
        for message in self._added:
            index = _number(message, "output_index")
            if isinstance(message.get("item"), dict):
                items[index] = _Item(message, {}, [])
            elif index in items and isinstance(message.get("part"), dict):
                items[index].parts.append(message)
        for (kind, _, item, part, *_), grown in self._grown.get(0, {}).items():
            if item in items and str(kind).endswith(".delta"):
                text = "".join([grown.whole, *grown.pieces])
                items[int(item)].texts[int(part)] = str(kind), text
        return [items[index] for index in sorted(items)]

    def _as_begun(self, event: bytes) -> bytes:
        """Return an event with the ids and the time that the client has of this answer, and its number."""
        for drawn, first in self._renamed.items():
            event = event.replace(drawn, first)
        if self._created_at:
            event = _CREATED.sub(rb"\g<1>" + self._created_at, event)
        if self._number >= 0:
            self._number += 1
            event = _SEQUENCE.sub(rb"\g<1>%d" % self._number, event, count=1)
        return event


class _Item(Struct, eq=False):
    """An item of a response of which the client has the beginning."""

    added: dict[str, Any]  # The event with which it began.
    # By the number of its part, -1 for the item itself: the name of the events that bring a text,
    # and the text.
    texts: dict[int, tuple[str, str]]
    parts: list[dict[str, Any]]  # The events with which its parts began.

    def whole(self) -> dict[str, Any]:
        """Return the item with all of its text, as an engine writes it whose answer ends here."""
        item: dict[str, Any] = self.added["item"] | self._text(-1)
        if item.get("status") is not None:
            item["status"] = "completed"
        if self.parts:
            item["content"] = [self._part(one) for one in self.parts]
        return item

    def closing(self) -> Iterator[dict[str, Any]]:
        for begun in self.parts:
            yield from self._texts_done(_number(begun, "content_index"))
            yield self._done(begun) | {"part": self._part(begun)}
        yield from self._texts_done(-1)
        yield self._done(self.added) | {"item": self.whole()}

    def _texts_done(self, part: int) -> Iterator[dict[str, Any]]:
        if part in self.texts:
            kind = self.texts[part][0].removesuffix(".delta")
            at = {
                "output_index": self.added["output_index"],
                "item_id": self.added["item"].get("id"),
            }
            more: dict[str, Any] = (
                {"content_index": part} if part >= 0 else {"name": self.added["item"].get("name")}
            )
            more |= {"logprobs": []} if "output_text" in kind else {}
            yield {"type": f"{kind}.done", **at, **more, **self._text(part), "sequence_number": 0}

    def _text(self, part: int) -> dict[str, str]:
        kind, text = self.texts.get(part, ("", ""))
        name = "arguments" if "arguments" in kind else "input" if "input" in kind else "text"
        return {name: text} if kind else {}

    def _part(self, begun: Mapping[str, Any]) -> dict[str, Any]:
        part: dict[str, Any] = begun["part"] | self._text(_number(begun, "content_index"))
        return part

    def _done(self, begun: dict[str, Any]) -> dict[str, Any]:
        return begun | {"type": begun["type"].removesuffix(_ADDED) + ".done"}


# What begins an item of a response, and a part of one.
_ADDED = ".added"
# What closes a block of a message, or a text, a part or an item of a response.
_CLOSES = ("_block_stop", ".done")
# Of which nothing has to come again.
_IDLE = frozenset({"ping", "keepalive"})
_NAMED = b"event: %b\ndata: %b\n\n"
_SEQUENCE = re.compile(rb'("sequence_number"\s*+:\s*+)\d++')
_CREATED = re.compile(rb'("created_at"\s*+:\s*+)\d++')
# Where in the answer an event belongs.
_PLACES = ("output_index", "content_index", "summary_index", "index", "annotation_index")
# What engines draw or measure.
_OF_THE_RUN = frozenset(
    {"usage", "created_at", "completed_at", "sequence_number", "signature", "created"}
)


def _created_at(message: Mapping[str, Any]) -> bytes:
    response = message.get("response")
    created = response.get("created_at") if isinstance(response, dict) else None
    return b"%d" % created if type(created) is int else b""


def _place(message: Mapping[str, Any]) -> Path:
    delta = message.get("delta")
    kind = delta.get("type") if isinstance(delta, dict) else None
    return (str(message.get("type")), str(kind), *(_number(message, name) for name in _PLACES))


def _number(message: Mapping[str, Any], name: str) -> int:
    number = message.get(name)
    return number if type(number) is int else -1


def _growing(message: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return the object and the name of an event's piece of a text; None if it has none."""
    delta = message.get("delta")
    if isinstance(delta, str):
        return message, "delta"
    if isinstance(delta, dict):
        for name in ("text", "partial_json", "thinking"):
            if isinstance(delta.get(name), str):
                return delta, name
    return None


def _is_drawn(name: str) -> bool:
    return name == "id" or name.endswith("_id")


def _drawn(value: object, depth: int = 0) -> Iterator[str]:
    """Yield the ids of an event in their order."""
    inside: Iterable[Any] = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        for name, member in value.items():
            if isinstance(member, str) and _is_drawn(name):
                yield member
        inside = value.values()
    if depth < _MOST_DEPTH:
        for member in inside:
            if isinstance(member, dict | list):
                yield from _drawn(member, depth + 1)


def _digest(message: Mapping[str, Any]) -> bytes:
    """Return a hash of an event without what engines draw or measure."""
    return blake2b(dump_compact(_without_run(message)), digest_size=8).digest()


def _without_run(value: Any, depth: int = 0) -> Any:
    if depth > _MOST_DEPTH:
        return None
    if isinstance(value, dict):
        return {
            name: _without_run(member, depth + 1)
            for name, member in value.items()
            if name not in _OF_THE_RUN and not (_is_drawn(name) and isinstance(member, str))
        }
    if isinstance(value, list):
        return [_without_run(member, depth + 1) for member in value]
    return value
