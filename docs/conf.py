"""Sphinx's settings for `make site`, which writes these pages, README.md and
the pages they link to as HTML.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

project = "trainworks"
extensions = ["myst_parser"]
# Pages link to each other by path, as a code host needs it. So the source
# folder is the root of the repository.
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/adr/*.md",
    "docs/platforms/*.md",
    "docs/tables/*.md",
    "*/README.md",
    "*/CHANGELOG.md",
    "examples/*/README.md",
    "tests/gpu/README.md",
    "benchmarks/results.md",
]
exclude_patterns = [".*", "build", "dist"]
myst_heading_anchors = 6
nitpicky = True
# Typographic dashes would change `--option`.
smartquotes = False
html_theme = "furo"
html_title = project
html_show_copyright = False

NOT_SEARCHED = (
    "docs/adr/",
    "docs/tables/",
    "CHANGELOG",
    "launcher/CHANGELOG",
    "smdistributed/CHANGELOG",
    "AGENTS",
    "CONTRIBUTING",
    "benchmarks/",
    "tests/",
)
"""Beginnings of the names of pages that the search leaves out: a user looks for
how to do something.
"""

LINK = re.compile(r"\[([^]]+)\]\(([^)#]+)(#[^)]*)?\)")


def write_llms(app: Sphinx, error: Exception | None) -> None:
    """Write ``llms.txt`` (llmstxt.org) from the tables of the index: each page
    with what a reader wants of it.
    """
    if error:
        return
    source = Path(app.srcdir, "docs", "index.md")
    lines = [
        "# trainworks",
        "",
        (
            "> Build, test and launch container images for distributed training on SageMaker, Slurm"
            " and Kubernetes."
        ),
    ]
    for row in source.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if row.startswith("| I want to"):
            lines += ["", "## Pages" if "## Pages" not in lines else "## Optional", ""]
        elif row.startswith("|") and LINK.search(row):
            for name, path, anchor in LINK.findall(cells[1]):
                page = (source.parent / path).resolve().relative_to(app.srcdir).with_suffix(".html")
                lines.append(f"- [{name}]({page.as_posix()}{anchor}): {cells[0]}")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def leave_out_of_the_search(_app: Sphinx, environment: BuildEnvironment) -> None:
    """Mark the pages for maintainers, and long tables, as Sphinx's own field ``nosearch`` does."""
    for page in environment.found_docs:
        if page.startswith(NOT_SEARCHED):
            environment.metadata[page]["nosearch"] = "yes"


def setup(app: Sphinx) -> None:
    """Add what the settings above cannot say."""
    app.connect("env-updated", leave_out_of_the_search)
    app.connect("build-finished", write_llms)
