"""Test that no step of a Dockerfile has a secret while other people's code runs, or after it could
have changed the stage.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainworks.facts.load import load
from trainworks.facts.rows import Facts
from trainworks.plan.resolve import plan_row
from trainworks.render.dockerfile import render

SECRET = re.compile(r"--mount=type=secret,id=([^,\s]+)")
LOGINS = frozenset({"netrc", "pip.conf", "uv.toml", "mirror"})
"""The secrets that may have a login in them, of an index or a mirror."""

MAY = {
    ("ca.pem", "mirror", "netrc", "timeout"): "/opt/builder/bin/fetch",
    ("ca.pem", "netrc", "timeout", "uv.toml"): "/opt/builder/bin/install-python-packages",
    ("ca.pem", "netrc", "pip.conf", "timeout"): "/opt/builder/bin/fetch-archives",
    ("ca.pem", "netrc", "pip.conf"): "python3 -m pip install",
    ("apt.conf", "ca.pem", "sources.list"): "sh /mnt/install-packages",
}
"""Which secrets a step may have, and the one program that it has them for."""

AFTERWARDS = frozenset(
    {"/opt/builder/bin/trim-python-packages", "rm", "mv", "cp", "mkdir", "find", "touch"}
)
"""Programs that may follow in a step with logins: our own, and the distribution's.

None of these programs runs a downloaded file.
"""

AFTER_APT = AFTERWARDS | {"ldconfig", "/usr/bin/python3", "chmod"}


@pytest.fixture(scope="module")
def facts(root: Path) -> Facts:
    return load(root)


def instructions(text: str) -> Iterator[str]:
    """Yield each instruction in one line, without comments."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    yield from re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()


def commands(step: str) -> list[list[str]]:
    """Return the words of each command of a RUN, in order."""
    words = shlex.split(step.removeprefix("RUN "))
    while words and words[0].startswith("--mount="):
        words.pop(0)
    command_words: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", ";") or (word.endswith(";") and word != ";"):
            command_words[-1] += [word.rstrip(";")] if word not in ("&&", ";") else []
            command_words.append([])
        else:
            command_words[-1].append(word)
    return [command for command in command_words if command]


def program(words: list[str]) -> str:
    """Return the program of a command, without the words of the shell itself before it."""
    words = list(words)
    while words and words[0] in ("do", "then"):
        words.pop(0)
    return words[0] if words else ""


def faults(dockerfile: str) -> Iterator[str]:
    """Yield the faults of a Dockerfile, in words."""
    stage, spoiled = "", ""
    for instruction in instructions(dockerfile):
        if instruction.startswith("FROM "):
            stage, spoiled = instruction.split()[-1], ""
        # Of that stage comes a folder of wheels, which are unpacked as any other.
        if (
            instruction.startswith("COPY --from=")
            and instruction != f"COPY --from={stage}-archives /opt/built /opt/built"
        ):
            spoiled = spoiled or instruction
        if not instruction.startswith("RUN "):
            continue
        secrets = tuple(sorted(SECRET.findall(instruction)))
        if not secrets:
            # The command only removes NVIDIA's own archive.
            spoiled = spoiled or (
                "" if instruction.startswith("RUN rm -f /etc/apt/") else instruction
            )
            continue
        where = f"{stage}: {', '.join(secrets)}"
        if secrets not in MAY:
            yield f"{where}: no step has these"
            continue
        logins = bool(LOGINS & set(secrets))
        if logins and spoiled:
            yield f"{where}: after {spoiled}"
        if MAY[secrets] not in instruction:
            yield f"{where}: without {MAY[secrets]}"
        for words in commands(instruction):
            name = program(words)
            own = " ".join(words).startswith(MAY[secrets])
            shell = name in ("export", "for", "done", "if", "fi") or not name
            if not (own or shell or name in (AFTERWARDS if logins else AFTER_APT)):
                yield f"{where}: runs {' '.join(words)}"
        if MAY[secrets].startswith("python3") and "--only-binary :all:" not in instruction:
            yield f"{where}: pip may build"


def test_what_has_secrets_runs_no_other_code_in_every_target(facts: Facts) -> None:
    secret_faults = {
        f"{facts.name_of(row)}: {fault}"
        for row in facts.targets
        for fault in faults(render(plan_row(row, facts), facts, check=False).dockerfile)
    }
    # The installer calls apt itself, with apt's settings: AWS's own installer, which is a file with
    # a recorded hash.
    vendors = {
        fault for fault in secret_faults if "keep-changes /opt/root ./efa_installer.sh" in fault
    }
    assert all("-vendor: " in vendor for vendor in vendors)
    assert secret_faults - vendors == set()


def test_source_archives_are_built_in_a_stage_without_a_secret_after_it_began(facts: Facts) -> None:
    row = next(
        row for row in facts.targets if facts.name_of(row) == "pytorch-2.13.0-cpu-py311-debian12"
    )
    rendering = render(plan_row(row, facts), facts)
    text = rendering.dockerfile
    stage = text.partition("FROM builder AS sagemaker-training-archives\n")[2].partition("\n\n")[0]
    fetched, built = (
        instruction for instruction in instructions(stage) if instruction.startswith("RUN ")
    )
    assert SECRET.findall(fetched)
    assert not SECRET.findall(built)
    assert "/opt/builder/bin/build-archives" in built
    files = {file.path: file.content.decode() for file in rendering.files}
    assert (
        "sagemaker_training-5.1.4.tar.gz" in files["requirements/sagemaker-training-archives.txt"]
    )
    assert "sagemaker-training==" not in files["requirements/sagemaker-training.txt"]
    # uv refuses to build, should a list of wheels have an archive after all.
    assert " --no-build " in files["files/builder/install-python-packages"]


ARCHIVES = "RUN --mount=type=bind,source=requirements/sagemaker-training-archives.txt"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("/opt/builder/bin/fetch-archives", "make && /opt/builder/bin/fetch-archives", "runs make"),
        ("    && rm /opt/venv", "    && ./configure && rm /opt/venv", "runs ./configure"),
        ("FROM builder AS torch\n", "FROM builder AS torch\nRUN make\n", "after RUN make"),
        (
            ARCHIVES,
            ARCHIVES.replace("RUN ", "RUN --mount=type=secret,id=netrc "),
            "no step has these",
        ),
    ],
)
def test_a_step_that_has_secrets_for_more_is_found(
    facts: Facts, before: str, after: str, message: str
) -> None:
    row = next(
        row for row in facts.targets if facts.name_of(row) == "pytorch-2.13.0-cpu-py311-debian12"
    )
    text = render(plan_row(row, facts), facts, check=False).dockerfile
    assert not list(faults(text))
    assert before in text
    assert message in "; ".join(faults(text.replace(before, after)))
