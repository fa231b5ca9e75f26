"""Running engines, by the pages they show, against a topology and each other."""

import json
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.command_line import Answering, answered_by
from tests.support.certificate import CERT, KEY

from balanceroute.proxy.__main__ import main


@dataclass(frozen=True)
class Pages:
    """What an engine shows."""

    version: str = "0.32.0"
    name: str = "m"
    root: str = "weights"
    max_model_len: int = 1024
    ranks: int = 1
    block_size: int = 16
    cache_dtype: str = "auto"
    nixl: bool = True
    prompts: int = 0
    asked: int = 0
    pulls: int = 0
    key: str = ""

    def page(self, path: str) -> str | None:
        card = {"id": self.name, "root": self.root, "max_model_len": self.max_model_len}
        caches = "".join(
            f'vllm:cache_config_info{{block_size="{self.block_size}",engine="{rank}",'
            f'cache_dtype="{self.cache_dtype}",num_gpu_blocks="100"}} 1.0\n'
            for rank in range(self.ranks)
        )
        usages = "".join(
            f'vllm:kv_cache_usage_perc{{engine="{rank}"}} 0.0\n' for rank in range(self.ranks)
        )
        tokens = f"vllm:prompt_tokens_total {self.prompts}\n"
        tokens += f"vllm:external_prefix_cache_queries_total {self.asked}\n"
        nixl = f"vllm:nixl_num_descriptors_count {self.pulls}\n" if self.nixl else ""
        return {
            "/version": json.dumps({"version": self.version}),
            "/v1/models": json.dumps({"object": "list", "data": [card]}),
            "/metrics": f"# TYPE vllm:cache_config_info gauge\n{caches}{usages}{tokens}{nixl}",
        }.get(path)


MISSING = "its --kv-transfer-config is missing, or is of another connector"


