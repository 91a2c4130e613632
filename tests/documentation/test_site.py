"""The site of `make site`: Sphinx reads it without a warning, so no link leads
nowhere and no page is forgotten.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.token import Error  # type: ignore[import-untyped]

CODE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_site_is_read_without_a_warning(root: Path, tmp_path: Path) -> None:
    """To write the HTML takes twice as long as to read the pages and to look all links up."""
    options = (
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "dummy",
        "-c",
        "docs",
        "-d",
        str(tmp_path / "doctrees"),
    )
    command = (sys.executable, "-m", "sphinx", *options, ".", str(tmp_path / "site"))
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stderr == ""
    assert (done.returncode, done.stdout) == (0, "")
    pages = {path.relative_to(root).with_suffix("") for path in (root / "docs").rglob("*.md")}
    assert len(pages) > 30
    listed = re.findall(
        r"\]\(([^)#]+)\.html[^)]*\): \S",
        (tmp_path / "site" / "llms.txt").read_text(encoding="utf-8"),
    )
    assert len(listed) > 30
    assert [page for page in listed if not (root / f"{page}.md").is_file()] == []
    assert {
        page for page in pages if not (tmp_path / "doctrees" / f"{page}.doctree").is_file()
    } == set()


def test_every_block_of_code_is_of_its_language(root: Path) -> None:
    """Sphinx warns of others when it writes them."""
    blocks = [
        (path.name, *found)
        for path in (*(root / "docs").rglob("*.md"), *root.glob("*.md"))
        for found in CODE.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(blocks) > 20
    for page, language, text in blocks:
        wrong = [
            value for kind, value in get_lexer_by_name(language).get_tokens(text) if kind is Error
        ]
        assert wrong == [], f"{page}: {language}: {text}"
