"""``build.py lock``: records the inputs of targets, or compares the records with the rows."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from trainworks.cli.grammar import FACTS, HOST_SETTINGS, TARGET, Example, Grammar, Manual
from trainworks.cli.options import add_format, add_only
from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import FactsError, HostError, LockError, UnknownNameError
from trainworks.terminal.output import put, put_json

if TYPE_CHECKING:
    from trainworks.facts.rows import Facts, TargetRow
    from trainworks.host.settings import HostSettings


def parser() -> Grammar:
    """Return the grammar of ``build.py lock``."""
    manual = Manual(
        command="lock",
        summary="record the hash, size and digest of every input of targets",
        details=(
            "Records the inputs of targets in images/lock: Python files, resolved and pinned by"
            " hash; hash and size of every other download, after its signature is checked; digests"
            " of base images; the day of the distribution's package archive. What is recorded stays"
            " as far as the rows allow it; --upgrade moves it."
        ),
        examples=(
            Example(
                "lock --check", "check that every lock fits its row, and list what is not locked"
            ),
            Example(
                f"lock --only {TARGET}",
                "lock one target, and keep what is locked",
                needs="the network",
            ),
            Example(
                f"lock --upgrade --dry-run --only {TARGET}",
                "see what is newer",
                needs="the network",
            ),
            Example(
                "lock --upgrade system", "take the security updates of today", needs="the network"
            ),
        ),
        result=(
            "the files that were written, each with the packages that moved. Commit them: a build"
            " uses nothing else."
        ),
        done="locked, or every lock fits",
        fails=(FactsError, UnknownNameError, HostError, LockError),
        reads=(FACTS, HOST_SETTINGS),
        see_also=("mirror", "check", "docs/lock.md"),
    )
    grammar = Grammar(manual, check=_check)
    add_only(grammar)
    grammar.add_argument(
        "--upgrade",
        nargs="?",
        const="all",
        choices=("all", "system"),
        help="move what is locked; system: package archives and base images only",
    )
    grammar.add_argument(
        "--newest", action="store_true", help="print what is newer than the rows; write nothing"
    )
    grammar.add_argument(
        "--dry-run", action="store_true", help="print what would move; write nothing"
    )
    grammar.add_argument(
        "--check", action="store_true", help="check locks against the rows; write nothing"
    )
    grammar.add_argument(
        "--strict", action="store_true", help="with --check: fail if something is not locked"
    )
    grammar.add_argument(
        "--mirror",
        type=Path,
        metavar="DIR",
        help="take files from this folder, and keep downloads in it",
    )
    add_format(grammar)
    return grammar


def _check(options: Namespace, _root: Path) -> list[str]:
    """Return the problem of options that exclude one another; empty without one."""
    used = [name for name in ("upgrade", "newest", "dry_run", "check") if getattr(options, name)]
    if len(used) < 2 or used == ["upgrade", "dry_run"]:
        return []
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in used)
    return [f"{flags} do not go together; --upgrade and --dry-run do"]


def run(options: Namespace, root: Path) -> int:
    """Lock targets, or compare their locks with the rows (``--check``); return 0.

    Writes the locks into the checkout, unless the options say otherwise, and prints the packages
    that moved.

    Raises:
        LockError: An input could not be locked; the other inputs are locked. The hint says whether
            a file was written.
    """
    from trainworks.facts.data import writable_root
    from trainworks.facts.load import load
    from trainworks.host.settings import read_host_settings
    from trainworks.inputs.lock_artifacts import check_locks
    from trainworks.plan.select import rows_like

    facts = load(root)
    rows = rows_like(options.only, facts)
    if options.check:
        return _report_locks(*check_locks(rows, facts), options)
    writes = not options.dry_run and not options.newest
    if writes:
        writable_root(root, "`lock`")
    with ExitStack() as stack:
        # A dry run writes its locks to a temporary folder.
        folder = root if writes else stack.enter_context(private_folder())
        (folder / "images" / "lock").mkdir(parents=True, exist_ok=True)
        settings = read_host_settings(os.environ)
        before = _read_write_times(folder)
        files, moved, problems = _lock(rows, facts, settings, folder, options)
        is_written = writes and _read_write_times(folder) != before
    # One input of many targets has one line.
    unique = tuple(dict.fromkeys(problems))
    if options.format == "json":
        written = files if writes else []
        put_json({"written": written, "moved": moved, "problems": unique})
    if unique:
        noun = "inputs are" if len(unique) > 1 else "input is"
        outcome = "nothing is written"
        if is_written:
            outcome = "the others are locked"
        hint = f"{outcome}; run the same command on a machine that can download the rest"
        raise _failure(f"{len(unique)} {noun} not locked:", unique, hint, options)
    return 0


def _read_write_times(folder: Path) -> dict[str, int]:
    """Return when each lock of a checkout was last written, in nanoseconds, by its file's name."""
    locks = (folder / "images" / "lock").glob("*.toml")
    return {lock.name: lock.stat().st_mtime_ns for lock in locks}


