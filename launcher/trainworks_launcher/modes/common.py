"""What the modes share: programs that must exist, requirements, the frame of a plan. Pure."""

from __future__ import annotations

from trainworks_launcher.entry import REQUIREMENTS, program_words
from trainworks_launcher.errors import Problem, RefusalError
from trainworks_launcher.job import Job


def programs(job: Job, names: tuple[str, ...], reason: str) -> tuple[str, ...]:
    """Absolute paths of programs, in order. Raises RefusalError that lists every one that is missing."""
    problems: list[Problem] = []
    found: list[str] = []
    manifest = job.environment.manifest
    for name in names:
        path = job.environment.programs.get(name, "")
        if not path:
            declared = manifest.programs.get(name)
            place = f"image {manifest.name!r}" + (f", which declares it at {declared}" if declared else ", PATH")
            advice = f"use an image that has {name}, or install it"
            problems.append(Problem(f"there is no {name}, and {reason}", place, advice))
        found.append(path)
    if problems:
        raise RefusalError(problems)
    return tuple(found)


def shell_of(job: Job) -> str:
    """The shell for .sh files without the execute bit: bash where there is one, else sh."""
    available = job.environment.programs
    return available.get("bash") or available.get("sh") or "/bin/sh"


def command(job: Job) -> tuple[str, ...]:
    """The user's program with its arguments, as it is started on its own."""
    python = job.environment.programs.get("python", "python3")
    return (*program_words(job.entry, job.code, python, shell_of(job)), *job.arguments)


def requirements(job: Job) -> tuple[str, ...]:
    """argv that installs requirements.txt with the image's own pip; () if there is none."""
    if REQUIREMENTS not in job.code.entries:
        return ()
    (python,) = programs(job, ("python",), f"{REQUIREMENTS} is to be installed")
    return (python, "-m", "pip", "install", "--disable-pip-version-check", "-r", REQUIREMENTS)
