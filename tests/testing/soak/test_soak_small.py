"""The soak in small: processes, sockets, clients that leave, engines that fail, and nothing left."""

from pathlib import Path

from balanceroute.proxy.testing.soak.run import SoakSettings, soak


def test_nothing_is_left_behind_and_every_answer_is_right_or_a_true_error(tmp_path: Path) -> None:
    settings = SoakSettings(requests=150, warm_up=10, afterwards=10, seed=1, wait_for_idle=False)
    report = soak(settings, tmp_path)
    assert not report.wrong, report.text()
    rows = {name.strip(): value for name, value, _ in report.rows}
    # What a run without faults and departures would look like.
    assert rows["left"] != "0"
    assert rows["retries"] != "0"
    assert rows["requests with faults"] == "150"
