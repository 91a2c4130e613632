"""What the modes share: programs that must exist, requirements, the frame of a plan. Pure."""

from __future__ import annotations

from trainworks_launcher.entry import REQUIREMENTS, program_words
from trainworks_launcher.errors import Problem, RefusalError
from trainworks_launcher.job import Job
from trainworks_launcher.plan import Reason


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


def command(job: Job) -> tuple[Reason, ...]:
    """The user's program with its arguments, as it is started on its own."""
    python = job.environment.programs.get("python", "python3")
    return explained_program(job, program_words(job.entry, job.code, python, shell_of(job)))


def explained_program(job: Job, words: tuple[str, ...], why: str = "") -> tuple[Reason, ...]:
    """The end of a command line: ``words`` start the user's program, the script's arguments follow."""
    program = Reason("program", why or f"the entry point, a {job.entry.kind}", "user", words)
    arguments = Reason("arguments", "the job's hyperparameters, sorted by name", "user", job.arguments)
    return (program, arguments) if job.arguments else (program,)


def requirements(job: Job) -> tuple[str, ...]:
    """argv that installs requirements.txt with the image's own pip; () if there is none."""
    if REQUIREMENTS not in job.code.entries:
        return ()
    (python,) = programs(job, ("python",), f"{REQUIREMENTS} is to be installed")
    return (python, "-m", "pip", "install", "--disable-pip-version-check", "-r", REQUIREMENTS)
