#!/usr/bin/env python3
"""Write the batch of buildspec.yml from `build.py --list --format json`; `--check` compares only.

CodeBuild reads a batch from the file before anything runs, so the file must contain the list of
targets. Targets with unlocked inputs (`build.py check --format json`) are left out until they are
locked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainworks.facts.load import load

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "buildspec.yml"
BEGIN = "  # generated: by tools/write_buildspec.py from `build.py --list --format json`\n"
END = "  # end of generated\n"
ARM = (
    "        type: ARM_CONTAINER\n",
    "        image: aws/codebuild/amazonlinux-aarch64-standard:3.0\n",
)
"""What CodeBuild builds images for arm64 on (user guide, "Docker images provided by CodeBuild")."""


def ask(*words: str) -> Any:
    """Return what a command of build.py says as JSON."""
    command = (sys.executable, str(ROOT / "build.py"), *words, "--format", "json")
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def batch(targets: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]) -> str:
    """Return the tasks of the batch, one for each target that can be built.

    Args:
        targets: What `build.py --list` says.
        findings: What `build.py check` says.
    """
    buildable = {
        finding["target"] for finding in findings if finding["fits"] and not finding["unlocked"]
    }
    lines = ["  build-list:\n"]
    for target in targets:
        name = target["name"]
        if name in buildable:
            lines += [
                f"    - identifier: {re.sub('[^A-Za-z0-9_]', '_', name)}\n",
                "      env:\n",
                *(ARM if target["architecture"] == "arm64" else ()),
                "        privileged-mode: true\n",
                "        variables:\n",
                f"          TARGET: {name}\n",
            ]
    return "".join(lines)


def filled(text: str, content: str) -> str:
    """Return a text with what stands between the two marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{FILE.name} lacks the line {((end and BEGIN) or END).strip()!r}")
    return before + begin + content + end + after


def with_tools(text: str, tools: Mapping[str, str]) -> str:
    """Return a text whose variables ``NAME_IMAGE`` name the images of tools,
    with the digests that are recorded.
    """
    lines = text.splitlines(keepends=True)
    for name, image in tools.items():
        begin = f"    {name.upper()}_IMAGE: "
        lines = [f"{begin}{image}\n" if line.startswith(begin) else line for line in lines]
    return "".join(lines)


def tool_images() -> dict[str, str]:
    """Return the image of each tool, by its digest where `build.py lock` has recorded one."""
    facts = load(ROOT)
    found = {}
    for tool in facts.tool_images:
        digest = facts.digest_by_image.get(tool.image, "")
        found[tool.name] = f"{tool.image}@{digest}" if digest else tool.image
    return found


def main() -> int:
    """Write the file, or say that it is stale."""
    text = FILE.read_text(encoding="utf-8")
    wanted = with_tools(filled(text, batch(ask("--list"), ask("check"))), tool_images())
    if "--check" in sys.argv[1:]:
        if text != wanted:
            print("buildspec.yml is not what the facts say: run `make docs`", file=sys.stderr)
        return int(text != wanted)
    FILE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
