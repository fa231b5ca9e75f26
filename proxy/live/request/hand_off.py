"""The prefill leg of a connector where decode comes first (vllm-ascend's layerwise Mooncake).

The decode rank allocates its blocks, posts where they are to the address in its parameters, and
waits. The server at that address then starts the prefill, whose KV cache travels layer by layer. The
address is good for one leg and cannot be guessed, so no client can hand anything off.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.live.engines.engine_url import Fault, fault_of
from balanceroute.proxy.live.engines.instances import Target
from balanceroute.proxy.live.openai.answer import is_aborted
from balanceroute.proxy.live.openai.body import RequestBody, dump
from balanceroute.proxy.live.openai.errors import error_in
from balanceroute.proxy.live.openai.legs import least_tokens, prefill_body
from balanceroute.proxy.live.openai.shape import Api
from balanceroute.proxy.live.request.failures import Failure, What, refusal, reported
from balanceroute.proxy.live.request.relay import BufferedLeg
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.request.shared import LegFailed, LegSucceeded, RemotePrefillEnded
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.client import Call


class HandOff:
    """One decode leg's prefill.

    Args:
        api: The endpoint that the rank was asked at.
        body: What it was asked for, of which the prefill leg's body is made.
        prefilled: Called with the prefiller's answer once the prefill is done.
        failed: Called when the decode leg waits in vain: no prefiller did it, or one refused it with a
            4xx, which is the client's.
    """

    __slots__ = (
        *("_api", "_asked_s", "_body", "_call", "_failed", "_host", "_params", "_prefilled"),
        *("prefiller", "_session", "_tries"),
    )

    def __init__(
        self,
        session: Session,
        api: Api,
        body: RequestBody,
        *,
        prefilled: Callable[[bytes], None],
        failed: Callable[[Failure], None],
    ) -> None:
        self._session = session
        self._host = session.host
        self._api = api
        self._body = body
        self._prefilled = prefilled
        self._failed = failed
        self._params: Mapping[str, Any] = {}
        # The prefiller that works on it, or did so last.
        self.prefiller = session.silent_prefiller  # Asked again only if there is no other.
        self._call: Call | None = None
        self._asked_s = 0.0
        self._tries = 0

    @property
    def target(self) -> Target | None:
        """The instance that prefills at present, if one does."""
        return None if self._call is None or self.prefiller is None else self.prefiller.target

    @property
    def taken(self) -> bool:
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

    def _send(self) -> None:
        before = None if self.prefiller is None else self.prefiller.id
        prefiller = self._host.choose_prefiller(self._session.number, before)
        if prefiller is None:
            self._give_up(Fault.CONNECT)
            return
        self._tries += 1
        self.prefiller = prefiller
        legs = self._host.context.legs
        leg = BufferedLeg(self._answered, self._broken, legs.answer_limit_bytes)
        least = least_tokens(self._api, self._body)
        body = prefill_body(
            *(self._body, self._session.emitted.members, dump(self._params)),
            api=self._api,
            drop=legs.drop,
            min_tokens=least,
            past_end=not least,
        )
        self._asked_s = self._host.context.clock()
        self._call = prefiller.endpoint.request(
            b"POST",
            self._api.value.encode(),
            self._session.headers,
            body,
            leg,
            crashed=self._session.crashed,
            fresh=self._tries > 1,
        )

    def _answered(self, status: int, headers: Headers, body: bytes) -> None:
        assert self.prefiller is not None
        self.abort()
        error = error_in(body) if status == 200 else None
        status = status if error is None else error.status
        failure = refusal(status, headers, body)
        if error is not None and error.is_death:
            failure = reported(error, body)
        if failure.what is What.NO_ROUTE:
            if self._tries < self._host.context.legs.retry_attempts:
                self._send()
                return
            failure = replace(failure, what=What.REFUSED, blamed=self.prefiller.target)
        if failure.what is What.REFUSED:
            self._failed(failure)
            return
        if status == 200 and not is_aborted(self._api, body):
            self._host.report(LegSucceeded(self.prefiller.target))
            self._prefilled(body)
            return
        if status == 200 or (status >= 500 and status != 503):
            self._host.report(LegFailed(self.prefiller.target, Fault.SERVER_ERROR, failure.reason))
        if failure.says_dead and not self._died(said=True):
            self._give_up(Fault.SERVER_ERROR)
        else:
            self._again(Fault.SERVER_ERROR, lost=failure.says_dead)

    def _broken(self, error: WireError) -> None:
        assert self.prefiller is not None
        self.abort()
        fault = fault_of(error)
        if error.kind is WireFault.STALE:
            self._send()
            return
        self._host.report(LegFailed(self.prefiller.target, fault, str(error)))
        if error.is_loss and not self._died(said=False):
            self._give_up(fault)
        else:
            self._again(fault, lost=True)

    def _again(self, fault: Fault, *, lost: bool) -> None:
        assert self.prefiller is not None
        lost_with = self.prefiller.target if lost else None
        tries_left = self._tries < self._host.context.legs.retry_attempts
        if tries_left and self._host.may_retry("prefill", fault, lost_with=lost_with):
            self._send()
        else:
            self._give_up(fault)

    def _died(self, *, said: bool) -> bool:
        """Note that the prefiller died of it or beside it; return whether another may have the prompt."""
        assert self.prefiller is not None
        return self._session.engine_died(self.prefiller, self._asked_s, said=said)

    def _give_up(self, fault: Fault) -> None:
        self._failed(Failure(What.NO_PREFILL, fault, f"prefill failed: {fault.value}"))

    def abort(self) -> None:
        """End the exchange, if there is one."""
        if self._call is not None:
            assert self.prefiller is not None
            self._call.abort()  # An answer that is too long goes on otherwise.
            self._host.report(RemotePrefillEnded(self.prefiller.id))
            self._call = None
