"""The settings of HTTP/3."""

from dataclasses import dataclass

from balanceroute.proxy.live.settings.setting import choice, integer, switch, words
from balanceroute.proxy.wire.quic.stream_orders import STREAM_ORDERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Http3Settings:
    """HTTP/3 beside HTTP/1.1, for clients that ask for it; needs the extra h3."""

    http3: bool = switch(
        False,
        "serve HTTP/3 too, on the same port over UDP, and say so to clients of https (Alt-Svc)",
    )
    http3_order: str = choice(
        "rr",
        "which answers of one HTTP/3 connection are sent first: in turns, first come, by deadline, "
        "by level, or levels above the usual one by deadline and the others in turns",
        words(STREAM_ORDERS),
    )
    http3_hard_deadlines: bool = switch(
        False,
        "break off an answer over HTTP/3 that was not sent within its X-Answer-Deadline-Ms",
    )
    http3_streams: int = integer(
        100, "requests that one HTTP/3 connection may have at a time", 1, 10_000
    )
    http3_handshakes: int = integer(
        32,
        "open handshakes of HTTP/3 from which on a newcomer must first show that it receives at "
        "its address; at 8 times as many newcomers are dropped",
        0,
        10_000,
    )
