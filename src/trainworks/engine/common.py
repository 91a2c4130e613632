"""Common parts of builds with docker and buildah: options, and the child that prints events."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainworks.engine import subprocesses
from trainworks.engine.orphans import end_left_children
from trainworks.engine.progress import TAIL, BuildahParser, BuildKitParser, StepLog
from trainworks.engine.protocol import BuildRequest, Progress, StepEvent
from trainworks.errors import EngineUnavailableError

PROXIES = tuple(
    name
    for stem in ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
    for name in (stem, stem.upper())
)
"""Variables with the addresses of proxies, which engines keep out of history and cache keys."""


def build_arguments(request: BuildRequest, folder: Path) -> list[str]:
    """Return the options of a build that both engines take, and write its secrets to files.

    Args:
        request: The build.
        folder: A private folder, which gets a file with mode 0600 for each secret.

    Raises:
        OSError: A secret cannot be written.
    """
    argv: list[str] = []
    for number, secret in enumerate(request.secrets):
        # The identifier may hold a slash or a comma, neither of which may reach
        # a file name or a ``src=`` option.
        path = folder / f"secret-{number}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret.content)
        argv += ["--secret", f"id={secret.identifier},src={path}"]
    for label, value in request.labels.items():
        argv += ["--label", f"{label}={value}"]
    for tag in request.tags:
        argv += ["--tag", tag]
    argv += ["--platform", f"linux/{request.architecture}"]
    if request.no_cache:
        argv.append("--no-cache")
    return argv


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """The end of a build: exit status, log of its steps, and the last lines that are not empty."""

    status: int
    log: StepLog
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BuildCommand:
    """The command line of an engine that builds an image.

    Attributes:
        argv: The program and its arguments.
        environment: The complete environment.
        hint: What to do if there is no such program.
        strays: Finds processes of the build's steps that are not in the program's group.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    hint: str
    strays: subprocesses.Strays = subprocesses.no_strays


def run_build(
    command: BuildCommand, parser: BuildKitParser | BuildahParser, receive: Progress
) -> BuildResult:
    """Run the engine's program to its end, and hand on each event.

    Children that killed builders left behind are ended first.

    Args:
        command: The engine's command line.
        parser: Reads events from the lines of the program.
        receive: Takes the events.

    Raises:
        EngineUnavailableError: There is no such program; with the hint.
    """
    log = StepLog()
    last_lines: deque[str] = deque(maxlen=TAIL)

    def hand_on(events: Iterator[StepEvent]) -> None:
        for event in events:
            log.add(event)
            receive(event)

    def take(line: str) -> None:
        if line.strip():
            last_lines.append(line)
        hand_on(parser.feed(line))

    end_left_children()
    try:
        status = subprocesses.stream(
            command.argv, take, environment=command.environment, strays=command.strays
        )
    except OSError as error:
        raise EngineUnavailableError(
            f"cannot run {command.argv[0]}: {error.strerror}", hint=command.hint
        ) from error
    # The last step of a failed build has not ended well.
    if status == 0:
        hand_on(parser.finish())
    return BuildResult(status=status, log=log, lines=tuple(last_lines))
