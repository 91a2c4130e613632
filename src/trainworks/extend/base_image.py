"""Finds or pulls the image that is extended, and reads its Python: once for each image."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

from trainworks.engine.protocol import BuiltImage, Engine
from trainworks.engine.tree import read_tree
from trainworks.errors import (
    EngineUnavailableError,
    ExtendError,
    ImageTestError,
    UnknownNameError,
)
from trainworks.extend.constraints import kept_of
from trainworks.extend.inputs import ExtensionInputs
from trainworks.extend.requirements import BaseDistribution, ExtendedBase
from trainworks.facts.rows import Facts
from trainworks.host.cache import cache_folder, write_cached
from trainworks.imagetest import interpreter
from trainworks.imagetest.job_files import READ, JobFiles
from trainworks.imagetest.probe_request import ProbeProgram, ask_program
from trainworks.terminal.output import say
from trainworks.terminal.progress import DISPLAY

PULL_SECONDS = 3600.0
"""Limit for the pull of a base image: those of AWS have many gigabytes."""

INTERPRETER_SECONDS = 300.0

_DESCRIBE_PYTHON = ProbeProgram(modules=("interpreter",), shape=interpreter.Interpreter)
"""The program that describes the Python of a base."""

_WORD = re.compile(r"[\w./+!~<>=,;* @:\[\]-]*")
"""A valid name, version or path in an answer."""

_VERSION = re.compile(r"\d{1,3}\.\d{1,3}")


def find_base(reference: str, engine: Engine, facts: Facts) -> tuple[BuiltImage, ExtendedBase]:
    """Return the base image, pulled where the engine does not have it, and its description.

    Args:
        reference: The image's name.
        engine: The engine that has or pulls the image.
        facts: They say what the components of our images protect: the rule for images
            without a manifest.

    Raises:
        UnknownNameError: The engine does not have the image, and it cannot be pulled.
        EngineUnavailableError: The engine cannot isolate a program of the image.
        ExtendError: The image has no Python, or one that does not answer.
    """
    image = _find_or_pull(reference, engine)
    # Before the cached answer: later steps and tests run programs of the base, too.
    _require_isolation(engine, reference)
    python = _known_python(engine, image, reference)
    distributions = tuple(BaseDistribution(**row) for row in python["distributions"])
    patterns: list[str] = []
    for component in facts.components:
        patterns += component.protected
    description = dict(python)
    del description["distributions"], description["protected"]
    return image, ExtendedBase(
        reference=reference,
        identifier=image.identifier,
        digest=_digest_of(reference, image),
        environment=image.environment,
        labels=image.labels,
        user=image.user,
        distributions=distributions,
        kept=kept_of(python["protected"], distributions, patterns),
        **description,  # type: ignore[arg-type]
    )


def _require_isolation(engine: Engine, reference: str) -> None:
    """Raise ``EngineUnavailableError`` if the engine cannot isolate a program of a base."""
    missing_isolation = engine.isolates()
    if missing_isolation:
        raise EngineUnavailableError(
            f"no program of {reference} is run: {engine.name} cannot isolate it from this machine:"
            f" {missing_isolation}",
            hint="`apt-get install crun`, or use `--engine docker`",
        )


def _find_or_pull(reference: str, engine: Engine) -> BuiltImage:
    """Return the engine's image of a name, pulled if the engine does not have it.

    Raises:
        UnknownNameError: The image cannot be pulled either.
    """
    image = engine.inspect(reference)
    if image is not None:
        return image
    say(f"  pulling {reference}")
    with DISPLAY.task("pulling", log=False):
        if engine.pull(reference, timeout=PULL_SECONDS):
            image = engine.inspect(reference)
    if image is not None:
        return image
    raise UnknownNameError(
        f"no image {reference}: {engine.name} does not have it,"
        " and it cannot be pulled from a registry",
        hint=(
            "correct the name, build it first (`build.py --list` shows ours),"
            " or log in to its registry"
        ),
    )


def _digest_of(reference: str, image: BuiltImage) -> str:
    """Return the image's name with its digest in the registry, or ``""``."""
    if "@" in reference:
        return reference
    repository = re.sub(r"(:[^:/@]+)?(@.*)?$", "", reference)
    for digest in image.digests:
        if digest.partition("@")[0] == repository:
            return digest
    return ""


