"""The catalogue: its facts without a browser, and the page as people use it in
a real headless Chromium.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reports.browser import Browser, browser
from trainworks.cli import main
from trainworks.cli.commands import build
from trainworks.facts.rows import Built, Facts, LockedPackage
from trainworks.inspect.catalogue import catalogue_of, features_of, render_catalogue
from trainworks.plan.model import Missing, Request, Step
from trainworks.plan.resolve import make_plan
from trainworks.render.build_records import current_builds, inputs_of_target

CPU = "pytorch-2.13.0-cpu-py311-debian12"
CU121 = "pytorch-2.4.1-cu121-py311-debian12"
TEMPLATE = "catalogue.html.j2"


# --- the facts ------------------------------------------------------------------------------------


def test_every_target_is_in_it_once_and_its_command_builds_it(facts: Facts) -> None:
    entries = catalogue_of(facts)
    assert sorted(entry.name for entry in entries) == sorted(map(facts.name_of, facts.targets))
    for entry in entries:
        words = shlex.split(entry.command)
        assert words[:2] == ["python", "build.py"]
        options = build.parser().parse_args(words[2:])
        request = Request(
            framework=options.framework,
            cuda=options.cuda,
            version=options.framework_version,
            python=options.python,
            sources=options.sources,
            architecture=options.architecture,
        )
        assert entry.problem or make_plan(request, facts).target.name == entry.name


def test_what_is_said_of_an_image_is_its_plan(facts: Facts) -> None:
    entry = next(entry for entry in catalogue_of(facts) if entry.name == CPU)
    plan = make_plan(Request(framework="pytorch", cuda="cpu"), facts)
    assert {step.component: step.version for step in entry.parts} == {
        step.component: step.version for step in plan.steps if step.in_image
    }
    assert sum(entry.checks.values()) == len(plan.checks)
    assert entry.plan == plan
    assert (entry.built is not None, bool(entry.older)) == (
        CPU in current_builds(facts),
        entry.built is None,
    )


def test_what_a_build_downloads_is_a_bar_of_components(facts: Facts, root: Path) -> None:
    (entry,) = [entry for entry in catalogue_of(facts) if entry.name == CPU]
    sizes = (7_000_000, 2_000_000, 600_000, 300_000, 90_000, 8_000, 2_000)
    parts = tuple(
        Step(
            component=f"p{n}",
            version="",
            summary="",
            python=(LockedPackage(name="a", version="1", file="a.whl", sha256="", size=size),),
        )
        for n, size in enumerate(sizes)
    )
    page = render_catalogue(
        (replace(entry, parts=parts),), (root / "templates" / TEMPLATE).read_text("utf-8")
    )
    text = re.sub(
        r"<[^>]+>", " ", page.partition("<p>A build downloads")[2].partition("</div>\n<p class")[2]
    )
    assert "A build downloads 10 MB of Python packages:" in page
    assert text.split("\n")[0].split() == [
        *(
            '="legend">',
            "p0",
            "7",
            "MB",
            "p1",
            "2",
            "MB",
            "p2",
            "600",
            "kB",
            "p3",
            "300",
            "kB",
            "p4",
            "90",
            "kB",
        ),
        *("others", "10", "kB"),
    ]
    assert re.findall(r"flex:(\d+);opacity:(\d+)%", page)[::5] == [
        ("7000000", "100"),
        ("10000", "20"),
    ]


def test_a_target_that_does_not_fit_says_why(facts: Facts) -> None:
    (entry,) = [entry for entry in catalogue_of(replace(facts, locks={})) if entry.name == CPU]
    page = render_catalogue((entry,), facts.templates[TEMPLATE])
    assert f"<pre>target {CPU} has no lock" in page
    assert "does not fit" in page


def test_built_targets_come_first(facts: Facts) -> None:
    rows = {facts.name_of(row): row for row in facts.targets}
    built = tuple(
        Built(
            target=name,
            inputs=inputs_of_target(rows[name], facts),
            engine="docker",
            date="2026-11-22",
            megabytes=1,
            seconds=1,
        )
        for name in (CPU, CU121)
    )
    entries = catalogue_of(replace(facts, built=built))
    assert {entry.name for entry in entries[:2]} == {CPU, CU121}
    assert [entry.built is not None for entry in entries] == [
        True,
        True,
        *[False] * (len(entries) - 2),
    ]


def test_filters_are_for_what_tells_images_apart(facts: Facts) -> None:
    features = features_of(catalogue_of(facts))
    assert {"nccl", "efa-installer", "smp", "smddp"} <= set(features)
    assert not {"system", "launcher", "manifest"} & set(features)


class Links(HTMLParser):
    """Collects what a page refers to, and its identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.identifiers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"img", "iframe", "object", "embed"}
        for name, value in attrs:
            if name in {"href", "src", "srcset", "action", "data"} and value is not None:
                self.references.append(value)
            if name == "id" and value is not None:
                self.identifiers.append(value)


