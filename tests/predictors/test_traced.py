"""Requests of a trace as predictors see them: keys that recur, and nothing of the future."""

from dataclasses import replace

from balanceroute.predictors.past import features_of, past_requests
from balanceroute.traces import TraceRequest


def request(*ids: int, output_tokens: int = 5) -> TraceRequest:
    return TraceRequest(2_000_000_000, 100, output_tokens, ids)


def test_requests_with_the_same_blocks_have_all_keys_in_common() -> None:
    assert features_of(request(1, 2, 3)).keys == features_of(request(1, 2, 3)).keys


def test_requests_that_begin_alike_have_only_the_later_keys_in_common() -> None:
    one, other = features_of(request(1, 2, 3, 4)).keys, features_of(request(1, 2, 3, 5)).keys
    assert one[0] != other[0]
    assert one[-1] == other[-1]
    assert set(one).isdisjoint(features_of(request(7, 2, 3, 4)).keys)


def test_keys_are_the_same_in_every_process() -> None:
    assert features_of(request(1)).keys == (18_232_024_504_446_223_411,)


def test_a_request_without_blocks_has_no_keys() -> None:
    assert features_of(request()).keys == ()


def test_features_know_nothing_of_the_output() -> None:
    known = request(1, 2)
    assert features_of(known) == features_of(replace(known, output_tokens=900))


def test_past_requests_ended_after_their_last_token_and_failed_ones_are_left_out() -> None:
    (past,) = past_requests([request(1), request(1, output_tokens=0)], token_s=0.1)
    assert (past.arrival_s, past.finished_s, past.output_tokens) == (2.0, 2.5, 5)


def test_the_clients_limit_is_known() -> None:
    assert features_of(request(1)).max_tokens is None
    assert features_of(replace(request(1), max_tokens=512)).max_tokens == 512
