"""What is often typed first: each line of docs/appendix/mistakes.md gets one line with the cure, and status 2."""

import re
import shlex
from pathlib import Path

import pytest
from tests.command_line import refused
from tests.script import ROOT

PAGE = (ROOT / "docs" / "appendix" / "mistakes.md").read_text(encoding="utf-8")
ROWS = re.findall(r"(?m)^\| `((?:[A-Z_]+=\S+ )?balanceroute[^`]*)` \| `+ ?(.*?) ?`+ \|$", PAGE)
ENGINES = "--prefill http://p:8000 --decode http://d:8000"
FILES = {
    "values.yaml": "proxy:\n  batch: 8\n",
    "typo.toml": '[[prefill]]\nurl = "http://p:1"\n[[decode]]\nurl = "http://d:1"\n[proxy]\npolcy = "br-0"\n',
    "open.txt": "sk-one\n",
    "own.csv": "when,in,out\n1,2,3\n",
}


def test_the_page_has_the_mistakes_that_were_seen() -> None:
    assert len(ROWS) == PAGE.count("\n| `") - PAGE.count("\n| `--batch` above") >= 41


@pytest.mark.parametrize(("typed", "said"), ROWS, ids=[typed for typed, _ in ROWS])
def test_a_first_mistake_is_told_with_its_cure(
    typed: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o644)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(typed.replace("...", ENGINES))
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    line = refused(words[1:], capsys)
    assert said in line
    assert "secret" not in line
    assert len(line) < 300
