"""Share a tiny root file system and recorded logs among the engine tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainworks.build.context import content_time
from trainworks.engine.progress import BuildahParser, BuildKitParser, StepLog
from trainworks.engine.protocol import BuildRequest, Secret, StepEvent

LOGS = Path(__file__).parent / "logs"
BASE = "trainworks-conformance:base"
CREATED = 1_700_000_000
APPLETS = (
    *(
        "[",
        "cat",
        "chmod",
        "cp",
        "dd",
        "echo",
        "env",
        "false",
        "find",
        "grep",
        "head",
        "id",
        "ln",
        "ls",
        "md5sum",
    ),
    *(
        "mkdir",
        "mount",
        "mv",
        "od",
        "printf",
        "ps",
        "pwd",
        "rm",
        "sed",
        "seq",
        "setsid",
        "sh",
        "sha256sum",
        "sleep",
    ),
    *("sort", "stat", "tail", "test", "touch", "tr", "true", "uname", "wc", "which", "yes"),
)


def busybox() -> Path | None:
    """Return a busybox.

    The program must be the static one (Debian: busybox-static), which the tests see when it runs.
    """
    program = shutil.which("busybox", path="/bin:/usr/bin:/sbin")
    return Path(program) if program else None


def make_rootfs(folder: Path, program: Path) -> Path:
    for name in ("bin", "dev", "etc", "proc", "root", "sys", "tmp", "usr/bin"):
        (folder / name).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    shutil.copy(program, folder / "bin" / "busybox")
    for applet in APPLETS:
        (folder / "bin" / applet).symlink_to("busybox")
    (folder / "etc" / "os-release").write_text('ID=tiny\nNAME="Tiny"\n')
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return folder


def request(
    folder: Path,
    dockerfile: str,
    *,
    name: str = "tiny",
    files: Mapping[str, str] | None = None,
    tags: tuple[str, ...] = (),
    secrets: tuple[Secret, ...] = (),
    arguments: Mapping[str, str] | None = None,
    components: Mapping[str, str] | None = None,
    no_cache: bool = False,
) -> BuildRequest:
    """Write a build context and return the request for it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Dockerfile").write_text(dockerfile)
    for path, text in (files or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    # As in the builder's own contexts: newer versions of buildah have the times
    # of mounted files in their cache's keys.
    for entry in folder.rglob("*"):
        entry_bytes = entry.read_bytes() if entry.is_file() else b""
        os.utime(entry, ns=(content_time(entry_bytes),) * 2)
    return BuildRequest(
        name=name,
        context=folder,
        tags=tags,
        secrets=secrets,
        arguments=dict(arguments or {}),
        stage_components=dict(components or {}),
        no_cache=no_cache,
    )


def parser_for(log: Path, components: Mapping[str, str]) -> BuildahParser | BuildKitParser:
    return (
        BuildahParser(components) if log.name.startswith("buildah") else BuildKitParser(components)
    )


def events_of(log: Path, components: Mapping[str, str], *, finish: bool = True) -> list[StepEvent]:
    parser = parser_for(log, components)
    events = [event for line in log.read_text().splitlines() for event in parser.feed(line)]
    return [*events, *parser.finish()] if finish else events


def log_of(events: Iterable[StepEvent]) -> StepLog:
    log = StepLog()
    for event in events:
        log.add(event)
    return log
