"""``build.py lock``: records what targets are made of, or compares the records with the rows."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from trainworks.cli.grammar import FACTS, HOST_SETTINGS, TARGET, Example, Grammar, add_format, add_only
from trainworks.errors import FactsError, HostError, LockError, UnknownNameError
from trainworks.terminal.output import put, put_json


def parser() -> Grammar:
    """Return the grammar of ``build.py lock``."""
    grammar = Grammar(
        "lock",
        summary="record the hash, size and digest of every input of targets",
        details="Records the inputs of targets in images/lock: Python files, resolved and pinned by hash; hash and "
        "size of every other download, after its signature is checked; digests of base images.",
        examples=(
            Example("lock --check", "check that every lock fits its row, and list what is not locked"),
            Example(f"lock --only {TARGET}", "lock one target again", needs="the network"),
        ),
        result="the names of the files that were written. Commit them: a build uses nothing else.",
        done="locked, or every lock fits",
        fails=(FactsError, UnknownNameError, HostError, LockError),
        reads=(FACTS, HOST_SETTINGS),
        see_also=("mirror", "check", "docs/lock.md"),
    )
    add_only(grammar)
    grammar.add_argument("--check", action="store_true", help="check locks against the rows; write nothing")
    grammar.add_argument("--strict", action="store_true", help="with --check: fail if something is not locked")
    grammar.add_argument(
        "--mirror", type=Path, metavar="DIR", help="take files from this folder, and keep downloads in it"
    )
    add_format(grammar)
    return grammar


def run(options: Namespace, root: Path) -> int:
    """Lock targets; failures are reported at the end, and the rest is written."""
    from trainworks.facts.data import writable_root
    from trainworks.facts.load import load
    from trainworks.host.downloads import Client
    from trainworks.host.settings import read_host_settings
    from trainworks.inputs.lock_artifacts import check_locks, lock_artifacts, lock_base_images
    from trainworks.inputs.lock_python import write_python_lock
    from trainworks.plan.select import rows_like
    from trainworks.registry.tools import Patience, Registries
    from trainworks.terminal.fetching import Fetching
    from trainworks.terminal.output import say
    from trainworks.terminal.progress import DISPLAY

    facts = load(root)
    rows = rows_like(options.only, facts)
    if options.check:
        return _report_locks(*check_locks(rows, facts), options)
    writable_root(root, "`lock`")
    settings = read_host_settings(os.environ)
    written: list[str] = []
    problems: list[str] = []
    with DISPLAY.task("locking", len(rows), "targets", log=False) as task:
        for row in rows:
            try:
                written.append(str(write_python_lock(row, facts, settings, os.environ, root)))
            except LockError as error:
                problems.append(str(error))
            else:
                if options.format == "text":
                    put(f"{written[-1]}\n")
            task.advance()
    fetching = Fetching()
    with Client(settings, watch=fetching) as client, fetching.shown("fetching"):
        problems += lock_artifacts(rows, facts, client, root, mirror=options.mirror, report=say)
    with Registries(settings, report=say, patience=Patience(attempts=3)) as registries:
        problems += lock_base_images(rows, facts, registries, root, report=say)
    unique = tuple(dict.fromkeys(problems))
    if options.format == "json":
        put_json({"written": written, "problems": unique})
    if unique:
        raise _failure(
            f"{len(unique)} input{'s are' if len(unique) > 1 else ' is'} not locked:",
            unique,
            "the others are locked; run the same command on a machine that can download the rest",
            options,
        )
    return 0


def _report_locks(problems: Sequence[str], unlocked: Sequence[str], options: Namespace) -> int:
    if options.format == "json":
        put_json({"problems": problems, "unlocked": unlocked})
    elif unlocked:
        put("not locked, so not built:\n  " + "\n  ".join(unlocked) + "\n")
    failures = [*problems, *(f"not locked: {each}" for each in unlocked if options.strict)]
    if failures:
        hint = "`python build.py lock --only TARGET` locks a target again"
        raise _failure("images/lock does not fit the rows:", failures, hint, options)
    if options.format == "text":
        put("every lock fits its rows\n")
    return 0


def _failure(what: str, problems: Sequence[str], hint: str, options: Namespace) -> LockError:
    """Return the error that ends the command; as JSON its problems are on stdout already."""
    return LockError("\n  ".join((what, *problems)), hint=hint, reported=options.format == "json")