def test_the_page_refers_to_nothing_but_itself(facts: Facts) -> None:
    text = render_catalogue(catalogue_of(facts), facts.templates[TEMPLATE])
    assert text == render_catalogue(catalogue_of(facts), facts.templates[TEMPLATE])
    links = Links()
    links.feed(text)
    assert len(links.identifiers) == len(set(links.identifiers))
    fragments = {reference for reference in links.references if reference.startswith("#")}
    assert set(links.references) - fragments == {"data:,"}
    assert {fragment[1:] for fragment in fragments} <= set(links.identifiers)
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"url\(|@import", style)


def test_a_job_names_an_image_by_digest_as_push_prints_it(facts: Facts) -> None:
    """A push writes dated tags and not the engine's own, so that tag would be in no registry."""
    entry = next(entry for entry in catalogue_of(facts) if entry.name == CPU)
    text = render_catalogue((entry,), facts.templates[TEMPLATE])
    uris = re.findall(r'image_uri="([^"]*)"', text)
    assert uris == ["ACCOUNT.dkr.ecr.REGION.amazonaws.com/pytorch-training@sha256:..."]


def test_what_stands_between_backticks_is_code(facts: Facts) -> None:
    entry = catalogue_of(facts)[0]
    assert entry.plan
    spoiled = replace(
        entry, plan=replace(entry.plan, missing=(Missing(component="one", cost="`a < b` fails"),))
    )
    text = render_catalogue((spoiled,), facts.templates[TEMPLATE])
    assert "<li><strong>one</strong>: <code>a &lt; b</code> fails</li>" in text


def test_facts_are_text_and_never_markup(facts: Facts) -> None:
    entry = catalogue_of(facts)[0]
    evil = "</script><script>window.evil=1</script>"
    assert entry.plan
    plan = replace(entry.plan, missing=(Missing(component=evil, cost=evil),))
    spoiled = replace(entry, row=replace(entry.row, version=evil), plan=plan)
    text = render_catalogue((spoiled,), facts.templates[TEMPLATE])
    assert evil not in text
    assert text.count("<script") == 2


