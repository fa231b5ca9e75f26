"""Forms must not carry what steers KV transfer, however a part is spelled."""

from typing import TYPE_CHECKING

import pytest
from tests.support.site import Site, served

from balanceroute.proxy.live.openai.body import BodyError
from balanceroute.proxy.live.openai.form_body import refuse_internal_parts

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import HttpRequest, Reply

TRANSCRIPTIONS = "/v1/audio/transcriptions"
FORM = b"multipart/form-data; boundary=B"
NAMED = b'Content-Disposition: form-data; name="vllm_xargs"'
SOUND = b'Content-Disposition: form-data; name="file"; filename="a.wav"'
XARGS = b'{"kv_transfer_params": "x"}'
REFUSED = "vllm_xargs must not have kv_transfer_params"


def form(*parts: tuple[bytes, bytes]) -> bytes:
    return b"".join(b"--B\r\n%b\r\n\r\n%b\r\n" % part for part in parts) + b"--B--\r\n"


def said(content_type: bytes, body: bytes) -> str:
    """Return what is said of a form; empty if it passes."""
    try:
        refuse_internal_parts([(b"content-type", content_type)], body)
    except BodyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (NAMED, XARGS),
        (NAMED, b' \r\n{"a": 1, "kv_transfer\\u005fparams": {"do_remote_decode": true}}'),
        (NAMED, b'{"a": "\xe9", "kv_transfer_params": 1}'),
        (NAMED.lower() + b"\r\nContent-Type: application/json", XARGS),
        (b"content-disposition: form-data; name=vllm_xargs", XARGS),
        (b"content-disposition: form-data; name*=utf-8''vllm%5Fxargs", XARGS),
        (b'content-disposition: form-data; NAME*0="vllm_"; name*1="xargs"', XARGS),
        (SOUND + b"\r\n" + NAMED, XARGS),
        (NAMED + b"\r\n" + SOUND, XARGS),
    ],
)
def test_members_that_steer_kv_transfer_are_refused(head: bytes, text: bytes) -> None:
    assert said(FORM, form((SOUND, b"\x00--\xff"), (head, text))) == REFUSED
    assert said(b'multipart/form-data; charset=UTF-8; boundary="B"', form((head, text))) == REFUSED


@pytest.mark.parametrize(
    "body",
    [
        form((SOUND, XARGS), (NAMED, b'{"mine": 1}')),
        form((NAMED, b"no JSON"), (NAMED, b"")),
        form((b"x", XARGS)),
        b"--B\r\nno end",
        XARGS,
        b"",
    ],
)
def test_other_forms_pass(body: bytes) -> None:
    assert said(FORM, body) == ""
    assert said(b"multipart/form-data", body) == ""


def test_what_an_engine_would_read_otherwise_is_refused() -> None:
    body = form((NAMED, XARGS))
    assert said(FORM + b"; charset=utf-16", body) == "the form's charset must be utf-8"
    assert said(FORM, b"--B\r\n" * 3_000) == "the form has more than 2000 parts"
    long = form((b"a: " + bytes(20_000).replace(b"\0", b"b") + b"\r\n" + NAMED, XARGS))
    assert said(FORM, long) == "the head of a part of the form is too long"
    deep = form((NAMED, b"[" * 100_000))
    assert said(FORM, deep) == "vllm_xargs is nested too deeply"
    with pytest.raises(BodyError):
        refuse_internal_parts([(b"content-type", b"a/b"), (b"content-type", FORM)], body)


@served()
async def test_a_form_that_steers_kv_transfer_reaches_no_engine(site: Site) -> None:
    """An engine ends when such members are no object: one form would take down every prefiller."""

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.send(200, [(b"content-type", b"application/json")], b"{}")

    site.handlers[TRANSCRIPTIONS.encode()] = answer
    headers = [(b"content-type", FORM)]
    parts = (SOUND, b"\x00"), (b'Content-Disposition: form-data; name="model"', b"tiny")
    refused = await site.post(TRANSCRIPTIONS, form(*parts, (NAMED, XARGS)), headers)
    assert (refused.status, refused.json["error"]["message"]) == (400, REFUSED)
    assert refused.json["error"]["param"] == "vllm_xargs"
    assert not site.received("prefill", TRANSCRIPTIONS)
    whole = form(*parts, (NAMED, b'{"mine": 1}'))
    passed = await site.post(TRANSCRIPTIONS, whole, headers)
    assert passed.status == 200
    (seen,) = site.received("prefill", TRANSCRIPTIONS)
    assert seen.request.body == whole
