"""The prefill leg of a connector where decode comes first (vllm-ascend's layerwise Mooncake).

The decode rank allocates its blocks, posts where they are to the address in its parameters, and
waits. The server at that address then starts the prefill, whose KV cache travels layer by layer. The
address is good for one leg and cannot be guessed, so no client can hand anything off.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from balanceroute.proxy.live.engines.engine_url import Fault, fault_of
from balanceroute.proxy.live.openai.answer import is_aborted
from balanceroute.proxy.live.openai.body import dump
from balanceroute.proxy.live.openai.errors import error_in
from balanceroute.proxy.live.openai.legs import least_tokens, prefill_body
from balanceroute.proxy.live.request.failures import Failure, What, refusal, reported
from balanceroute.proxy.live.request.relay import BufferedLeg
from balanceroute.proxy.live.request.session_host import LegFailed, LegSucceeded, RemotePrefillEnded
from balanceroute.proxy.wire.messages import WireFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.live.engines.instances import Prefiller, Target
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.openai.shape import Api
    from balanceroute.proxy.live.request.session_host import Host
    from balanceroute.proxy.wire.http1.client import Call
    from balanceroute.proxy.wire.messages import Headers, WireError


class Died(Protocol):
    """Who is told that an engine died; see `AttemptOwner.engine_died`."""

    def __call__(self, engine: "Prefiller", sent_s: float, *, said: bool) -> bool: ...  # noqa: D102


class HandOff:
    """One decode leg's prefill.

    Args:
        body: The prefill leg's body is made of it.
        members: Changed by an earlier binding; see `resumed_members`.
        other_than: Asked only if there is no other prefiller.
        prefilled: Called with the prefiller's answer once the prefill is done.
        refused: Called with a prefiller's 4xx, which is the client's: no other one would do it.
        failed: Called when no prefiller did it: the decode leg waits in vain.
        died: Called with a prefiller that died of it or beside it, when it was asked, and whether it
            says so itself; returns whether another one may have the prompt.
        crashed: Called with an exception in the handling of the prefill's answer.
    """

    __slots__ = (
        "_api",
        "_asked_s",
        "_body",
        "_call",
        "_crashed",
        "_died",
        "_failed",
        "_headers",
        "_host",
        "_members",
        "_number",
        "_params",
        "_prefilled",
        "_prefiller",
        "_refused",
        "_tries",
    )

    def __init__(
        self,
        host: "Host",
        api: "Api",
        body: "RequestBody",
        members: Mapping[str, object],
        headers: bytes,
        *,
        number: "RequestId",
        other_than: "Prefiller | None",
        prefilled: "Callable[[bytes], None]",
        refused: "Callable[[Failure], None]",
        failed: "Callable[[Fault], None]",
        died: "Died",
        crashed: "Callable[[Exception], None]",
    ) -> None:
        self._host = host
        self._number = number
        self._api = api
        self._body = body
        self._members = members
        self._headers = headers
        self._prefilled = prefilled
        self._refused = refused
        self._failed = failed
        self._died = died
        self._crashed = crashed
        self._params: Mapping[str, Any] = {}
        self._prefiller = other_than
        self._call: Call | None = None
        self._asked_s = 0.0
        self._tries = 0

    @property
    def prefiller(self) -> "Prefiller | None":
        """Who prefills, or did so last."""
        return self._prefiller

    @property
    def target(self) -> "Target | None":
        """The instance that prefills at present, if one does."""
        return None if self._call is None or self._prefiller is None else self._prefiller.target

    @property
    def taken(self) -> bool:
        """Whether the rank has called for it."""
        return bool(self._params)

    def take(self, params: Mapping[str, Any]) -> None:
        """Start the prefill with what the decode rank posted. A repeated post changes nothing."""
        if self._params:
            return
        self._params = params
        self._send()

    def move(self) -> None:
        """Prefill elsewhere: the prefiller that does it was removed."""
        self.abort()
        self._send()

    def abort(self) -> None:
        """Stop the prefill."""
        self._done()

    def _send(self) -> None:
        before = None if self._prefiller is None else self._prefiller.id
        prefiller = self._host.choose_prefiller(self._number, before)
        if prefiller is None:
            self._failed(Fault.CONNECT)
            return
        self._tries += 1
        self._prefiller = prefiller
        legs = self._host.context.legs
        leg = BufferedLeg(self._answered, self._broken, legs.answer_limit_bytes)
        least = least_tokens(self._api, self._body)
        body = prefill_body(
            *(self._body, self._members, dump(self._params)),
            api=self._api,
            drop=legs.drop,
            min_tokens=least,
            past_end=not least,
        )
        self._asked_s = self._host.context.clock()
        self._call = prefiller.endpoint.request(
            b"POST",
            self._api.value.encode(),
            self._headers,
            body,
            leg,
            crashed=self._crashed,
            fresh=self._tries > 1,
        )

    def _answered(self, status: int, headers: "Headers", body: bytes) -> None:
        assert self._prefiller is not None
        self._done()
        error = error_in(body) if status == 200 else None
        status = status if error is None else error.status
        failure = refusal(status, headers, body)
        if error is not None and error.is_death:
            failure = reported(error, body)
        if failure.what is What.NO_ROUTE:
            if self._tries < self._host.context.legs.retry_attempts:
                self._send()
                return
            failure = replace(failure, what=What.REFUSED, blamed=self._prefiller.target)
        if failure.what is What.REFUSED:
            self._refused(failure)
            return
        if status == 200 and not is_aborted(self._api, body):
            self._host.report(LegSucceeded(self._prefiller.target))
            self._prefilled(body)
            return
        if status == 200 or (status >= 500 and status != 503):
            target, reason = self._prefiller.target, f"status {status}"
            self._host.report(LegFailed(target, Fault.SERVER_ERROR, reason))
        if failure.says_dead and not self._died(self._prefiller, self._asked_s, said=True):
            self._failed(Fault.SERVER_ERROR)
        else:
            self._again(Fault.SERVER_ERROR)

    def _broken(self, error: "WireError") -> None:
        assert self._prefiller is not None
        self._done()
        fault = fault_of(error)
        if error.kind is WireFault.STALE:
            self._send()
            return
        self._host.report(LegFailed(self._prefiller.target, fault, str(error)))
        if error.is_loss and not self._died(self._prefiller, self._asked_s, said=False):
            self._failed(fault)
        else:
            self._again(fault)

    def _again(self, fault: Fault) -> None:
        tries_left = self._tries < self._host.context.legs.retry_attempts
        if tries_left and self._host.may_retry("prefill", fault):
            self._send()
        else:
            self._failed(fault)

    def _done(self) -> None:
        if self._call is not None:
            assert self._prefiller is not None
            self._call.abort()  # An answer that is too long goes on otherwise.
            self._host.report(RemotePrefillEnded(self._prefiller.id))
            self._call = None
