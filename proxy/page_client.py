"""How the commands ask engines, a proxy's admin listener and Prometheus: small pages, over httpx.

What answers is not trusted. A certificate is verified, the host's name too. Nothing is followed
elsewhere: no redirect, no proxy and no credentials of the environment, no cookie. An answer is
bounded in size and, as a whole, in time, and is never decompressed.
"""

import asyncio
import os
import socket
import ssl
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

import msgspec

from balanceroute import __version__
from balanceroute.proxy.core.errors import BalanceRouteError, ConfigError
from balanceroute.proxy.live.security import engine_context, read_secret

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

MAX_ANSWER_BYTES = 16 << 20
# OpenSSL's verify codes of an unknown authority, which another CA file cures.
_UNSIGNED = frozenset({18, 19, 20, 21})
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"})


class UnansweredError(BalanceRouteError):
    """No usable answer came. The message reads on from the address."""


class Answer(NamedTuple):
    """An answer, whatever its status."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return its content as JSON, without NaN and infinities. Raises ValueError: it is none."""
        try:
            return msgspec.json.decode(self.body)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


class PageClient:
    """The connections of one command, which stay open between its questions.

    Args:
        tls: Verifies the certificates.
        timeout_s: Until an answer is complete, connecting included, unless the question says.
        bearer: The key that every question presents; None for none.
        ca_setting: The setting of another authority, for messages.
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        *,
        timeout_s: float,
        bearer: bytes | None = None,
        ca_setting: str = "--ca-file",
    ) -> None:
        self._tls, self._timeout_s, self._ca_setting = tls, timeout_s, ca_setting
        self._headers = {
            "user-agent": f"balanceroute/{__version__}",
            # A compressed page could be a thousand times its size.
            "accept-encoding": "identity",
        }
        if bearer is not None:
            self._headers["authorization"] = f"Bearer {bearer.decode()}"

    @classmethod
    def of_flags(
        cls, ca_file: Path | None, token_file: Path | None = None, *, timeout_s: float
    ) -> Self:
        """Return the client that --ca-file and --token-file ask for. Raises ConfigError."""
        flag = "--token-file"
        try:
            bearer = None if token_file is None else read_secret(token_file).value
            flag = "--ca-file"
            return cls(engine_context(ca_file, insecure=False), timeout_s=timeout_s, bearer=bearer)
        except ConfigError as error:
            raise ConfigError(f"{flag} {error}") from None

    async def __aenter__(self) -> Self:
        # Here, so that commands without requests start without it.
        from http.cookiejar import DefaultCookiePolicy  # noqa: PLC0415

        import httpx  # noqa: PLC0415

        self._client = httpx.AsyncClient(
            verify=self._tls,
            headers=self._headers,
            timeout=None,  # noqa: S113 - `ask` limits the whole.
            limits=httpx.Limits(),
            follow_redirects=False,
            trust_env=False,
        )
        self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))
        self._faults = (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def page(self, url: str, *, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """GET a page and return its content. Raises UnansweredError: not 200, or see `ask`."""
        status, body = await self.ask("GET", url, max_bytes=max_bytes)
        if status != 200:
            raise UnansweredError(f"status {status}")
        return body

    async def ask(
        self,
        method: str,
        url: str,
        *,
        json: object = None,
        form: dict[str, str] | None = None,
        timeout_s: float | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> Answer:
        """Ask once and return the answer.

        Raises:
            UnansweredError: None came in time, it is too long, compressed, or sends us elsewhere.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self._client.stream(method, url, json=json, data=form) as response,
            ):
                return await _read(response, max_bytes)
        except TimeoutError:
            raise UnansweredError(f"no complete answer within {limit_s:g} s") from None
        except self._faults as error:
            raise UnansweredError(self._reason(error)) from None

    def _reason(self, error: BaseException) -> str:
        """Return the cause of a failed exchange in words, out of the layers' wrappers."""
        for cause in _causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                reason = f"its certificate is not accepted: {cause.verify_message.rstrip('.')}"
                if cause.verify_code in _UNSIGNED:
                    reason += f" ({self._ca_setting} names the authority to trust)"
                return reason
            if isinstance(cause, ssl.SSLError):
                if cause.reason in _NOT_TLS:
                    return "what answers there speaks no TLS: is it http://?"
                return f"TLS: {cause.reason or cause}"
            if isinstance(cause, socket.gaierror):
                return cause.strerror or "the name does not resolve"
            if isinstance(cause, OSError) and cause.errno is not None:
                return os.strerror(cause.errno)
        return str(error) or "no answer"


def root_of(text: str) -> str:
    """Return the URL of a server as it is asked, which may have a path, without a slash at its end.

    Raises:
        ConfigError: It is none. The message reads on from the name of the setting.
    """
    if "@" in text:  # What stands before it may be a password.
        raise ConfigError("has an @: a URL must not carry credentials")
    reason = f"is {text!r}, must be http://host:port or https://host:port"
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise ConfigError(reason) from None
    if not known or parts.query or parts.fragment or any(word <= " " for word in text):
        raise ConfigError(reason)
    return text.rstrip("/")


async def _read(response: "httpx.Response", max_bytes: int) -> Answer:
    if response.is_redirect:
        raise UnansweredError(f"status {response.status_code}: a redirect, which is not followed")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise UnansweredError("the answer is compressed, which was not asked for")
    body = bytearray()
    async for data in response.aiter_raw():
        body += data
        if len(body) > max_bytes:
            raise UnansweredError(f"the answer is larger than {max_bytes} bytes")
    return Answer(response.status_code, bytes(body))


def _causes(error: BaseException) -> "Iterator[BaseException]":
    """Yield an exception and its causes, the innermost first."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _causes(one)
    inner = error.__cause__ or error.__context__
    if inner is not None:
        yield from _causes(inner)
    yield error
