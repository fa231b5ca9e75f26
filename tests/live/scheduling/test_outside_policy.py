"""A policy from outside the repository, before engines."""

import sys
from pathlib import Path

import pytest
from tests.support.site import Site, play

MODULE = """
from balanceroute.proxy.core.policies import OldestFirst

made = []

def last_rank(inputs):
    made.append(inputs.ranks)
    return OldestFirst(lambda fleet, entry: inputs.ranks - 1, slots_beyond_batch=None)

def other(inputs):
    raise AssertionError
"""
BODY = {"prompt": "a b c", "max_tokens": 3, "ignore_eos": True}


def test_it_decides_and_an_administrator_can_name_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside_policy.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine = "outside_policy:last_rank"

    async def scenario(site: Site) -> None:
        for _ in range(3):
            assert (await site.post("/v1/completions", BODY)).status == 200
        served = {seen.engine for seen in site.received("decode", "/v1/completions")}
        assert served == {f"decode/{len(site.fleet.decode_urls) - 1}"}
        for name in ("outside_policy:other", "os:getcwd"):
            answer = await site.admin("/admin/policy", {"policy": name})
            assert answer.status == 400
            assert "is not the one that --policy names" in str(answer.json)
        assert (await site.admin("/admin/policy", {"policy": "jsq"})).status == 200
        assert (await site.admin("/admin/policy", {"policy": mine})).status == 200

    play(scenario, flags={"policy": mine})
    sys.modules.pop("outside_policy")
