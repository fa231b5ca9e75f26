"""The soak in small: processes, sockets, clients that leave, engines that fail, and nothing left."""

from dataclasses import replace
from pathlib import Path

from tests.native import needs_native
from tests.support.soak.run import SoakSettings, soak

SMALL = SoakSettings(requests=150, warm_up=10, afterwards=10, seed=1, wait_for_idle=False)


def test_nothing_is_left_behind_and_every_answer_is_right_or_a_true_error(tmp_path: Path) -> None:
    report = soak(replace(SMALL, native="off"), tmp_path)
    assert not report.wrong, report.text()
    rows = {name.strip(): value for name, value, _ in report.rows}
    # What a run without faults and departures would look like.
    assert rows["left"] != "0"
    assert rows["retries"] != "0"
    assert rows["requests with faults"] == "150"


@needs_native
def test_nor_is_it_where_streams_are_moved_natively(tmp_path: Path) -> None:
    report = soak(replace(SMALL, native="require"), tmp_path)
    assert not report.wrong, report.text()
    rows = {name.strip(): value for name, value, _ in report.rows}
    assert rows["events moved natively"] != "0"
