"""The image that is extended: found or pulled, and asked once for everything
that decides what fits it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

from trainworks.engine import closed
from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.engine.tree import read_tree
from trainworks.errors import ExtendError, ImageTestError, UnknownNameError
from trainworks.extend.constraints import kept_of
from trainworks.extend.inputs import ExtensionInputs
from trainworks.extend.requirements import BaseDistribution, ExtendedBase
from trainworks.facts.rows import Facts
from trainworks.host.cache import cache_folder, write_cached
from trainworks.imagetest import interpreter
from trainworks.imagetest.job_files import READ, JobFiles
from trainworks.imagetest.probe_request import ask_program
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY

PULL_SECONDS = 3600.0
"""How long the pull of a base image may take: those of AWS have many gigabytes."""

INTERPRETER_SECONDS = 300.0

_WORD = re.compile(r"[\w./+!~<>=,;* @:\[\]-]*")
"""What a name, a version or a path of an answer is made of."""

_VERSION = re.compile(r"\d{1,3}\.\d{1,3}")


def find_base(reference: str, engine: Engine, facts: Facts) -> tuple[BuiltImage, ExtendedBase]:
    """Return the base image, pulled where the engine does not have it, and what is known of it.

    Args:
        reference: Its name.
        engine: What has it.
        facts: What the components of our images protect; the rule for images
            that do not say it themselves.

    Raises:
        UnknownNameError: The engine does not have it, and it cannot be pulled.
        ExtendError: It has no Python, or one that does not answer.
    """
    image = engine.inspect(reference)
    if image is None:
        say(f"  pulling {reference}")
        with DISPLAY.task("pulling", log=False):
            image = (
                engine.inspect(reference) if engine.pull(reference, timeout=PULL_SECONDS) else None
            )
    if image is None:
        raise UnknownNameError(
            f"no image {reference}: {engine.name} does not have it,"
            " and it cannot be pulled from a registry",
            hint=(
                "correct the name, build it first (`build.py --list` shows ours),"
                " or log in to its registry"
            ),
        )
    found = _known_python(engine, image, reference)
    distributions = tuple(BaseDistribution(**row) for row in found["distributions"])
    patterns = [pattern for component in facts.components for pattern in component.protected]
    repository = re.sub(r"(:[^:/@]+)?(@.*)?$", "", reference)
    digests = [digest for digest in image.digests if digest.partition("@")[0] == repository]
    return image, ExtendedBase(
        reference=reference,
        identifier=image.identifier,
        digest=reference if "@" in reference else next(iter(digests), ""),
        environment=image.environment,
        labels=image.labels,
        user=image.user,
        distributions=distributions,
        kept=kept_of(found["protected"], distributions, patterns),
        **{
            name: value
            for name, value in found.items()
            if name not in ("distributions", "protected")
        },  # type: ignore[arg-type]
    )


def _known_python(engine: Engine, image: BuiltImage, reference: str) -> interpreter.Interpreter:
    """Return what was answered before for the same image by the same program, or ask.

    Raises as below.
    """
    program = b"".join(
        path.read_bytes() for path in sorted(Path(interpreter.__file__).parent.glob("*.py"))
    )
    key = hashlib.sha256(image.identifier.encode() + program).hexdigest()
    file = cache_folder(os.environ, "bases", f"{key}.json")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        known: interpreter.Interpreter = json.loads(file.read_text(encoding="utf-8"))
        if not _malformed(known):
            return known
    found = _ask_python(engine, image, reference)
    with contextlib.suppress(OSError):
        write_cached(file, json.dumps(found).encode())
    return found


def _ask_python(engine: Engine, image: BuiltImage, reference: str) -> interpreter.Interpreter:
    """Ask the Python that the base gives to a job.

    Raises ``ExtendError`` where none answers as it should.
    """
    files = JobFiles(tree=read_tree(engine, image.reference, READ), image=image)
    python = files.program("python") or files.program("python3")
    if not python:
        raise ExtendError(
            [f"--base {reference}: no python is on its PATH"], hint="take a training image"
        )
    words = engine.isolates()
    if words:
        say(
            f"  {reference} is asked and extended without isolation,"
            f" its programs see this machine: {words}"
        )
    try:
        with engine.container(image.reference, isolated=closed(engine)) as container:
            found = ask_program(
                container,
                (python, "-I"),
                ("interpreter",),
                {},
                interpreter.Interpreter,
                timeout=INTERPRETER_SECONDS,
            )
    except ImageTestError as error:
        raise ExtendError(
            [f"--base {reference}: {python} does not answer: {error.message}"]
        ) from error
    if wrong := _malformed(found):
        raise ExtendError([f"--base {reference}: {python} answers with {wrong}"])
    return found


def _malformed(found: interpreter.Interpreter) -> str:
    """Return what of an answer may not stand in a Dockerfile, a lock or a list of constraints.

    ``""`` if all may.
    """
    words = {name: value for name, value in found.items() if isinstance(value, str)}
    for row in found["distributions"]:
        words |= {
            f"distribution {row['name']!r:.60}": row["name"],
            f"version {row['version']!r:.60}": row["version"],
        }
    for names in (found["protected"], found["components"]):
        words |= {f"component {name!r:.60}": f"{name}{value}" for name, value in names.items()}
    words |= {f"component {name!r:.60}": name for name in found["missing"]}
    for name, value in words.items():
        if not _WORD.fullmatch(value):
            return f"a {name} that is none: {value!r:.60}"
    if not _VERSION.fullmatch(found["version"]):
        return f"a version that is none: {found['version']!r:.60}"
    return ""


def check_fit(base: ExtendedBase, inputs: ExtensionInputs) -> None:
    """Refuse an extension that does not fit its base; raises ``ExtendError`` with every problem."""
    problems, entry = [], inputs.entry_point
    if (
        entry is not None
        and entry.kind in ("module", "package")
        and not (base.launcher or entry.file)
    ):
        problems.append(
            f"--entry-point {entry.name}: {base.reference} does not have our launcher; name a file"
        )
    if inputs.apt and not base.apt:
        problems.append(
            f"--apt: {base.reference} is {base.distribution or 'unknown'}, and not Debian or Ubuntu"
        )
    where, oldest = f"--base {base.reference}", ".".join(map(str, interpreter.OLDEST))
    if not inputs.wanted and not inputs.project:
        pass
    elif tuple(map(int, base.version.split("."))) < interpreter.OLDEST:
        problems.append(
            f"{where} has Python {base.version}: requirements need Python {oldest} or newer"
        )
    elif not base.pip:
        problems.append(f"{where}: {base.python} has no pip to install requirements with")
    elif not base.glibc:
        problems.append(f"{where} does not have glibc, which training wheels are made for")
    if problems:
        raise ExtendError(
            problems, hint=f"{base.reference} has Python {base.version}; nothing was built"
        )
