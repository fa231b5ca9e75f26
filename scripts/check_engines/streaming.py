"""A streamed answer, read while something else happens."""

import json
import threading
from typing import Any

import httpx
from client import CLIENT


class Streaming:
    """A streamed answer that is read by a thread of its own.

    Attributes:
        status: Of the answer; 0 until it came.
        request_id: As the answer says.
        events: The events so far.
        lines: What came, line by line.
        error: What an error event said, or what broke; None if nothing did.
    """

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self.status = 0
        self.request_id = ""
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.error: str | None = None
        self._url, self._body = f"{url}{path}", body
        self._ended = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """The text of a completion so far."""
        return "".join(choice["text"] for event in self.events for choice in event["choices"])

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(240.0)
        assert not self._thread.is_alive(), "a stream without an end"
        if self.status == 200 and not self._ended:
            self.error = self.error or "it ended without a word"

    def _read(self) -> None:
        try:
            with CLIENT.stream("POST", self._url, json=self._body, timeout=240.0) as answer:
                self.request_id = answer.headers["x-request-id"]
                self.status = answer.status_code
                for line in answer.iter_lines():
                    self.lines.append(line)
                    if line == "data: [DONE]":
                        self._ended = True
                    elif line.startswith("data: "):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.error = self.error or repr(error)

    def _take(self, event: dict[str, Any]) -> None:
        self._ended |= event.get("type") in ("message_stop", "response.completed")
        if event.get("error"):
            self.error = str(event["error"])
        else:
            self.events.append(event)
