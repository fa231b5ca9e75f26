"""The header: the engine's port from its command line, and no guess where that does not tell."""

import pytest

from balanceroute.engine_patch.hooks import http_port


@pytest.mark.parametrize(
    ("words", "port"),
    [
        ("vllm serve model --port 8101 --dtype float32", 8101),
        ("vllm serve model --port=8101", 8101),
        ("vllm serve model --port 1 --port 2", 2),
        ("vllm serve model", 8000),
        ("/x/vllm/entrypoints/openai/api_server.py --model m", 8000),
        ("vllm serve model --config engine.yaml", None),
        ("vllm serve model --config=engine.yaml", None),
        ("vllm serve model --config engine.yaml --port 7", 7),
        ("vllm serve model --headless --data-parallel-start-rank 4", None),
        ("vllm serve model --uds /run/engine", None),
        ("vllm serve model --port", None),
        ("vllm serve model --port http", None),
        ("vllm serve model --port ²", None),
        ("pytest -q", None),
        ("", None),
    ],
)
def test_the_port_of_a_command_line(words: str, port: int | None) -> None:
    assert http_port(words.split()) == port
