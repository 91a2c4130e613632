"""Puts the pages together and lets Sphinx write them, as HTML and as manual pages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from trainworks.facts.load import load
from trainworks.facts.rows import Facts
from trainworks.inspect.catalogue import Entry, catalogue_of, render_catalogue
from website import commands, launcher, reference
from website.markdown import link

HERE = Path(__file__).resolve().parent

WRITTEN = ("README.md", "CHANGELOG.md", "launcher/README.md", "benchmarks/results.md", "docs/**/*.md")
"""Pages that people write; they are readable where the repository is, too."""

MARKS = re.compile(r"<!-- generated: ([\w-]+) -->\n(.*?)<!-- end of generated -->\n", re.DOTALL)
LINKED = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
"""The path of a link within the repository."""

Entries = tuple[Entry, ...]

SETTINGS: Mapping[str, object] = {
    "project": "trainworks",
    "author": "",
    "copyright": "",
    "extensions": ["myst_parser"],
    "myst_enable_extensions": ["deflist"],
    "myst_heading_anchors": 6,
    "nitpicky": True,
    # They would make another character of every dash of an option, and not know a word of code from a sentence.
    "smartquotes": False,
    "html_theme": "furo",
    "html_title": "trainworks",
    "html_static_path": [str(HERE / "static")],
    "html_css_files": ["site.css"],
    # A browser lets no page that it has opened from a disk read another one, which summaries would need.
    "html_show_search_summary": False,
    "html_copy_source": False,
    "html_show_sourcelink": False,
    "html_show_sphinx": False,
    "html_show_copyright": False,
    "html_theme_options": {"navigation_with_keys": True},
    "man_make_section_directory": True,
    "man_show_urls": False,
}


def write_site(root: Path, folder: Path, scratch: Path) -> int:
    """Write the site and its manual pages.

    Args:
        root: The checkout.
        folder: Where to; a site that is there already is removed.
        scratch: An empty folder for what is needed on the way.

    Returns:
        0, or 1 where Sphinx had anything to complain about: it says so on stderr.
    """
    facts = load(root)
    source = scratch / "source"
    entries = catalogue_of(facts)
    pages = pages_of(root, facts, entries)
    for name, text in pages.items():
        _put(source / name, text)
    for file in linked_files(pages, root):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, source / file)
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    settings = {**SETTINGS, "version": version, "release": version, "today": _date(root), "man_pages": manual_pages()}
    site = scratch / "site"
    status = run_sphinx("html", source, site, scratch / "doctrees", settings)
    status |= run_sphinx("man", source, site / "man", scratch / "doctrees", settings)
    # What Sphinx keeps for its next run; it has paths of this machine.
    (site / ".buildinfo").unlink()
    _put(site / reference.CATALOGUE, render_catalogue(entries, facts.templates["catalogue.html.j2"]))
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(site, folder)
    return status


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def run_sphinx(builder: str, source: Path, output: Path, doctrees: Path, settings: Mapping[str, object]) -> int:
    """Let Sphinx write pages.

    Args:
        builder: ``html`` or ``man``.
        source: The folder of the pages.
        output: Where to.
        doctrees: What was read, for the next builder.
        settings: Sphinx's, as ``conf.py`` would have them.

    Returns:
        0, or 1 after any warning: a link that leads nowhere, a page that nothing leads to, a directive that is wrong.
    """
    with patch_docutils(), docutils_namespace():
        application = Sphinx(source, None, output, doctrees, builder, dict(settings), status=None, warningiserror=True)
        application.connect("doctree-resolved", _without_links)
        application.build(force_all=True)
    return application.statuscode


def _without_links(application: Sphinx, tree: nodes.document, _name: str) -> None:
    """Leave the words of links in manual pages, where nothing can be clicked."""
    if application.builder.name == "man":
        for reference_node in list(tree.findall(nodes.reference)):
            reference_node.replace_self(reference_node.children)


def _date(root: Path) -> str:
    """Return the date that manual pages show: that of the commit, so that the same commit gives the same bytes."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    if seconds is None:
        command = ("git", "-C", str(root), "log", "-1", "--format=%ct")
        seconds = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return time.strftime("%Y-%m-%d", time.gmtime(int(seconds)))


def pages_of(root: Path, facts: Facts, entries: Entries) -> dict[str, str]:
    """Return every page of the site as Markdown, by its path: that in the repository, where it has one."""
    written = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for pattern in WRITTEN
        for path in sorted(root.glob(pattern))
    }
    return {
        "index.md": (HERE / "index.md").read_text(encoding="utf-8"),
        **{name: adapted(text, name, root, facts, entries) for name, text in written.items()},
        "docs/adr/index.md": decisions(written),
        **reference.target_pages(facts, entries),
        **commands.command_pages(),
        commands.INDEX: commands.index_page(),
        commands.STATUSES: commands.status_page(),
        launcher.PAGE: launcher.train_page(),
        reference.COMPONENTS: reference.component_page(facts),
        reference.INSTANCES: reference.instance_page(facts),
        reference.SCHEMAS: reference.schema_page(),
    }


def adapted(text: str, name: str, root: Path, facts: Facts, entries: Entries) -> str:
    """Return a page of the repository as the site shows it.

    A table that is generated into it is replaced by what the site has room for, and a link to a folder leads to the
    page that lists what is in it.
    """
    longer = {
        "usage": lambda: commands.command_table(name),
        "targets": lambda: reference.target_table(entries, name),
        "compatibility-rules": lambda: reference.rule_sections(facts),
    }
    text = MARKS.sub(lambda match: longer[match[1]]() if match[1] in longer else match[2], text)

    def to_index(match: re.Match[str]) -> str:
        path = (root / name).parent / match[1]
        return f"{match[0].rstrip('/')}/index.md" if path.is_dir() else match[0]

    return LINKED.sub(to_index, text)


def decisions(written: Mapping[str, str]) -> str:
    """Return the page that lists the decisions, in the order in which they were taken."""
    page = "docs/adr/index.md"
    titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in written.items() if "/adr/" in name}
    lines = "".join(f"- {link(title, name, page)}\n" for name, title in titles.items())
    names = "\n".join(Path(name).stem for name in titles)
    return (
        "# Decisions\n\nWhat was decided, when, why, and what was not taken.\n\n"
        f"{lines}\n```{{toctree}}\n:hidden:\n{names}\n```\n"
    )


def linked_files(pages: Mapping[str, str], root: Path) -> Iterator[Path]:
    """Yield the files of the repository that pages link to and that are no pages: the site has copies of them."""
    found = {
        os.path.normpath(Path(name).parent / target) for name, text in pages.items() for target in LINKED.findall(text)
    }
    for path in sorted(found - pages.keys()):
        if (root / path).is_file():
            yield Path(path)


def manual_pages() -> list[tuple[str, str, str, str, int]]:
    """Return what Sphinx wants to know of each manual page; its purpose is not asked, the page says it itself."""
    pages = {grammar.command: commands.manual_name(grammar) for grammar in commands.grammars()}
    return [(f"{commands.FOLDER}/{page}", name, "", "", 1) for page, name in {**pages, "train": "train"}.items()]