def _known_python(engine: Engine, image: BuiltImage, reference: str) -> interpreter.Interpreter:
    """Return the cached answer of the same image to the same program, or ask the image.

    Raises as ``_ask_python`` does.
    """
    programs = sorted(Path(interpreter.__file__).parent.glob("*.py"))
    program = b"".join(path.read_bytes() for path in programs)
    key = hashlib.sha256(image.identifier.encode() + program).hexdigest()
    file = cache_folder(os.environ, "bases", f"{key}.json")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        cached: interpreter.Interpreter = json.loads(file.read_text(encoding="utf-8"))
        if not _malformed(cached):
            return cached
    answer = _ask_python(engine, image, reference)
    with contextlib.suppress(OSError):
        write_cached(file, json.dumps(answer).encode())
    return answer


def _ask_python(engine: Engine, image: BuiltImage, reference: str) -> interpreter.Interpreter:
    """Ask the Python that the base gives to a job.

    Raises:
        ExtendError: The base has no Python, or one that does not answer, or whose answer is
            malformed.
    """
    files = JobFiles(tree=read_tree(engine, image.reference, READ), image=image)
    python = files.program("python") or files.program("python3")
    if not python:
        raise ExtendError(
            [f"--base {reference}: no python is on its PATH"], hint="take a training image"
        )
    try:
        with engine.container(image.reference, isolated="asked") as container:
            answer = ask_program(
                container, (python, "-I"), _DESCRIBE_PYTHON, {}, timeout=INTERPRETER_SECONDS
            )
    except ImageTestError as error:
        raise ExtendError(
            [f"--base {reference}: {python} does not answer: {error.message}"]
        ) from error
    problem = _malformed(answer)
    if problem:
        raise ExtendError([f"--base {reference}: {python} answers with {problem}"])
    return answer


def _malformed(answer: interpreter.Interpreter) -> str:
    """Return the first text of an answer that must not be in a Dockerfile or a lock, or ``""``."""
    texts = {name: value for name, value in answer.items() if isinstance(value, str)}
    for row in answer["distributions"]:
        texts[f"distribution {row['name']!r:.60}"] = row["name"]
        texts[f"version {row['version']!r:.60}"] = row["version"]
    for components in (answer["protected"], answer["components"]):
        for name, version in components.items():
            texts[f"component {name!r:.60}"] = f"{name}{version}"
    for name in answer["missing"]:
        texts[f"component {name!r:.60}"] = name
    for label, text in texts.items():
        if not _WORD.fullmatch(text):
            return f"a {label} that is none: {text!r:.60}"
    if not _VERSION.fullmatch(answer["version"]):
        return f"a version that is none: {answer['version']!r:.60}"
    return ""


def check_fit(base: ExtendedBase, inputs: ExtensionInputs) -> None:
    """Refuse an extension that does not fit its base; raises ``ExtendError`` with every problem."""
    problems = []
    entry = inputs.entry_point
    is_module = entry is not None and entry.kind in ("module", "package")
    if entry is not None and is_module and not entry.file and not base.launcher:
        problems.append(
            f"--entry-point {entry.name}: {base.reference} does not have our launcher; name a file"
        )
    if inputs.apt and not base.apt:
        problems.append(
            f"--apt: {base.reference} is {base.distribution or 'unknown'}, and not Debian or Ubuntu"
        )
    if inputs.requested or inputs.project:
        problem = _python_problem(base)
        if problem:
            problems.append(problem)
    if problems:
        raise ExtendError(
            problems, hint=f"{base.reference} has Python {base.version}; nothing was built"
        )


def _python_problem(base: ExtendedBase) -> str:
    """Return the reason why nothing can be installed for a base's Python, or ``""``."""
    where = f"--base {base.reference}"
    version = tuple(int(part) for part in base.version.split("."))
    if version < interpreter.OLDEST:
        oldest = ".".join(str(part) for part in interpreter.OLDEST)
        return f"{where} has Python {base.version}: requirements need Python {oldest} or newer"
    if not base.pip:
        return f"{where}: {base.python} has no pip to install requirements with"
    if not base.glibc:
        return f"{where} does not have glibc, which training wheels are made for"
    return ""
