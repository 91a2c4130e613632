"""The pages themselves, without the site: nothing is forgotten, and what a reader can run does what the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from documentation.conftest import TOOLS
from trainworks.cli.commands import BUILD, COMMANDS, grammar_of
from website.launcher import ALL, text_of_name
from website.markdown import prose, table


def blocks(path: Path, language: str) -> list[str]:
    """Return the blocks of a page that are in some language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def test_every_page_has_its_place_on_the_site(root: Path) -> None:
    listed = re.findall(r"^(?:.*<)?([\w/-]+)>?$", (TOOLS / "website" / "index.md").read_text("utf-8"), re.MULTILINE)
    assert {path.stem for path in (root / "docs").glob("*.md")} - {Path(name).name for name in listed} == set()


def test_the_failing_job_of_the_page_on_debugging(root: Path, tmp_path: Path) -> None:
    (block,) = blocks(root / "docs" / "debug.md", "sh")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        ("bash", "-euc", block.replace("/tmp/job", str(tmp_path / "job"))),
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"mode": "none"' in done.stdout
    assert "the entry point, a script" in done.stdout
    assert "ended with 3\n" in done.stdout
    assert done.stdout.endswith("exit status 3")


def commands(path: Path) -> list[tuple[str, ...]]:
    """Return the words of every line of a page that calls build.py, without comments, pipes and redirections."""
    text = re.sub(r"<!-- generated: .*?<!-- end of generated -->", "", path.read_text("utf-8"), flags=re.DOTALL)
    lines = re.findall(r"^python build\.py .*$", text.replace("\\\n", " "), re.MULTILINE)
    return [tuple(shlex.split(re.split(r" [|>] ", line)[0], comments=True)[2:]) for line in lines]


def test_every_command_line_of_every_page_is_understood(root: Path) -> None:
    pages = [root / "README.md", root / "launcher" / "README.md", *sorted((root / "docs").rglob("*.md"))]
    found = [words for page in pages for words in commands(page)]
    assert len(found) > 30
    for words in found:
        name, words = (words[0], words[1:]) if words[0] in COMMANDS else (BUILD, words)
        grammar_of(name).parse_args(words)


def test_the_job_that_is_checked_before_a_cluster_is_paid_for(root: Path, tmp_path: Path) -> None:
    text = (root / "docs" / "jobs.md").read_text("utf-8").partition("## Before you pay")[2]
    (block, *_) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        ("bash", "-euc", block.replace("/tmp/check", str(tmp_path / "check"))),
        cwd=root,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch_distributed" in done.stdout
    assert "16 processes" in done.stdout


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    done = subprocess.run((sys.executable, TOOLS / "write-site", tmp_path), stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def rows(path: Path, heading: str) -> dict[str, str]:
    """Return the first table below a heading: the first cell of each row, and the others."""
    section = path.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return {first.strip("`"): rest for first, rest in found[1:]}


def test_the_launchers_page_has_every_setting_with_its_default_and_every_exit_status(root: Path) -> None:
    page = root / "launcher" / "README.md"
    settings, statuses = rows(page, "Settings"), rows(page, "Exit status")
    variables = [name for name in ALL if name.section == "variables that are read"]
    own = [name for name in variables if str(name.value).startswith("TRAINWORKS_") and name.value != "TRAINWORKS_"]
    assert len(own) > 8
    assert {name.value for name in own} - settings.keys() == set()
    for name in variables:
        # `default 120` of the source, where it is a number.
        if name.value in settings and (default := re.search(r"default `(\d+)`", text_of_name(name))):
            assert settings[str(name.value)].startswith(f"{default[1]} |"), name.value
    numbers = {int(number) for status in statuses for number in re.findall(r"\d+", status)}
    assert numbers == {0} | {name.value for name in ALL if name.constant.startswith("EXIT_")}


SHOWN = MarkdownIt("gfm-like", {"linkify": False})


def text_of(markdown: str) -> str:
    """Return what a reader sees of a line of Markdown."""
    (inline,) = [token for token in SHOWN.parse(markdown) if token.type == "inline"]
    return "".join(token.content for token in inline.children or ())


@given(st.text(st.sampled_from("aZ 0-_*[](){}<>|#~&!^$'\\.:;/\""), min_size=1).map(str.strip).filter(str.strip))
def test_texts_of_the_code_are_shown_as_they_are(text: str) -> None:
    assert text_of(f"x{prose(text)}x") == f"x{text}x"


def test_code_stays_code_and_a_page_becomes_a_link() -> None:
    assert prose("`a|b` and ``c*``, see docs/push.md", "commands/push.md") == (
        "`a|b` and `c*`, see [docs/push.md](../docs/push.md)"
    )
    assert table(("a", "b"), [("`x|y`", "")]) == "| a | b |\n| --- | --- |\n| `x\\|y` | - |\n"


@pytest.mark.parametrize("text", ["`<`", "``a ` b``"])
def test_backticks(text: str) -> None:
    assert text_of(f"x {prose(text)}") == f"x {text.strip('`')}"