def _lock(
    rows: Sequence[TargetRow],
    facts: Facts,
    settings: HostSettings,
    folder: Path,
    options: Namespace,
) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Lock the inputs of rows, and print the packages that moved.

    Args:
        rows: The targets.
        facts: The facts of the checkout, with the locks as they are.
        settings: This machine's indexes, proxies and CAs.
        folder: The folder that gets the locks, below ``images/lock``.
        options: The options of the command line.

    Returns:
        The written files; the moved packages, as lines by target (``shared``: of all targets);
        and a line for each input that could not be locked.
    """
    from trainworks.host.downloads import Client
    from trainworks.inputs.lock_artifacts import (
        LockRun,
        lock_archives,
        lock_artifacts,
        lock_base_images,
        report_newer_tags,
    )
    from trainworks.inputs.lock_python import (
        describe_moves,
        lock_target,
        remove_versions,
        write_python_lock,
    )
    from trainworks.registry.protocol import Patience
    from trainworks.registry.tools import Registries
    from trainworks.terminal.download_progress import Fetching
    from trainworks.terminal.output import say
    from trainworks.terminal.progress import DISPLAY

    files: list[str] = []
    moved: dict[str, list[str]] = {}
    problems: list[str] = []
    # ``--upgrade system`` leaves the Python packages alone.
    resolved = () if options.upgrade == "system" else rows
    upgrades_packages = bool(options.upgrade or options.newest)
    with DISPLAY.task("locking", len(resolved), "targets", log=False) as task:
        for row in resolved:
            name = facts.name_of(row)
            row_to_lock, facts_to_lock = row, facts
            # Without the versions of the rows, the newest ones are resolved.
            if options.newest:
                row_to_lock, facts_to_lock = remove_versions(row, facts)
            try:
                packages = lock_target(
                    row_to_lock, facts_to_lock, settings, os.environ, upgrade=upgrades_packages
                )
            except LockError as error:
                problems.append(str(error))
            else:
                before = facts.locks[name].packages if name in facts.locks else ()
                moved[name] = describe_moves(before, packages)
                file = str(write_python_lock(row, facts, packages, folder))
                files.append(file)
                if options.format == "text":
                    title = name if options.dry_run or options.newest else file
                    lines = moved[name] or ["nothing moves"]
                    put("\n  ".join((title, *lines)) + "\n")
            task.advance()

    def report(line: str) -> None:
        # Tags, package archives and base images move for many targets at once.
        moved.setdefault("shared", []).append(line.strip())
        say(line)

    if options.newest:
        with Client(settings) as client:
            report_newer_tags(rows, facts, client, report=report)
        return files, moved, problems
    upgrade = bool(options.upgrade)
    shared = LockRun(rows=rows, facts=facts, root=folder, report=report)
    unread, suites = lock_archives(shared, settings, upgrade=upgrade)
    problems += unread
    fetching = Fetching()
    with Client(settings, watch=fetching) as client, fetching.shown("fetching"):
        artifacts = LockRun(rows=resolved, facts=facts, root=folder, report=say)
        problems += lock_artifacts(artifacts, client, mirror=options.mirror)
    with Registries(settings, report=say, patience=Patience(attempts=3)) as registries:
        system = suites if options.upgrade == "system" else None
        problems += lock_base_images(shared, registries, upgrade=upgrade, system=system)
    return files, moved, problems


def _report_locks(problems: Sequence[str], unlocked: Sequence[str], options: Namespace) -> int:
    """Print the problems of locks and the inputs without a lock; return 0.

    Args:
        problems: A line for each lock that does not fit its row.
        unlocked: The names of inputs without a lock; with ``--strict`` they are problems, too.
        options: The options of the command line.

    Raises:
        LockError: There is a problem.
    """
    if options.format == "json":
        put_json({"problems": problems, "unlocked": unlocked})
    elif unlocked:
        put("not locked, so not built:\n  " + "\n  ".join(unlocked) + "\n")
    failures = [*problems]
    if options.strict:
        failures += [f"not locked: {name}" for name in unlocked]
    if failures:
        hint = "`python build.py lock --only TARGET` locks a target again"
        raise _failure("images/lock does not fit the rows:", failures, hint, options)
    if options.format == "text":
        put("every lock fits its rows\n")
    return 0


def _failure(title: str, problems: Sequence[str], hint: str, options: Namespace) -> LockError:
    """Return the error that ends the command, with one line for each problem below its title.

    With ``--format json`` the problems are on stdout already, and the error is not printed there.
    """
    return LockError("\n  ".join((title, *problems)), hint=hint, reported=options.format == "json")