@contextmanager
def engine(pages: Pages, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve the pages; yield the URL."""

    class Handler(Answering):
        def answer(self, body: bytes) -> None:
            del body
            page = pages.page(self.path)
            allowed = not pages.key or self.headers["authorization"] == f"Bearer {pages.key}"
            data = (page or "").encode()
            self.send_response(200 if page and allowed else 404 if allowed else 401)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with answered_by(Handler, tls) as url:
        yield url


@dataclass(frozen=True)
class Checked:
    """The command's answer, with the engines' names in place of their URLs."""

    status: int
    lines: list[str]


def check(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    prefill: tuple[Pages, ...] = (Pages(),),
    decode: tuple[Pages, ...] = (Pages(),),
    top: str = 'model = "m"',
    ranks: str = "",
) -> Checked:
    """Check a topology of running engines, called P0, P1 and so on, and D0."""
    with ExitStack() as stack:
        urls = {f"P{i}": stack.enter_context(engine(pages)) for i, pages in enumerate(prefill)}
        urls |= {f"D{i}": stack.enter_context(engine(pages)) for i, pages in enumerate(decode)}
        entries = "".join(
            f'[[{"prefill" if name[0] == "P" else "decode"}]]\nurl = "{url}"\n'
            f"{ranks if name[0] == 'D' else ''}\n"
            for name, url in urls.items()
        )
        path = folder / "fleet.toml"
        path.write_text(f'{top}\nconnector = "nixl"\n{entries}[proxy]\nbatch = 10\n')
        status = main(["topology", "check", str(path), "--online"])
    said = capsys.readouterr().out.replace(f"{path}: ", "")
    for name, url in urls.items():
        said = said.replace(url, name)
    return Checked(status, said.splitlines())


def test_engines_that_fit_are_told_with_their_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = check(tmp_path, capsys, decode=(Pages(ranks=2),), ranks="ranks = 2")
    assert found.status == 0
    assert found.lines == [
        "nothing is wrong with it; a decode rank holds 1,600 KV tokens, 160 for each of 10"
    ]


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "line"),
    [
        (
            Pages(),
            Pages(version="0.31.1"),
            2,
            "error: decode D0 and prefill P0: have vLLM 0.31.1 and 0.32.0: NIXL refuses the pair "
            '("NIXL compatibility hash mismatch")',
        ),
        (
            Pages(),
            Pages(cache_dtype="fp8"),
            2,
            "error: decode D0 and prefill P0: have cache_dtype fp8 and auto: the KV caches differ",
        ),
        (
            Pages(),
            Pages(block_size=32),
            0,
            "note: decode D0 and prefill P0: have block_size 32 and 16: not every connector converts",
        ),
        (
            Pages(root="/old"),
            Pages(),
            2,
            "error: decode D0 and prefill P0: have weights weights and /old of 'm': NIXL refuses the pair "
            '("NIXL compatibility hash mismatch")',
        ),
        (
            Pages(),
            Pages(max_model_len=512),
            0,
            "note: decode D0 and prefill P0: have max_model_len 512 and 1024 of 'm'",
        ),
        (Pages(name="other"), Pages(), 2, "error: prefill P0: does not serve 'm', but other"),
        (Pages(), Pages(ranks=3), 2, "error: decode D0: has 3 data-parallel ranks, the topology 1"),
        (Pages(), Pages(nixl=False), 2, f"error: decode D0: has no metrics of NIXL: {MISSING}"),
        (
            Pages(prompts=9, nixl=False),
            Pages(prompts=9, asked=9),
            2,
            f"error: prefill P0: computed prompts and asked no KV connector for any: {MISSING}",
        ),
        (
            Pages(pulls=3),
            Pages(pulls=3),
            0,
            "note: prefill P0: has pulled KV caches since its start, as decode engines do: is it one?",
        ),
        (Pages(key="secret"), Pages(), 2, "error: prefill P0: /version: status 401"),
    ],
)
def test_what_does_not_fit_is_told_with_the_engines(
    prefill: Pages,
    decode: Pages,
    status: int,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = check(tmp_path, capsys, prefill=(prefill,), decode=(decode,))
    assert found.status == status
    assert [said for said in found.lines if "nothing is wrong" not in said] == [line]


def test_a_rank_too_small_for_the_longest_context_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = Pages(max_model_len=2000)
    found = check(tmp_path, capsys, prefill=(replace(long, block_size=32),), decode=(long,))
    assert "note: decode D0: holds 1,600 KV tokens, less than its max_model_len (2,000)" in (
        found.lines
    )


def test_one_pair_stands_for_all_of_the_same_two_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Pages(version="0.31.1")
    found = check(tmp_path, capsys, prefill=(Pages(), Pages(), old), decode=(Pages(), old))
    pairs = [line for line in found.lines if "have vLLM" in line]
    assert [line.partition(": NIXL")[0] for line in pairs] == [
        "error: decode D1 and prefill P0: have vLLM 0.31.1 and 0.32.0",
        "error: decode D0 and prefill P2: have vLLM 0.32.0 and 0.31.1",
    ]


def test_an_engine_that_does_not_answer_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(Pages()) as url, engine(Pages()) as other:
        pass  # Their ports are closed from here on.
    path = tmp_path / "fleet.toml"
    path.write_text(f'[[prefill]]\nurl = "{url}"\n[[decode]]\nurl = "{other}"\n')
    assert main(["topology", "check", str(path), "--online"]) == 2
    said = capsys.readouterr().out
    assert f"error: prefill {url}: /version: " in said
    assert f"error: decode {other}: /version: " in said


def test_emulated_engines_are_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "check", "emulated-2p8d", "--online"]) == 2
    assert "its engines are emulated" in capsys.readouterr().err


@pytest.mark.parametrize("ids", ["[5]", "[0, 1]"])
def test_a_rank_that_an_engine_does_not_have_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ids: str
) -> None:
    found = check(tmp_path, capsys, ranks=f"rank_ids = {ids}")
    assert found.status == 2
    rank = ids[-2]
    assert f"error: decode D0: tells of no data-parallel rank {rank}, but of 0" in found.lines


def test_https_engines_are_asked_by_the_topologys_authority_or_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text(CERT)
    key.write_text(KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    path = tmp_path / "fleet.toml"
    words = ["topology", "check", str(path), "--online"]
    with engine(Pages(), context) as url, engine(Pages(), context) as other:
        fleet = f'[[prefill]]\nurl = "{url}"\n[[decode]]\nurl = "{other}"\n[proxy]\n'
        path.write_text(fleet)
        assert main(words) == 2
        reason = "/version: its certificate is not accepted: self-signed certificate"
        assert f"error: prefill {url}: {reason} (--ca-file names" in capsys.readouterr().out
        assert main([*words, "--ca-file", str(cert)]) == 0
        path.write_text(f'{fleet}engine_ca_file = "{cert}"\n')
        assert main(words) == 0
        path.write_text(f"{fleet}insecure_engines = true\n")
        assert main(words) == 0


def test_an_authority_is_for_running_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "check", "emulated-2p8d", "--ca-file", "a"]) == 2
    assert "--ca-file means nothing without --online" in capsys.readouterr().err
