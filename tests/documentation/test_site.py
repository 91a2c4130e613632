"""The site of `make site`: Sphinx writes it without a warning, so no link leads nowhere and no page is forgotten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_site_is_written_without_a_warning(root: Path, tmp_path: Path) -> None:
    options = ("-W", "--keep-going", "-q", "-b", "html", "-c", "docs", "-d", str(tmp_path / "doctrees"))
    command = (sys.executable, "-m", "sphinx", *options, ".", str(tmp_path / "site"))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    assert (done.returncode, done.stdout) == (0, "")
    pages = {path.relative_to(root).with_suffix("") for path in (root / "docs").rglob("*.md")}
    assert len(pages) > 30
    assert {page for page in pages if not (tmp_path / "site" / f"{page}.html").is_file()} == set()
