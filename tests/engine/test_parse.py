"""Every Dockerfile of the matrix as the engines read it.

The bases of most of them cannot be pulled where this runs.

BuildKit reads all of a Dockerfile before it builds a stage, so a last stage that needs none of the
others has it parsed whole. buildah reads an instruction when it comes to it: it gets every kind of
instruction that there is, on a tiny base and with commands that do nothing, besides the text of
each whole file.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.helpers import BASE, request
from trainworks.engine.protocol import Engine, Secret
from trainworks.errors import BuildError
from trainworks.facts.rows import Facts, TargetRow
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.render.dockerfile import Rendering, render

pytestmark = pytest.mark.engine

NOTHING = "FROM scratch AS parsed\nLABEL parsed=yes\n"


def rendering_of(row: TargetRow, facts: Facts) -> Rendering:
    return render(make_plan(request_for(row, facts), facts), facts)


@pytest.fixture(scope="module")
def renderings(facts: Facts) -> dict[str, Rendering]:
    return {facts.name_of(row): rendering_of(row, facts) for row in facts.targets}


def parse(engine: Engine, dockerfile: str, folder: Path, tag: str) -> None:
    """Have an engine read a Dockerfile; raises ``BuildError`` where it cannot."""
    if engine.name != "buildah":
        engine.build(request(folder, f"{dockerfile}\n{NOTHING}", tags=(tag,)), lambda _: None)
        return
    program = shutil.which("buildah")
    assert program
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Dockerfile").write_text(NOTHING + dockerfile)
    command = (
        program,
        "build",
        "--isolation",
        "chroot",
        "--target",
        "parsed",
        "--tag",
        tag,
        str(folder),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise BuildError(done.stderr)


def test_every_dockerfile_is_read(
    renderings: dict[str, Rendering], engine: Engine, tag: str, tmp_path: Path
) -> None:
    for name, rendering in renderings.items():
        parse(engine, rendering.dockerfile, tmp_path / name, tag)


@pytest.mark.parametrize(
    "line", ["RUNN true", "RUN --mnt=type=bind,target=/x true", "COPY --from=system onlyone"]
)
def test_what_buildkit_does_not_know_would_be_seen(
    line: str, renderings: dict[str, Rendering], engine: Engine, tag: str, tmp_path: Path
) -> None:
    if engine.name == "buildah":
        pytest.skip("buildah reads an instruction when it comes to it: see the next test")
    dockerfile = next(iter(renderings.values())).dockerfile
    with pytest.raises(BuildError):
        parse(engine, f"{dockerfile}\n{line}", tmp_path / "context", tag)


# Every kind of instruction, once.


def instructions(dockerfile: str) -> Iterator[tuple[str, str, str]]:
    """Yield the instructions of the stages: word, options, and the rest."""
    lines = [
        line
        for line in dockerfile.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        match = re.fullmatch(r"(\S+)\s+((?:--\S+\s+)*)(.*)", line)
        assert match, line
        yield match[1], match[2], match[3]


def kind_of(word: str, options: str, rest: str) -> str:
    """Return the common part of two instructions that differ in names and commands only."""
    if word == "RUN":
        return "RUN " + re.sub(r"(id|source|target|from)=[^,\s]+", r"\1", options)
    if word == "COPY":
        return "COPY " + re.sub(r"=\S+", "", options) + str(len(rest.split()))
    return word


def kinds(renderings: dict[str, Rendering]) -> dict[str, tuple[str, str, str]]:
    """Return one instruction of each kind that the matrix has; FROM is in every one of them."""
    instructions_by_kind: dict[str, tuple[str, str, str]] = {}
    for rendering in renderings.values():
        for instruction in instructions(rendering.dockerfile):
            if instruction[0] != "FROM":
                instructions_by_kind.setdefault(kind_of(*instruction), instruction)
    return instructions_by_kind


def twin(renderings: dict[str, Rendering], *more: str) -> tuple[str, list[str]]:
    """Return a Dockerfile with one instruction of each kind, and the paths of
    the context that it names.
    """
    stages: dict[str, set[str]] = {}
    own: list[str] = []
    lines: list[str] = []
    for word, options, rest in kinds(renderings).values():
        if stage := re.search(r"from=([^,\s]+)", options):
            path = rest.split()[0] if word == "COPY" else re.search(r"source=([^,\s]+)", options)[1]  # type: ignore[index]
            stages.setdefault(stage[1], set()).add(path)
        else:
            own += (
                rest.split()[:-1]
                if word == "COPY"
                else re.findall(r"type=bind,source=([^,\s]+)", options)
            )
        instruction = f"RUN {options}true" if word == "RUN" else f"{word} {options}{rest}"
        lines.append(instruction)
    head = [
        f"FROM {BASE} AS {name}\nRUN mkdir -p {' '.join(sorted(paths))}"
        for name, paths in stages.items()
    ]
    return "\n".join([*head, f"FROM {BASE}", *lines, *more]), own


def build_twin(
    engine: Engine, renderings: dict[str, Rendering], folder: Path, tag: str, *more: str
) -> None:
    dockerfile, paths = twin(renderings, *more)
    secrets = HostSettings(pip=PipSettings()).secrets("bookworm", "")
    for path in paths:
        place = folder / path
        if any(file.path == path for rendering in renderings.values() for file in rendering.files):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(b"")
        else:
            place.mkdir(parents=True, exist_ok=True)
    given_secrets = tuple(
        Secret(identifier=name, content=content or b"-") for name, content in secrets.items()
    )
    engine.build(request(folder, dockerfile, tags=(tag,), secrets=given_secrets), lambda _: None)


def test_every_kind_of_instruction_is_understood(
    renderings: dict[str, Rendering], engine: Engine, tag: str, tmp_path: Path
) -> None:
    assert {kind.split()[0] for kind in kinds(renderings)} == {
        *("RUN", "COPY", "ENV", "LABEL", "WORKDIR", "ENTRYPOINT", "CMD"),
    }
    build_twin(engine, renderings, tmp_path, tag)


@pytest.mark.parametrize(
    "line", ["RUNN true", "RUN --mnt=type=bind,target=/x true", "COPY --from=nowhere /a /b"]
)
def test_a_kind_that_is_not_understood_would_be_seen(
    line: str, renderings: dict[str, Rendering], engine: Engine, tag: str, tmp_path: Path
) -> None:
    with pytest.raises(BuildError):
        build_twin(engine, renderings, tmp_path, tag, line)
