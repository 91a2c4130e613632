"""The site: every link leads somewhere, all that the code has is there, and people can use it without a network."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from documentation.conftest import TOOLS, write_site
from reports.browser import Browser, browser
from trainworks.cli.commands import COMMANDS, grammar_of
from trainworks.facts.load import schemas
from trainworks.facts.rows import Facts
from trainworks.render.builds import current_builds
from trainworks_launcher.options import COMMANDS as LAUNCHER_COMMANDS
from trainworks_launcher.options import parse
from trainworks_launcher.registry import MODES

pytestmark = pytest.mark.engine


class Page(HTMLParser):
    """What a page refers to, what can be referred to in it, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.identifiers: set[str] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        if "id" in values:
            self.identifiers.add(values["id"])
        if "href" in values:
            (self.links if tag == "a" else self.loaded).append(values["href"])
        if "src" in values:
            self.loaded.append(values["src"])

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[str, Page]:
    """Give every page by its path from the root of the site."""
    return {path.relative_to(site).as_posix(): Page(path.read_text("utf-8")) for path in site.rglob("*.html")}


# --- What is in it ---------------------------------------------------------------------------------------------------


def test_every_link_leads_somewhere(site: Path, pages: dict[str, Page]) -> None:
    broken = []
    for name, page in pages.items():
        for reference in page.links:
            if re.match(r"https?:|mailto:", reference):
                continue
            path, _, fragment = unquote(reference).partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            if not (site / target).is_file() or (fragment and fragment not in pages[target].identifiers):
                broken.append(f"{name}: {reference}")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        for reference in page.loaded:
            path = reference.partition("?")[0].partition("#")[0]
            assert reference.startswith(("data:", "#")) or (site / posixpath.dirname(name) / path).is_file(), (
                name,
                reference,
            )
    for style in site.rglob("*.css"):
        assert not re.search(r"""url\(["']?(?!data:)\w+:|@import""", style.read_text("utf-8")), style


def test_everything_that_the_code_has_is_there(pages: dict[str, Page], facts: Facts) -> None:
    assert {f"reference/targets/{facts.name_of(row)}.html" for row in facts.targets} <= pages.keys()
    assert {f"commands/{name}.html" for name in (*COMMANDS, "train")} <= pages.keys()
    assert {row.name for row in facts.components} <= pages["reference/components.html"].identifiers
    anchors = {re.sub(r"[^a-z0-9-]", "", rule.name) for rule in facts.rules}
    assert anchors <= {each.replace(".", "") for each in pages["docs/compatibility.html"].identifiers}
    instances = pages["reference/instances.html"].text
    assert [row.name for row in facts.instances if row.name not in instances] == []
    files = pages["reference/files.html"].identifiers
    assert {re.sub(r"[^a-z-]", "", name.replace("lock-", "lock")) + "toml" for name in schemas()} - files == {
        "locktoml"  # a file for each target: lock/TARGET.toml
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_says_all_that_a_grammar_has(pages: dict[str, Page], name: str) -> None:
    text, grammar = pages[f"commands/{name}.html"].text, grammar_of(name)
    for argument in grammar.arguments():
        assert [each for each in argument.names if each not in text] == []
    assert [each.line for each in grammar.examples if each.line not in text] == []
    assert [meaning for _, meaning in grammar.exit_statuses if meaning not in text] == []
    order = [text.index(title) for title in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "EXIT STATUS")]
    assert order == sorted(order)


def test_the_page_of_train_has_its_modes_options_and_variables(pages: dict[str, Page]) -> None:
    from website.launcher import ALL, EXAMPLES

    text = pages["commands/train.html"].text
    assert [name for name, mode in MODES.items() if name not in text or mode.switch not in text] == []
    assert [each.name for command in LAUNCHER_COMMANDS for each in command.options if each.name not in text] == []
    read = [name for name in ALL if name.section == "variables that are read" and name.constant.endswith("_VARIABLE")]
    assert len(read) > 15
    assert [name.value for name in read if str(name.value) not in text] == []
    # A name of the source, such as STOP_GRACE_SECONDS, says nothing to a reader.
    assert re.findall(r"(?<![A-Z_])(?:STOP_GRACE|JOIN_LIMIT|CONTROL_PORT|MIN_HOSTS)\w*", text) == []
    for line, _ in EXAMPLES:
        program, *words = line.split()
        if program == "train" and words:
            parse(next(command for command in LAUNCHER_COMMANDS if command.name == words[0]), words[1:])


def test_a_target_says_whether_it_was_built(pages: dict[str, Page], facts: Facts) -> None:
    current = current_builds(facts)
    for row in facts.targets:
        text = pages[f"reference/targets/{facts.name_of(row)}.html"].text
        said = [each for each in ("Built for real", "Built from an older recipe", "Not built yet") if each in text]
        name = facts.name_of(row)
        recorded = "Built from an older recipe" if name in facts.built_by_target else "Not built yet"
        assert said == ["Built for real" if name in current else recorded]


