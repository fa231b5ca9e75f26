"""The samples are installed with the package and read as what their page says."""

from importlib.resources import as_file, files

import pytest

from balanceroute.traces import detect_format, read_trace


@pytest.mark.parametrize(
    ("name", "format_name", "num_requests", "last_arrival_ns", "prompt_tokens", "output_tokens"),
    [
        ("mooncake_conversation.jsonl", "mooncake", 3000, 987000000000, 40550180, 1048832),
        ("azure_2023_conv.csv", "azure", 2000, 424259457000, 2209565, 529807),
        ("azure_2023_code.csv", "azure", 2000, 853079347000, 3973157, 59024),
    ],
)
def test_a_sample_is_read_whole(
    name: str,
    format_name: str,
    num_requests: int,
    last_arrival_ns: int,
    prompt_tokens: int,
    output_tokens: int,
) -> None:
    with as_file(files("balanceroute.traces") / "samples" / name) as path:
        assert detect_format(path) == format_name
        requests = read_trace(path)
    assert len(requests) == num_requests
    assert requests[0].arrival_ns == 0
    assert requests[-1].arrival_ns == last_arrival_ns
    assert sum(request.prompt_tokens for request in requests) == prompt_tokens
    assert sum(request.output_tokens for request in requests) == output_tokens


def test_the_mooncake_sample_keeps_its_prefix_blocks() -> None:
    with as_file(files("balanceroute.traces") / "samples" / "mooncake_conversation.jsonl") as path:
        requests = read_trace(path)
    # A block is 512 tokens, the last one perhaps partly filled.
    assert all(len(request.hash_ids) == -(-request.prompt_tokens // 512) for request in requests)
