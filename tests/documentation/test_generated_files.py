"""Test that the files which `make check` compares follow from the rows: a change of words leaves
them as they are, a record changes the page of all images and the README's table.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDERS = ("docs", "images", "launcher", "smdistributed", "src", "templates", "tools")
WRITTEN = ("README.md", "tests/coverage.toml", *FOLDERS)
"""Files that `tools/generate.py` reads, runs and writes."""


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    """Give a copy of the checkout."""
    for name in WRITTEN:
        if (root / name).is_dir():
            shutil.copytree(
                root / name,
                tmp_path / name,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            )
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(root / name, tmp_path / name)
    # Of records only those that git has: a run on this machine leaves others.
    (tmp_path / "evidence").mkdir()
    listed = subprocess.run(
        ("git", "ls-files", "evidence"), cwd=root, capture_output=True, text=True, check=False
    )
    for name in listed.stdout.split():
        shutil.copy(root / name, tmp_path / name)
    return tmp_path


def generate(copied: Path, *words: str) -> tuple[int, str]:
    """Run `tools/generate.py`; return its exit status and its output."""
    command = [sys.executable, str(copied / "tools" / "generate.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout + done.stderr


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_words_and_recipes_ask_for_nothing_and_a_record_for_its_pages(copied: Path) -> None:
    append(
        copied / "launcher" / "trainworks_launcher" / "contract" / "names.py", "# One more line.\n"
    )
    append(copied / "docs" / "debug.md", "\nOne more sentence.\n")
    built = copied / "images" / "built.toml"
    content, changes = re.subn(
        r'inputs = "sha256:\w+"',
        f'inputs = "sha256:{"1" * 64}"',
        built.read_text(encoding="utf-8"),
    )
    built.write_text(content, encoding="utf-8")
    assert changes > 0
    assert generate(copied, "--check") == (0, "")
    built.unlink()
    stale_messages = ""
    for page in ("README.md", "docs/tables/images.md"):
        stale_messages += f"{page} is not what the facts say: run `make docs`\n"
    assert generate(copied, "--check") == (1, stale_messages)


def test_signatures_and_lists_beside_records_are_no_records(copied: Path) -> None:
    evidence = copied / "evidence"
    (evidence / "allowed_signers").write_text("ada@example.org ssh-ed25519 AAAA\n", "utf-8")
    record = max(evidence.glob("*.json"))
    record.with_name(f"{record.name}.sig").write_text("-----BEGIN SSH SIGNATURE-----\n", "utf-8")
    (evidence / "20200101T000000Z-make-nothing.tests.gz").write_bytes(b"")
    for words in (("init", "--quiet"), ("add", "evidence")):
        subprocess.run(("git", *words), cwd=copied, check=True)
    assert generate(copied, "--check") == (0, "")


def write_run(copied: Path, number: int, suite: str, **failed: list[str]) -> None:
    """Write a record of a suite on a machine of its own.

    Args:
        copied: The checkout.
        number: Gives the order of the records, and the seconds.
        suite: The suite.
        failed: The names of the failed tests of each part; none for a green run.
    """
    parts = []
    for name in ("quick", "slow"):
        tests = {"passed": 10, "failed": len(failed.get(name, ())), "skipped": 0}
        part: dict[str, Any] = {"name": name, "result": "passed", "cause": "", "seconds": 60}
        part["tests"] = tests
        if failed.get(name):
            part |= {"result": "failed", "cause": "exit status 1", "failures": failed[name]}
        parts.append(part)
    record = {
        "suite": suite,
        "date": f"2026-12-0{number}",
        "commit": f"{number}" * 40,
        "changed": False,
        "where": {"cores": 99},
        "parts": parts,
        "seconds": 120,
    }
    path = copied / "evidence" / f"2026120{number}T000000Z-{suite.replace(' ', '-')}.json"
    path.write_text(json.dumps(record), encoding="utf-8")


def test_a_failed_run_stays_beside_a_newer_green_one(copied: Path) -> None:
    """Of each suite: the newest record, and the newest of those that failed."""
    write_run(copied, 1, "make a", quick=["t.test_old"])
    write_run(copied, 2, "make a", slow=["t.test_1", "t.test_2", "t.test_3", "t.test_4"])
    write_run(copied, 3, "make a")
    write_run(copied, 4, "make a")
    write_run(copied, 5, "make b")
    write_run(copied, 6, "make b", quick=["t.test_5"])
    (copied / "evidence" / "20261204T000000Z-make-a.tests.gz").write_bytes(b"")
    assert generate(copied)[0] == 0
    page = (copied / "docs" / "status.md").read_text(encoding="utf-8")
    rows = [row.split(" | ") for row in page.splitlines() if "| 99 cores, no GPU |" in row]
    names = "`t.test_1`, `t.test_2`, `t.test_3`, ..."
    assert [(row[1], row[4]) for row in rows] == [
        ("2026-12-04", "green, [20 tests](../evidence/20261204T000000Z-make-a.tests.gz)"),
        ("2026-12-02", f"failed: slow (4 failed: {names}), 20 passed"),
        ("2026-12-06", "failed: quick (1 failed: `t.test_5`), 20 passed"),
    ]


def test_a_component_that_no_target_has_asks_for_its_own_line(copied: Path) -> None:
    before = (copied / "docs" / "tables" / "components.md").read_text(encoding="utf-8").splitlines()
    append(
        copied / "images" / "components.toml",
        "\n"
        "[[component]]\n"
        'name = "htop"\n'
        'summary = "htop, to look at processes"\n'
        'debian = ["htop"]\n'
        'without = "no htop"\n'
        'source = "Debian archive: htop"\n',
    )
    (copied / "templates" / "components" / "htop.j2").write_text("{#\n#}\n", encoding="utf-8")
    stale = ("docs/use.md", "docs/tables/components.md")
    messages = [f"{page} is not what the facts say: run `make docs`\n" for page in stale]
    assert generate(copied, "--check") == (1, "".join(messages))
    assert generate(copied) == (0, "".join(f"{page}\n" for page in stale))
    assert ", `htop`" in (copied / "docs" / "use.md").read_text(encoding="utf-8")
    after = (copied / "docs" / "tables" / "components.md").read_text(encoding="utf-8").splitlines()
    line = "| htop | htop, to look at processes | `--with` | no htop |"
    assert [line_after for line_after in after if line_after != line] == before
    assert after.count(line) == 1


def write_decision(copied: Path, name: str, head: str) -> Path:
    """Write a decision with this paragraph as its head; return its file."""
    path = copied / "docs" / "adr" / name
    number = int(name[:4])
    path.write_text(f"# {number}. A title\n\n{head}\n\n**Context.** None.\n", encoding="utf-8")
    return path


def test_a_decision_names_the_later_ones_that_change_it(copied: Path) -> None:
    older = write_decision(copied, "0901-older.md", "Date: 2026-11-29. Status: accepted.")
    change = "Date: 2026-11-29. Status: accepted.\nChanges: [901](0901-older.md): in a word."
    newer = write_decision(copied, "0902-newer.md", change)
    assert generate(copied)[0] == 0
    assert older.read_text(encoding="utf-8").splitlines()[3] == "Changed by: [902](0902-newer.md)."
    newer.unlink()
    assert generate(copied)[0] == 0
    assert "Changed by" not in older.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            "Date: 2026-11-29.\nChanges: [8](0008-none.md).",
            "changes 8 (0008-none.md): no such older one",
        ),
        (
            "Date: 2026-11-29.\nChanges: [902](0902-new.md).",
            "changes 902 (0902-new.md): no such older one",
        ),
        ("Accepted.", 'below its title stands no line "Date: ... Status: ..."'),
    ],
    ids=["unknown", "itself", "no-date"],
)
def test_a_head_that_cannot_be_followed_is_refused(copied: Path, head: str, message: str) -> None:
    write_decision(copied, "0902-new.md", head)
    status, printed = generate(copied, "--check")
    assert status == 1
    assert message in printed


def spoil(path: Path, old: str, new: str) -> None:
    """Replace the first match of a pattern in a file."""
    text, changes = re.subn(old, new, path.read_text(encoding="utf-8"), count=1)
    assert changes == 1
    path.write_text(text, encoding="utf-8")


NEWEST = "images/lock/pytorch-2.15.0-cu132-py311-debian12.toml"
ONE_RECORD = "evidence/20261201T000000Z-make-a.json"


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        (NEWEST, r'"torch"\nversion = "[0-9.]+', '"torch"\nversion = "2.9.9', "build.py lock"),
        (NEWEST, r"\[\[package\]\]", "[[package", f"{NEWEST}: not TOML"),
        ("tests/coverage.toml", r"\[\[page\]\]", "[[page", "tests/coverage.toml: not TOML"),
        ("tests/coverage.toml", "\nstate = ", "\nstat = ", "item 1: unknown key 'stat', key 's"),
        (ONE_RECORD, '"suite"', '"suit"', f"git restore {ONE_RECORD}"),
        (ONE_RECORD, "{", "", f"{ONE_RECORD}: not a record"),
        (ONE_RECORD, '"cores"', '"core"', f"{ONE_RECORD}: not a record"),
    ],
    ids=["lock", "lock-toml", "toml", "key", "no-suite", "no-json", "no-cores"],
)
def test_a_bad_file_is_named_with_what_to_do(
    copied: Path, name: str, old: str, new: str, words: str
) -> None:
    write_run(copied, 1, "make a", quick=["t.test_a"])
    spoil(copied / name, old, new)
    status, printed = generate(copied, "--check")
    assert status != 0
    assert printed.startswith("error: ")
    assert words in printed
    assert "Traceback" not in printed
