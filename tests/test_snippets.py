"""Every command and file that README.md and docs/ show works as shown, or says why it cannot run here.

Commands that can run do so in a folder of their own, with this repository's traces and topologies in it and an
emulated fleet and its proxy at work; their addresses stand in for those of the page. The others, and `serve`
and `up`, are parsed by the real parsers. A reader's patience is not needed: `--requests` of a replay is cut.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.script import commands_of
from tests.snippets import Block, blocks
from tests.support.soak.proxy_process import ProxyProcess, running_proxy

from balanceroute.proxy.cli import command_line
from balanceroute.proxy.cli.serve import flags_given
from balanceroute.proxy.lab.emulate.process import emulated_engines
from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.topologies.topology import read_topology
from balanceroute.traces import TraceRequest, write_native

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HAND_WRITTEN = sorted(DOCS.glob("*.md"))
APPENDIX = sorted((DOCS / "appendix").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *HAND_WRITTEN, *APPENDIX]
BLOCKS = [block for page in PAGES for block in blocks(page)]
SHOWN = [block for block in BLOCKS if block.is_commands]
TOPOLOGIES = [block for block in BLOCKS if block.kind == "toml"]
ENGINES = (
    "emulate --prefillers 1 --ranks 2 --time-scale 200 --port 0 --json-ready --exit-with-stdin"
)
PROGRAMS = ("reproduce", "bench", "checks", "faults.py")  # Scripts of many commands.
REPLAYED = "6"
LOGGED = "200"  # What docs/serving.md replays for the log that it then simulates.


def _name(page: Path) -> str:
    """Return what a test of a page is called."""
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which a reader may be: the repository's data, and files that pages name."""
    path = tmp_path_factory.mktemp("reader")
    for name in ("traces", "topologies", "scripts"):
        (path / name).symlink_to(ROOT / name)
    (path / "build").mkdir()
    write_native(
        path / "my.jsonl", (TraceRequest(10**8 * i, 300 + i, 5 + i % 40) for i in range(300))
    )
    return path


@pytest.fixture(scope="module")
def proxy(folder: Path) -> Iterator[ProxyProcess]:
    """Run emulated engines with a proxy in front, which logs where pages say."""
    command = [sys.executable, "-m", "balanceroute.proxy", *ENGINES.split()]
    with emulated_engines(command) as engines:
        urls = {
            role: [str(url) for url in given]
            for role, given in engines.items()
            if isinstance(given, list)
        }
        flags = ["--port", "0", "--admin-port", "0", "--connector", "nixl"]
        for role in ("prefill", "decode"):
            flags += [f"--{role}", *urls[role]]
        known = urls["prefill"] + urls["decode"]
        with running_proxy(flags, engines=known, folder=folder) as process:
            (folder / "req.log").symlink_to(process.log)
            load = f"--target http://127.0.0.1:{process.port} --emulation {urls['decode'][0]}"
            trace = f"--trace {folder}/my.jsonl --requests {LOGGED} --concurrency 32"
            assert command_line.run(["replay", *load.split(), *trace.split()]) == 0
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("DECODE_URL", urls["decode"][0])
                yield process


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_what_a_page_shows_works(
    page: Path, folder: Path, proxy: ProxyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that was no trace, and a topology that was refused."""
    monkeypatch.chdir(folder)
    for block in blocks(page):
        if block.kind == "toml":
            file = folder / "shown.toml"
            file.write_text(block.text)
            make_config(read_topology(file), {})
        if block.is_commands:
            for words in block.commands():
                perform(words, block, proxy, monkeypatch)


def perform(
    words: list[str], block: Block, proxy: ProxyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a command, or parse it if it cannot run here."""
    words = [word for word in words if word not in {"&", "..."}]
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, here(value, proxy))
    if not words:
        return
    command, *rest = words
    parse(words, block)
    if block.not_run is not None or (command == "balanceroute" and rest[0] in {"serve", "up"}):
        return
    if command == "balanceroute":
        status = command_line.run([here(word, proxy) for word in shortened(rest)])
    elif command == "curl":
        flags = ["--silent", "--show-error", "--fail-with-body"]
        line = [os.path.expandvars(here(word, proxy)) for word in words]
        status = subprocess.run([*line, *flags], check=False, timeout=30).returncode
    elif command == "cp":
        shutil.copy(*rest)
        status = 0
    else:
        pytest.fail(f"{block.place}: no way to run {command} here; mark the block as not run")
    assert status == 0, f"{block.place}: {' '.join(words)}"


def parse(words: list[str], block: Block) -> None:
    """Check all that can be told of a command without running it."""
    command, *rest = words
    named = [word for word in words if word.startswith(("scripts/", "topologies/", "traces/"))]
    for name in named:
        assert (ROOT / name).exists(), f"{block.place}: no {name}"
    if command.startswith("scripts/"):
        assert os.access(ROOT / command, os.X_OK), f"{block.place}: {command} is not executable"
    if command == "make":
        targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(rest) <= set(targets), block.place
    elif command == "python" and named:
        source = source_of(rest)
        for word in rest[1:]:
            assert not word.startswith("--") or f'"{word}"' in source, f"{block.place}: {word}"
    elif command == "balanceroute":
        chosen = command_line.make_parser().parse_args(rest)
        if rest[0] == "serve" and "..." not in block.text:
            given = None if chosen.topology is None else read_topology(chosen.topology)
            make_config(given, flags_given(chosen))


