"""The site of `make site`: Sphinx writes it without a warning, so no link leads nowhere, no page is
forgotten, and each block of code is of its language. And as a reader meets it: its search answers
with pages for users, its picture fits a dark page. The site is written once, for all of these.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from documentation.browser import Browser, browser

WORDS = (
    "kubernetes",
    "slurm",
    "torchrun",
    "multi node",
    "CVE",
    "ECR",
    "hang",
    "checkpoint",
    "requirements",
)

NOT_FOR_USERS = (
    "/adr/",
    "/tables/",
    "CHANGELOG",
    "AGENTS",
    "CONTRIBUTING",
    "benchmarks/",
    "tests/",
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def site_folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the site, `html`, and with the pages that Sphinx read, `doctrees`."""
    folder = tmp_path_factory.mktemp("site")
    options = (
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-c",
        "docs",
        "-d",
        str(folder / "doctrees"),
    )
    command = (sys.executable, "-m", "sphinx", *options, ".", str(folder / "html"))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert (done.returncode, done.stdout) == (0, "")
    return folder


def test_every_page_is_in_the_site_and_in_its_list_for_programs(
    root: Path, site_folder: Path
) -> None:
    pages = {path.relative_to(root).with_suffix("") for path in (root / "docs").rglob("*.md")}
    assert len(pages) > 30
    list_for_programs = (site_folder / "html" / "llms.txt").read_text(encoding="utf-8")
    listed = re.findall(r"\]\(([^)#]+)\.html[^)]*\): \S", list_for_programs)
    assert len(listed) > 30
    assert [page for page in listed if not (root / f"{page}.md").is_file()] == []
    read = site_folder / "doctrees"
    assert {page for page in pages if not (read / f"{page}.doctree").is_file()} == set()


@pytest.fixture(scope="module")
def site(site_folder: Path) -> Iterator[str]:
    """Serve the site on this machine."""
    handler = functools.partial(Quiet, directory=str(site_folder / "html"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as session:
        yield session


@pytest.mark.parametrize("word", WORDS)
def test_the_first_answers_of_the_search_are_pages_for_users(
    site: str, window: Browser, word: str
) -> None:
    window.open(f"{site}/search.html?q={word.replace(' ', '+')}")
    window.until("document.querySelectorAll('ul.search li a').length >= 3")
    script = (
        "return [...document.querySelectorAll('ul.search li > a')].slice(0, 3).map(it => it.href)"
    )
    addresses = [address.removeprefix(site) for address in window.run(script)]
    assert len(addresses) == 3
    for page in addresses:
        assert not any(part in page for part in NOT_FOR_USERS), page


def test_kubernetes_is_a_title(site: str, window: Browser) -> None:
    window.open(f"{site}/docs/index.html")
    titles = window.run(
        "return [...document.querySelectorAll('.sidebar-tree a')].map(it => it.textContent)"
    )
    for word in ("Kubernetes", "Slurm"):
        assert [title for title in titles if word in title], titles


def test_the_picture_is_dark_on_a_dark_page(site: str, window: Browser) -> None:
    script = "return getComputedStyle(document.querySelector('rect')).fill"
    seen = []
    for scheme in ("light", "dark"):
        window.colours(scheme)
        window.open(f"{site}/_images/how-it-works.svg")
        seen.append(window.run(script))
    assert seen == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"]


PAGES = ("README", "docs/jobs", "docs/platforms/slurm", "docs/platforms/index")
WIDTHS = {"phone": (390, 844), "desktop": (1280, 900)}

CUT_TABLES = """
const screen = document.documentElement.clientWidth + 1;  // widths are rounded
const cut = [];
for (const table of document.querySelectorAll('article table')) {
    const right = table.getBoundingClientRect().right;
    let hidden = right > screen;
    for (let around = table.parentElement; around; around = around.parentElement) {
        const edge = around.getBoundingClientRect().right;
        const overflow = getComputedStyle(around).overflowX;
        if (overflow === 'visible' || right <= edge + 1) continue;
        // The table goes on behind this edge: a reader can scroll to it, or it is cut off.
        hidden = (overflow !== 'auto' && overflow !== 'scroll') || edge > screen;
        break;
    }
    for (const cell of table.querySelectorAll('th, td'))
        if (getComputedStyle(cell).overflowX === 'hidden' && cell.scrollWidth > cell.clientWidth)
            hidden = true;
    if (hidden) cut.push(table.textContent.trim().slice(0, 60));
}
return cut;
"""
"""Returns the beginning of each table that has text which cannot be reached on this screen."""


@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_wider_than_a_phone(site: str, window: Browser, page: str) -> None:
    window.size(*WIDTHS["phone"])
    window.open(f"{site}/{page}.html")
    assert window.run("return document.documentElement.scrollWidth") <= WIDTHS["phone"][0]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_every_table_fits_or_can_be_scrolled(
    site: str, window: Browser, page: str, width: str
) -> None:
    window.size(*WIDTHS[width])
    window.open(f"{site}/{page}.html")
    assert window.run("return document.querySelectorAll('article table').length") > 0
    assert window.run(CUT_TABLES) == []


WIDE = "article table { min-width: 900px !important; }"
NARROW = "article table { table-layout: fixed !important; width: 90px !important; }"
"""Styles of tables: wider than a phone, and too narrow for their words."""


@pytest.mark.parametrize(
    "style",
    [
        f"{WIDE} article * {{ overflow-x: hidden !important; }}",
        f"{WIDE} body * {{ overflow-x: visible !important; }}",
        f"{NARROW} article td {{ overflow: hidden !important; white-space: nowrap; }}",
    ],
    ids=["no scroll bar", "beyond the screen", "narrow cells"],
)
def test_a_table_that_is_cut_off_is_found(site: str, window: Browser, style: str) -> None:
    window.size(*WIDTHS["phone"])
    window.open(f"{site}/docs/jobs.html")
    assert window.run(CUT_TABLES) == []
    window.run(
        "const element = document.createElement('style');"
        f"element.textContent = `{style}`; document.head.append(element)"
    )
    assert window.run(CUT_TABLES) != []


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder for pictures: that of TRAINWORKS_PICTURES, or one of this run."""
    chosen = os.environ.get("TRAINWORKS_PICTURES")
    if not chosen:
        return tmp_path_factory.mktemp("pictures")
    folder = Path(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_each_page_has_its_pictures(
    site: str,
    window: Browser,
    pictures: Path,
    record_property: Callable[[str, object], None],
    page: str,
) -> None:
    """Take a picture of a page in both colours at both widths, for people to look at. The record of
    the suite has the sha256 of each (`tools/evidence.py`).
    """
    digests = {}
    for scheme in ("light", "dark"):
        for width, size in WIDTHS.items():
            window.colours(scheme)
            window.size(*size)
            window.open(f"{site}/{page}.html")
            picture = base64.b64decode(window.devtools("Page.captureScreenshot")["data"])
            # PNG: its mark, then the length and the name of the head, then width and height.
            assert picture[:8] == b"\x89PNG\r\n\x1a\n"
            assert struct.unpack(">II", picture[16:24]) == size
            name = f"{page.replace('/', '-')}-{scheme}-{width}.png"
            (pictures / name).write_bytes(picture)
            digests[name] = hashlib.sha256(picture).hexdigest()
    # Dark is not light, and a phone is not a desktop.
    assert len(set(digests.values())) == len(digests)
    for name, digest in digests.items():
        record_property(name, f"sha256:{digest}")
