"""The documentation as a site: `make docs` writes it to build/docs.

The pages are README.md and those of this folder and its appendix, as they are. Each warning is an error, so a link to a page,
a heading or a file that is not there stops the build. Nothing is fetched.
"""

from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
PARTS = {
    "Start": ("choosing", "deployment", "kubernetes", "limits"),
    "Use": ("serving", "failures", "models", "http3"),
    "Operate": (
        "fleet",
        "behind_a_gateway",
        "scale",
        "administration",
        "operations",
        "tenants",
        "admission",
        "troubleshooting",
    ),
    "Understand": ("scheduling", "predictors", "simulator", "architecture"),
    "Measured": ("results", "live", "engines"),
    "Appendix": (
        "appendix/settings",
        "appendix/routes",
        "appendix/packages",
        "appendix/metrics",
        "appendix/alerts",
        "appendix/topologies",
        "appendix/failures",
        "appendix/balance",
        "appendix/prefill",
        "appendix/predictors",
        "appendix/overload",
        "appendix/scale",
        "appendix/live",
        "appendix/models",
        "appendix/doctor",
        "appendix/mistakes",
        "appendix/log",
        "appendix/engines",
        "appendix/real_balance",
        "appendix/suites",
        "appendix/costs",
    ),
}
AROUND = ("CONTRIBUTING", "CHANGELOG", "traces/public/README")

project = "BalanceRoute"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = [
    *(f"{page}.md" for page in AROUND),
    "README.md",
    "docs/*.md",
    "docs/appendix/*.md",
]
myst_heading_anchors = 4
highlight_language = "none"
html_theme = "furo"
html_title = project


def _add_contents(_: Sphinx, page: str, source: list[str]) -> None:
    """Give the first page the table of contents, which the site shows on each page."""
    if page == root_doc:
        for part, names in PARTS.items():
            source[0] += _contents(part, tuple(f"docs/{name}" for name in names))
        source[0] += _contents("Project", AROUND)


def _contents(part: str, pages: tuple[str, ...]) -> str:
    lines = "\n".join(pages)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {part}\n\n{lines}\n```\n"


def setup(app: Sphinx) -> None:
    """Register what this file adds to a build."""
    app.connect("source-read", _add_contents)