def test_the_command_writes_the_file_or_says_why_not(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "catalogue.html"
    assert main(("catalogue", "--root", str(root), "--output", str(file))) == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert file.read_text().startswith("<!doctype html>")
    assert main(("catalogue", "--root", str(root), "--output", str(tmp_path))) == 9
    assert str(tmp_path) in capsys.readouterr().err


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(facts: Facts, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the page as a file, as a person opens it."""
    file = tmp_path_factory.mktemp("catalogue") / "catalogue.html"
    file.write_text(
        render_catalogue(catalogue_of(facts), facts.templates[TEMPLATE]), encoding="utf-8"
    )
    return file.as_uri()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Give one Chromium for all tests."""
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def page(window: Browser, address: str) -> Iterator[Browser]:
    """Give the page, opened anew.

    At the end nothing was asked of any network, and the console is empty.
    """
    window.size(1280, 900)
    window.open("about:blank")
    window.requests()
    window.log("browser")
    window.open(address)
    yield window
    asked = {url.partition("#")[0] for url in window.requests()}
    assert address in asked, "the log of requests is on"
    assert {url for url in asked if not url.startswith("data:")} == {address}
    assert window.log("browser") == []


SHOWN = (
    "return [...document.querySelectorAll('.images tbody tr')].filter(row => row.checkVisibility())"
    ".map(row => row.querySelector('small').textContent)"
)
COUNT = "return document.getElementById('count').textContent"
FOCUS = "return document.activeElement.id || document.activeElement.textContent.trim()"
CLOSED = "!document.querySelector('dialog').open && document.activeElement.closest('.images')"
OPENED = (
    "const d = document.querySelector('dialog'); return d.open ? d.querySelector('article').id : ''"
)


@pytest.mark.engine
def test_search_narrows_and_filters_combine(page: Browser, facts: Facts) -> None:
    everything = page.run(SHOWN)
    assert len(everything) == len(facts.targets)
    assert page.run(COUNT) == f"{len(everything)} images"
    page.run("document.getElementById('search').focus()")
    page.press("PyTorch-2.4.1 Debian12")
    assert page.run(SHOWN) == [
        name
        for name in everything
        if name.startswith("pytorch") and "2.4" in name and "debian12" in name
    ]
    page.run("document.getElementById('search').value = ''")
    page.choose("#framework", "pytorch")
    page.choose("#sources", "vendor")
    pytorch = page.run(SHOWN)
    assert pytorch == [n for n in everything if n.startswith("pytorch-") and n.endswith("-vendor")]
    page.run("document.querySelector('[value=smddp]').click()")
    with_smddp = page.run(SHOWN)
    assert 0 < len(with_smddp) < len(pytorch)
    assert page.run(COUNT) == f"{len(with_smddp)} of {len(everything)} images"
    page.choose("#cuda", "cpu")
    assert page.run(SHOWN) == []
    assert page.run("return document.querySelector('.none').checkVisibility()")
    page.run("document.getElementById('clear').click()")
    assert page.run(SHOWN) == everything
    assert page.run(FOCUS) == "search"


@pytest.mark.engine
def test_everything_can_be_done_with_the_keyboard(page: Browser) -> None:
    page.press("Tab")
    assert page.run(FOCUS) == "Skip to the images"
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    order = []
    for _ in range(9):
        page.press("Tab")
        order.append(page.run(FOCUS))
    assert order[:8] == [
        "search",
        "framework",
        "cuda",
        "python",
        "base",
        "sources",
        "built",
        "With components",
    ]
    first = order[8]
    page.press("Enter")
    page.until("document.querySelector('dialog').open")
    name = page.run(OPENED)
    assert name == page.run("return document.querySelector('.images small').textContent")
    assert page.run(FOCUS) == "title-1"
    # The rest of the page is out of reach as long as the dialog is open.
    for _ in range(6):
        page.press("Tab")
        assert page.run(
            "return document.activeElement === document.body ||"
            " !!document.activeElement.closest('dialog')"
        )
    page.press("Escape")
    page.until(CLOSED)
    assert page.run(FOCUS) == first, "the focus is where it was"
    page.press("Enter")
    page.until("document.querySelector('dialog').open")
    assert page.run(OPENED) == name, "and opens it again"
    page.press("Escape")
    page.until(CLOSED)
    page.run("document.getElementById('search').focus()")
    page.press("cu121")
    few = page.run(SHOWN)
    page.press("Escape")
    assert len(page.run(SHOWN)) > len(few) > 0


@pytest.mark.engine
def test_an_address_with_a_name_opens_that_image(page: Browser, address: str) -> None:
    page.open(f"{address}#{CPU}")
    assert page.run(OPENED) == CPU
    text = page.run("return document.querySelector('dialog').innerText")
    assert "python build.py --framework pytorch --cuda cpu" in text
    assert "trainworks/pytorch-training:2.13.0-cpu-py311-debian12" in text
    assert "image_uri=" in text
    page.run("document.querySelector('.close').click()")
    page.until(CLOSED)
    page.open(f"{address}#no-such-image")
    assert page.run(OPENED) == ""


@pytest.mark.engine
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_screen_is_too_narrow(page: Browser, address: str, width: int) -> None:
    page.size(width, 800)
    overflow = "const e = document.scrollingElement; return e.scrollWidth - e.clientWidth"
    assert page.run(overflow) == 0
    page.run("document.querySelector('details').open = true")
    assert page.run(overflow) == 0
    page.open(f"{address}#{CPU}")
    assert (
        page.run("const d = document.querySelector('dialog'); return d.scrollWidth - d.clientWidth")
        == 0
    )
    small = (
        "return [...document.querySelectorAll('button, select, input[type=search]')].filter(e =>"
        " e.checkVisibility()).map(e => e.getBoundingClientRect().height).filter(h => h < 24)"
    )
    assert page.run(small) == [], "a finger finds them"


CONTRASTS = """
const linear = v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const luminance = rgb => { const [r, g, b] = rgb.map(linear);
  return .2126 * r + .7152 * g + .0722 * b; };
const numbers = text => text.match(/[\\d.]+/g).map(Number);
const behind = e => {
  for (; e; e = e.parentElement) {
    const c = numbers(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c.slice(0, 3);
  }
  return [255, 255, 255];
};
const has_text = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
const found = {};
for (const e of document.querySelectorAll('body *')) {
  if (!e.checkVisibility() || !has_text(e)) continue;
  const [a, b] = [luminance(numbers(getComputedStyle(e).color).slice(0, 3)), luminance(behind(e))];
  const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  if (ratio < 4.5) found[e.tagName + '.' + e.className] = ratio;
}
return found;
"""


@pytest.mark.engine
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(page: Browser, address: str, scheme: str) -> None:
    page.colours(scheme)
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
    assert page.run(CONTRASTS) == {}, "WCAG AA asks for 4.5"
    page.open(f"{address}#{CPU}")
    assert page.run(CONTRASTS) == {}
    if folder := os.environ.get("TRAINWORKS_PICTURES"):
        for name, width in (("desktop", 1280), ("phone", 390)):
            page.size(width, 900)
            page.picture(Path(folder) / f"{name}-{scheme}-image.png")
            page.open(address + "#")
            page.run("document.querySelector('details').open = true")
            page.picture(Path(folder) / f"{name}-{scheme}.png")
            page.open(f"{address}#{CPU}")


@pytest.mark.engine
def test_without_scripts_everything_is_there(page: Browser, address: str, facts: Facts) -> None:
    page.scripts(on=False)
    try:
        page.open("about:blank")
        page.open(address)
    finally:
        page.scripts(on=True)
    assert len(page.run(SHOWN)) == len(facts.targets)
    articles = (
        "return [...document.querySelectorAll('article')].filter(a => a.checkVisibility()).length"
    )
    assert page.run(articles) == len(facts.targets)
    assert not page.run("return document.querySelector('form').checkVisibility()"), (
        "what would do nothing is not shown"
    )
