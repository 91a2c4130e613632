"""Sphinx's settings for `make site`, which writes these pages, README.md and the pages they link to as HTML."""

project = "trainworks"
extensions = ["myst_parser"]
# Pages link to each other by path, as a code host needs it. So the source folder is the root of the repository.
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/adr/*.md",
    "docs/platforms/*.md",
    "*/README.md",
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