def source_of(words: list[str]) -> str:
    """Return the source of a script; of one with commands, that of the command's module."""
    program, *rest = words
    name = program.removeprefix("scripts/")
    if name in PROGRAMS and rest == ["--list"]:
        program = "scripts/commands.py"
    elif name in PROGRAMS and rest:
        commands = commands_of(name)
        assert rest[0] in commands, f"{program} has no command {rest[0]}"
        program = f"scripts/{commands[rest[0]].replace('.', '/')}.py"
    return (ROOT / program).read_text()


def here(word: str, proxy: ProxyProcess) -> str:
    """Put this proxy's address for that of the page."""
    host = r"(?:127\.0\.0\.1|localhost|proxy)"
    word = word.replace("http://10.0.0.9:8000", os.environ["DECODE_URL"])
    word = re.sub(rf"{host}:8000", f"127.0.0.1:{proxy.port}", word)
    return re.sub(rf"{host}:9000", f"127.0.0.1:{proxy.admin_port}", word)


def shortened(words: list[str]) -> list[str]:
    """Let a replay send a few requests."""
    if words[0] == "replay":
        place = words.index("--requests") + 1
        return [*words[:place], REPLAYED, *words[place + 1 :]]
    return words


def test_pages_have_commands_that_run_and_blocks_that_cannot_have_a_reason() -> None:
    assert len(SHOWN) > 20
    assert len(TOPOLOGIES) >= 1
    ran = [block for block in SHOWN if block.not_run is None]
    assert len(ran) >= 6, [block.place for block in ran]
    marks = sum(len(re.findall(r"<!-- not run: ", page.read_text())) for page in PAGES)
    assert marks == sum(block.not_run is not None for block in SHOWN)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=_name)
def test_source_files_that_a_page_names_are_there(page: Path) -> None:
    folders = "proxy|predictors|engine_patch|topologies|traces|scripts|tests|docs"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=_name)
def test_commands_of_scripts_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for program in PROGRAMS:
        named = re.findall(rf"scripts/{re.escape(program)} ([a-z][\w-]*)", text)
        assert set(named) <= commands_of(program).keys()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=_name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_flags_that_are_offered_to_users_of_other_routers_are_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    offered = [row.split("|")[-2] for row in re.findall(r"(?m)^\| .* \|$", text)]
    flags = {flag for cell in offered for flag in re.findall(r"--[a-z][a-z0-9-]+", cell)}
    parser = command_line.make_parser(["serve"])

    def known(flag: str) -> bool:
        with pytest.raises(SystemExit):
            parser.parse_args(["serve", flag, "--no-such-flag"])
        return "unrecognized arguments: --no-such-flag" in capsys.readouterr().err

    assert known("--port")
    assert not known("--worker-urls")
    assert len(flags) > 30
    assert [flag for flag in sorted(flags) if not known(flag)] == []


@pytest.mark.parametrize(("page", "limit"), [("README.md", 900), ("docs/choosing.md", 1_500)])
def test_what_a_stranger_reads_first_is_short(page: str, limit: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= limit


def test_tables_are_in_the_appendix_and_pages_are_short() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in HAND_WRITTEN}
    assert max(words.values()) <= 6_000, words
    assert sum(words.values()) <= 36_000, words


def test_the_first_page_leads_to_all_others() -> None:
    linked = set(re.findall(r"docs/(\w+)\.md", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert linked == {page.stem for page in HAND_WRITTEN}


def test_the_site_has_every_page_once() -> None:
    lines = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    parts = re.search(r"(?s)^PARTS = (\{.*?^\})", lines, re.MULTILINE)
    assert parts is not None
    named = [name for names in ast.literal_eval(parts[1]).values() for name in names]
    pages = (page.relative_to(DOCS).with_suffix("") for page in (*HAND_WRITTEN, *APPENDIX))
    assert sorted(named) == sorted(map(str, pages))


def test_a_wrong_command_is_found(
    tmp_path: Path, proxy: ProxyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    for text in (
        "    balanceroute simulate --trase x\n",
        "    curl 127.0.0.1:9000/admin/nothing\n",
        "    make dance\n",
        "<!-- not run: far away -->\n\n    balanceroute serve --bach 7\n",
        "    python scripts/absent.py\n",
        "<!-- not run: slow -->\n\n    scripts/faults.py chaos\n",
    ):
        page.write_text(f"Look:\n\n{text}")
        (block,) = blocks(page)
        (words,) = block.commands()
        with pytest.raises((AssertionError, SystemExit)):
            perform(words, block, proxy, monkeypatch)


@pytest.mark.extended  # A kernel takes six seconds; tests/lab/sim/test_api.py calls the same functions.
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(DOCS / "simulate.ipynb", as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=where).execute()
    told = {
        kind: value
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        for kind, value in output.get("data", {}).items()
    }
    assert "idle_fraction" in told["text/html"]
    assert told["image/png"]
    assert told["text/plain"].startswith("[PolicyResult('mine:policy', idle_fraction=0.")
