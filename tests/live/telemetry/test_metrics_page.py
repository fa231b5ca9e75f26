"""A running proxy exports what docs/appendix/metrics.md lists."""

from tests.script import script
from tests.support.site import Site, served


@served()
async def test_a_running_proxy_exports_nothing_else(site: Site) -> None:
    listed = script("reproduce.reference")
    answer = await site.post("/v1/completions", {"model": "tiny", "prompt": "t1", "max_tokens": 2})
    assert answer.status == 200
    known = listed.labels_by_family(listed.full_page())
    found = listed.labels_by_family((await site.get("/metrics")).body)
    assert len(found) > 60
    for name, (kind, meaning, labels) in found.items():
        if name.startswith("process_"):
            continue  # The client library's.
        assert known[name][:2] == (kind, meaning), name
        assert labels <= known[name][2], name
