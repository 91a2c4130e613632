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

from tool_start import FileError, exit_status_of, use_environment

use_environment()

from trainworks.facts.load import load  # noqa: E402 - imported by the right Python

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "buildspec.yml"
BEGIN = "  # generated: by tools/write_buildspec.py from `build.py --list --format json`\n"
END = "  # end of generated\n"
ARM = (
    "        type: ARM_CONTAINER\n",
    "        image: aws/codebuild/amazonlinux-aarch64-standard:3.0\n",
)
"""CodeBuild's machine for arm64 (user guide, "Docker images provided by CodeBuild")."""


def ask(*words: str) -> Any:
    """Return the JSON of a command of build.py. Raises CalledProcessError; build.py says why."""
    command = (sys.executable, str(ROOT / "build.py"), *words, "--format", "json")
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def batch(targets: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]) -> str:
    """Return the tasks of the batch, one for each target that can be built.

    Args:
        targets: The result of `build.py --list`.
        findings: The result of `build.py check`.
    """
    buildable = set()
    for finding in findings:
        if finding["fits"] and not finding["unlocked"]:
            buildable.add(finding["target"])
    lines = ["  build-list:\n"]
    for target in targets:
        name = target["name"]
        if name not in buildable:
            continue
        identifier = re.sub("[^A-Za-z0-9_]", "_", name)
        lines.append(f"    - identifier: {identifier}\n")
        lines.append("      env:\n")
        if target["architecture"] == "arm64":
            lines += ARM
        lines.append("        privileged-mode: true\n")
        lines.append("        variables:\n")
        lines.append(f"          TARGET: {name}\n")
    return "".join(lines)


def filled(text: str, content: str) -> str:
    """Return a text with new content between the two marks."""
    before, begin, after_begin = text.partition(BEGIN)
    _, end, after = after_begin.partition(END)
    for line, mark in ((BEGIN, begin), (END, end)):
        if not mark:
            raise FileError(f"{FILE.name} lacks the line {line.strip()!r}: write it there again")
    return before + begin + content + end + after


def with_tools(text: str, tools: Mapping[str, str]) -> str:
    """Return a text with the images of tools in the variables ``NAME_IMAGE``.

    The images have the recorded digests.
    """
    lines = text.splitlines(keepends=True)
    for name, image in tools.items():
        begin = f"    {name.upper()}_IMAGE: "
        lines = [f"{begin}{image}\n" if line.startswith(begin) else line for line in lines]
    return "".join(lines)


def tool_images() -> dict[str, str]:
    """Return the image of each tool, by its digest where `build.py lock` has recorded one."""
    facts = load(ROOT)
    images = {}
    for tool in facts.tool_images:
        digest = facts.digest_by_image.get(tool.image, "")
        images[tool.name] = f"{tool.image}@{digest}" if digest else tool.image
    return images


def main() -> int:
    """Write the file, or with `--check` report that it is stale."""
    text = FILE.read_text(encoding="utf-8")
    tasks = batch(ask("--list"), ask("check"))
    new_text = with_tools(filled(text, tasks), tool_images())
    if "--check" in sys.argv[1:]:
        is_stale = text != new_text
        if is_stale:
            print("buildspec.yml is not what the facts say: run `make docs`", file=sys.stderr)
        return int(is_stale)
    FILE.write_text(new_text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