WRITE = """
import sys
from pathlib import Path
from website.build import SETTINGS, run_sphinx
folders = [Path(word) for word in sys.argv[1:]]
sys.exit(run_sphinx("html", *folders, SETTINGS))
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [("[text](#title)", ""), ("[page](none.md)", "none.md"), ("[heading](#none)", "'none'"), ("```x86\nf\n```", "x86")],
)
def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "index.md").write_text(f"# Title\n\n{text}\n", encoding="utf-8")
    command = (sys.executable, "-c", WRITE, source, tmp_path / "site", tmp_path / "doctrees")
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(TOOLS)}, stderr=subprocess.PIPE, text=True)
    assert done.returncode == (1 if said else 0)
    assert said in done.stderr if said else done.stderr == ""


def test_the_same_commit_gives_the_same_bytes(site: Path, tmp_path: Path) -> None:
    write_site(tmp_path / "other", PYTHONHASHSEED="7", TZ="Asia/Tokyo", LANG="C", TMPDIR=str(tmp_path))
    first, second = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (site, tmp_path / "other")
    )
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


# --- Manual pages ----------------------------------------------------------------------------------------------------


def test_manual_pages_are_read_without_a_warning(site: Path) -> None:
    if not shutil.which("man"):
        pytest.skip("NOT TESTED: no man here")
    files = sorted((site / "man" / "man1").iterdir())
    assert len(files) == len(COMMANDS) + 1
    for file in files:
        command = ("man", "--warnings", "--local-file", file)
        shown = subprocess.run(
            command, env={"MANWIDTH": "80", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, capture_output=True, text=True
        )
        assert (shown.returncode, shown.stderr) == (0, ""), file
        titles = re.findall(r"^[A-Z]+(?: [A-Z]+)*$", shown.stdout, re.MULTILINE)
        assert titles[:4] == ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS"]
        assert re.search(rf"NAME\n +{file.stem} +- +\w", shown.stdout), "what apropos and whatis look for"
        assert "<>" not in shown.stdout


# --- In a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Give one Chromium for all tests."""
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def reader(window: Browser, site: Path) -> Iterator[Browser]:
    """Give the browser at the first page; at the end nothing was asked of any network, and the console is empty."""
    window.size(1280, 900)
    window.open("about:blank")
    window.requests()
    window.log("browser")
    window.open((site / "index.html").as_uri())
    yield window
    asked = window.requests()
    assert (site / "index.html").as_uri() in asked, "the log of requests is on"
    assert [url for url in asked if not url.startswith((site.as_uri(), "data:", "about:"))] == []
    assert window.log("browser") == []


FOCUS = "return document.activeElement.id || document.activeElement.textContent.trim()"


def test_the_search_finds_a_command_from_the_keyboard(reader: Browser, site: Path) -> None:
    reader.press("Tab")
    assert reader.run(FOCUS) == "Skip to content"
    while reader.run("return document.activeElement.name || ''") != "q":
        reader.press("Tab")
    reader.press("promote", "Enter")
    reader.until("document.querySelector('#search-results li a')")
    found = "return [...document.querySelectorAll('#search-results li a')].map(a => a.pathname)"
    reader.until("document.querySelector('#search-results .search-summary')?.textContent.includes('found')")
    paths = reader.run(found)
    assert f"{site.as_posix()}/commands/promote.html" in paths[:3]
    while f"{site.as_posix()}/commands/promote.html" != reader.run("return document.activeElement.pathname || ''"):
        reader.press("Tab")
    reader.press("Enter")
    reader.until("document.querySelector('h1')?.textContent.startsWith('build.py promote')")


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("driver-cuda-12", "docs/compatibility.html"),
        ("--moving-tag", "commands/push.html"),
        ("TRAINWORKS_JOIN_LIMIT_SECONDS", "commands/train.html"),
        ("pytorch-2.13.0-cpu-py311-debian12", "reference/targets/pytorch-2.13.0-cpu-py311-debian12.html"),
    ],
)
def test_what_people_look_for_is_found(reader: Browser, site: Path, words: str, page: str) -> None:
    reader.open(f"{(site / 'search.html').as_uri()}?q={words}")
    reader.until("document.querySelector('#search-results .search-summary')?.textContent.includes('found')")
    found = reader.run("return [...document.querySelectorAll('#search-results li a')].map(a => a.pathname)")
    assert f"{site.as_posix()}/{page}" in found


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_no_page_is_wider_than_the_screen(reader: Browser, site: Path, width: int) -> None:
    reader.size(width, 800)
    names = ["index", "README", "search", "commands/index", "commands/build", "commands/train", "launcher/README"]
    names += [path.relative_to(site).with_suffix("").as_posix() for path in sorted((site / "docs").glob("*.html"))]
    names += ["reference/components", "reference/instances", "reference/files", "reference/exit-statuses"]
    names += ["reference/targets/index", "reference/targets/tensorflow-2.12.0-cu118-py310-ubuntu20.04-vendor"]
    wide = []
    for name in names:
        reader.open((site / f"{name}.html").as_uri())
        if reader.run("const e = document.scrollingElement; return e.scrollWidth - e.clientWidth"):
            wide.append(name)
    assert wide == []


def test_the_catalogue_is_a_page_of_it(reader: Browser, site: Path) -> None:
    reader.run("[...document.querySelectorAll('article a')].find(a => a.textContent === 'the catalogue').click()")
    reader.until("document.querySelectorAll('.images tbody tr').length > 50")
    assert reader.run("return location.pathname") == f"{site.as_posix()}/catalogue.html"
