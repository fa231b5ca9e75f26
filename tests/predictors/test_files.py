"""Predictors in files: what was saved is loaded, what is not right is refused, and nothing is lost."""

import hashlib
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.predictors import PastRequest, RequestFeatures, State, Survival, files
from balanceroute.predictors.exact_match import ExactMatch
from balanceroute.predictors.files import PredictorFileError, load, save
from balanceroute.predictors.kinds import KINDS, train
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.lab.sim.experiment import FORECASTS
from balanceroute.proxy.live.prediction import PREDICTORS

TEXTS = {"stage1": "tree\n", "stage2": "tree é\r\n"}


def document(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a state with two texts, written."""
    path = tmp_path / "model.json"
    files.write_state(path, State("any", {"trees": 2}, TEXTS))
    return path


def exact_match() -> ExactMatch:
    predictor = ExactMatch()
    for number in range(30):
        predictor.begin(RequestId(number), RequestFeatures(100 + number, keys=(number % 3,)))
        predictor.observe(RequestId(number), 5 + number)
    return predictor


@pytest.mark.parametrize(
    "predictor", [Survival([3, 1, 2]), exact_match()], ids=["survival", "exact"]
)
def test_a_predictor_is_loaded_as_it_was_saved(
    predictor: Survival | ExactMatch, tmp_path: Path
) -> None:
    path = tmp_path / "one.json"
    save(path, predictor)
    loaded = load(str(path))
    assert type(loaded) is type(predictor)
    assert loaded.state() == predictor.state()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@given(
    fields=st.dictionaries(st.text(), json_values, max_size=4),
    texts=st.dictionaries(
        st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True),
        st.text(st.characters(exclude_categories=["Cs"])),
        max_size=3,
    ),
)
def test_any_state_is_read_as_it_was_written(
    fields: dict[str, object], texts: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("state") / "one.json"
    files.write_state(path, State("any", fields, texts))
    assert files.read_state(path) == State("any", fields, texts)


def test_the_document_names_its_texts_and_their_digests(saved: Path) -> None:
    written = document(saved)
    assert (written["format"], written["version"]) == ("balanceroute-predictor", 1)
    for name, text in TEXTS.items():
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        file = f"model.{name}.{sha256[:12]}.txt"
        assert written["texts"][name] == {"file": file, "sha256": sha256}
        assert saved.with_name(file).read_bytes() == text.encode()


def test_equal_states_give_equal_bytes(saved: Path) -> None:
    before = listing(saved.parent)
    files.write_state(saved, files.read_state(saved))
    assert listing(saved.parent) == before


def test_texts_that_no_document_names_any_more_are_removed_and_others_are_not(saved: Path) -> None:
    # One that another hand put there, though the document names it.
    foreign = saved.with_name("foreign.txt")
    foreign.write_text("x")
    written = document(saved)
    written["texts"]["mine"] = {"file": "foreign.txt", "sha256": hashlib.sha256(b"x").hexdigest()}
    saved.write_text(json.dumps(written))
    kept = written["texts"]["stage2"]["file"]
    files.write_state(saved, State("any", {}, {"stage2": TEXTS["stage2"]}))
    assert set(listing(saved.parent)) == {"model.json", kept, "foreign.txt"}


NEW = State("any", {"trees": 3}, {"stage1": "a new tree", "stage2": "another"})


def on_each(
    monkeypatch: pytest.MonkeyPatch, target: Any, name: str, before: Callable[[], None]
) -> None:
    """Have something done before each call of a function."""
    call = getattr(target, name)

    def wrapped(*arguments: Any) -> Any:
        before()
        return call(*arguments)

    monkeypatch.setattr(target, name, wrapped)


# Two texts and the document are synced and renamed, with the folder synced before the document.
@pytest.mark.parametrize(
    ("target", "name", "calls_before"),
    [
        *((os, "fsync", number) for number in range(4)),
        *((Path, "replace", number) for number in range(3)),
    ],
)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_write_leaves_what_was_there(
    saved: Path,
    target: Any,
    name: str,
    calls_before: int,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = listing(saved.parent)
    calls = iter(range(10))

    def fail() -> None:
        if next(calls) == calls_before:
            raise error

    with monkeypatch.context() as patched:
        on_each(patched, target, name, fail)
        with pytest.raises((PredictorFileError, KeyboardInterrupt)) as caught:
            files.write_state(saved, NEW)
    assert files.read_state(saved) == State("any", {"trees": 2}, TEXTS)
    if isinstance(error, OSError):
        assert str(caught.value) == f"{saved}: cannot be written: No space left on device"
        assert listing(saved.parent) == old


def test_at_every_instant_there_is_the_old_predictor_or_the_new_one(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [files.read_state(saved)]
    for target, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
        on_each(monkeypatch, target, name, lambda: found.append(files.read_state(saved)))
    files.write_state(saved, NEW)
    old = found.count(found[0])
    assert found == [found[0]] * old + [NEW] * (len(found) - old)
    assert 7 <= old < len(found)
    assert files.read_state(saved) == NEW


def test_a_folder_that_cannot_be_synced_in_the_end_is_told(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10))

    def fail_last() -> None:
        if next(calls) == 4:
            raise OSError(5, "Input/output error")

    on_each(monkeypatch, os, "fsync", fail_last)
    with pytest.raises(PredictorFileError, match="may not last"):
        files.write_state(saved, NEW)
    assert files.read_state(saved) == NEW


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PredictorFileError, match="cannot be written: No such file"):
        save(tmp_path / "none" / "one.json", Survival())


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (State("any", {"x": float("nan")}), "not JSON compliant"),
        (State("any", {"x": object()}), "not JSON serializable"),
        (State("any", {}, {"a": "\ud800"}), "surrogates"),
        (State("any", {}, {"../a": "x"}), "no name of a text"),
        (State("any", {"x": "y" * 2_000}), "would take 2"),
        (State("any", {}, {"a": "y" * 2_000}), "would take 2000 bytes"),
    ],
)
def test_a_state_that_no_file_can_hold_is_refused_before_anything_is_written(
    state: State, reason: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 1_000)
    before = listing(saved.parent)
    with pytest.raises(PredictorFileError, match=reason):
        files.write_state(saved, state)
    assert listing(saved.parent) == before


GOOD = (
    '{"format": "balanceroute-predictor", "version": 1, "kind": "survival", "texts": {}, "fields": '
)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON, or cut off"),
        (b"[1, 2]", "not a predictor"),
        (b"null", "not a predictor"),
        (b'{"format": "balanceroute-trace"}', "not a predictor"),
        (b'{"kind": "survival"}', "not a predictor"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (GOOD.encode() + b'{"x": NaN}}', "NaN is not JSON"),
        (GOOD.encode() + b"[]}", "'fields' must be a dict, not list"),
        (GOOD.encode() + b"{}", "not JSON, or cut off"),
        (GOOD.encode() + b"{}}", "field 'half_life' is missing"),
        (GOOD.encode().replace(b"survival", b"oracle") + b"{}}", "unknown kind of predictor"),
        (GOOD.encode().replace(b'"survival"', b"7") + b"{}}", "'kind' must be a str"),
        (GOOD.encode().replace(b": 1,", b": 2,") + b"{}}", "version 2 is newer than this program"),
        (GOOD.encode().replace(b": 1,", b": true,") + b"{}}", "'version' must be"),
        (GOOD.encode().replace(b": 1,", b": 0,") + b"{}}", "'version' must be"),
        (GOOD.encode().replace(b'"version": 1, ', b"") + b"{}}", "'version' must be"),
        (GOOD.encode().replace(b'"texts": {}, ', b"") + b"{}}", "'texts' must be a dict"),
        (GOOD.encode() + b'{"x": "' + b"y" * 2_000 + b'"}}', "over 2000 bytes"),
    ],
)
def test_what_is_no_predictor_is_refused_with_the_path_and_the_reason(
    content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if b"yyy" in content:
        monkeypatch.setattr(files, "MAX_BYTES", 2_000)
    path = tmp_path / "one.json"
    path.write_bytes(content)
    with pytest.raises(PredictorFileError, match=reason) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("cut", [1, 2, 20, 100])
def test_a_truncated_document_is_refused(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    save(path, Survival(range(1, 100)))
    path.write_bytes(path.read_bytes()[: -1 - cut])
    with pytest.raises(PredictorFileError, match="not JSON, or cut off"):
        load(path)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("model.txt", "must have a file and its sha256"),
        ({"file": "model.txt"}, "must have a file and its sha256"),
        ({"file": 1, "sha256": "0" * 64}, "must have a file and its sha256"),
        ({"file": "model.txt", "sha256": "0" * 63}, "must have a file and its sha256"),
        ({"file": "none.txt", "sha256": "0" * 64}, "none.txt: cannot be read: No such file"),
        ({"file": "a\0.txt", "sha256": "0" * 64}, "not a plain file name"),
        ({"file": ".", "sha256": "0" * 64}, "not a plain file name"),
        ({"file": "..", "sha256": "0" * 64}, "not a plain file name"),
        ({"file": "", "sha256": "0" * 64}, "not a plain file name"),
        ({"file": "../secret", "sha256": "0" * 64}, "not a plain file name"),
        ({"file": "/etc/passwd", "sha256": "0" * 64}, "not a plain file name"),
        ({"file": "sub/model.txt", "sha256": "0" * 64}, "not a plain file name"),
        ({"file": "..\\secret", "sha256": "0" * 64}, "not a plain file name"),
    ],
)
def test_a_text_lies_beside_the_document_or_is_refused(
    entry: object, reason: str, saved: Path
) -> None:
    written = document(saved)
    written["texts"]["stage1"] = entry
    saved.write_text(json.dumps(written))
    with pytest.raises(PredictorFileError, match=reason):
        files.read_state(saved)


def test_a_changed_text_is_refused_by_its_digest(saved: Path) -> None:
    text = saved.with_name(document(saved)["texts"]["stage1"]["file"])
    text.write_bytes(text.read_bytes() + b" ")
    with pytest.raises(PredictorFileError, match=r"damaged: .*model\.json") as caught:
        files.read_state(saved)
    assert caught.value.path == text


def test_a_text_that_is_no_utf_8_is_refused(saved: Path) -> None:
    written = document(saved)
    entry = written["texts"]["stage1"]
    saved.with_name(entry["file"]).write_bytes(b"\xff")
    entry["sha256"] = hashlib.sha256(b"\xff").hexdigest()
    saved.write_text(json.dumps(written))
    with pytest.raises(PredictorFileError, match="not UTF-8"):
        files.read_state(saved)


def test_a_document_that_names_too_many_texts_is_refused(saved: Path) -> None:
    written = document(saved)
    written["texts"] |= {f"text{number}": None for number in range(20)}
    saved.write_text(json.dumps(written))
    with pytest.raises(PredictorFileError, match="names 22 texts"):
        files.read_state(saved)


def test_a_folder_a_pipe_and_nothing_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "none", "cannot be read: No such file"),
        (tmp_path / "a\0b", "cannot be read: .*null"),
    ):
        with pytest.raises(PredictorFileError, match=reason):
            load(path)
    with pytest.raises(PredictorFileError, match="not the name of a file"):
        save("", Survival())


def test_a_document_in_the_way_that_is_none_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    for content in ("[]", '{"texts": [1]}', '{"texts": {"a": 1, "b": {"file": 2}}}', "{"):
        path.write_text(content)
        save(path, Survival([1]))
        assert load(path).state() == Survival([1]).state()


# The table of the predictors that learn, and what live and simulation list of it.


PAST = [
    PastRequest(float(i), i + 1.0, RequestFeatures(8 + i % 9), 20 + i * 7 % 60) for i in range(400)
]


def test_everybody_lists_the_predictors_that_he_can_make() -> None:
    assert [*KINDS] == ["survival", "exact-match", "gbdt"]
    assert [*PREDICTORS] == ["none", "survival", "exact-match"]
    assert [*FORECASTS] == ["survival", "exact-match", "gbdt", "thirds", "oracle", "none"]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_trained_is_saved_and_restored_under_its_name(name: str) -> None:
    if name == "gbdt" and find_spec("lightgbm") is None:
        pytest.skip("lightgbm is not installed")
    KINDS[name].require()
    state = train(name, PAST).state()
    assert state.kind == name
    assert KINDS[name].restored(state).state() == state


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'crystal'; known: survival, exact-match, gbdt"):
        train("crystal", PAST)
