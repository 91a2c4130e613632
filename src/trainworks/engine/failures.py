"""Turn the output of a failed build into an error with the failed step, its last lines and a hint.

An engine only reports an exit status: its own faults and a full disk are recognised by its words.
Recorded outputs are in ``tests/engine/logs``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trainworks.engine.progress import FailedStep
from trainworks.errors import (
    BuildError,
    EngineError,
    EngineUnavailableError,
    OutputError,
    TrainworksError,
)

_SHORT: Final = 160
"""Characters of an instruction in an error."""

DISK_FULL: Final = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
"""The C library's words for ENOSPC and EDQUOT.

The free space cannot be measured afterwards: a failed engine frees it before it ends.
"""

_CREDENTIALS: Final = re.compile(r"//[^/@\s]+@")

OWN_FAULT: Final = re.compile(
    # buildah 1.28, whose processes copy themselves before they run a step: sealing fails while the
    # kernel moves a page.
    r"(?:Close_Fd sealing memfd"
    r" copy|memfd_create\(\)|(?:open|fstat|read)\(\"/proc/self/exe\"\)|write\(anonfd\)"
    r"|Error (?:during (?:reexec|unshare|set\w+)|writing PID to pipe)[^:]*): .*"
    # buildah 1.28 again: a stage failed while another one was being started,
    # and its own Go code fell over that.
    r"|panic: runtime error: .*"
    # containerd and BuildKit: the runtime ended before the command was started.
    r"|.*(?:runc did not terminate succ?ess?fully|failed to create shim).*"
)
"""A line that an engine's own processes print if they fail before a command is started."""

_LOOK: Final = (
    "the last lines are of the program that failed. It uses this machine's pip and apt settings"
    " (index, mirror, proxy, CA): try a failed download outside of the build. A hash that is not"
    " the locked one means that the publisher, or a proxy on the way, changed the file. `build.py"
    " ... --until render --output DIR` writes the Dockerfile, to try the step by hand; finished"
    " steps are cached"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A build that failed.

    Attributes:
        target: The target's name.
        engine: The engine's name.
        status: The exit status of the engine's program.
        step: The failed step, or the one that was running; ``None`` if no step began.
        lines: The engine's last lines, for failures that belong to no step.
        daemon: Whether the engine is a daemon, which may have stopped.
    """

    target: str
    engine: str
    status: int
    step: FailedStep | None
    lines: tuple[str, ...]
    daemon: bool = False


def explain(
    failure: Failure, *, alive: Callable[[], str], space: Callable[[], str]
) -> TrainworksError:
    """Return the error for a failed build; the kind of error says whose fault it is.

    A daemon that is gone comes first, then a full disk, then the engine's own fault; every other
    failure is of the step.

    Args:
        failure: The failed build.
        alive: Returns the reason why the engine's daemon does not answer, or ``""``; called only
            when needed.
        space: Returns a sentence about the free space of the engine's storage; called only when
            needed.
    """
    step = failure.step
    if step is None:
        evidence = failure.lines
    elif step.status is None:
        evidence = (*step.lines, step.reason, *failure.lines)
    else:
        # The command itself failed. The engine's lines quote the complete command, with any words.
        evidence = step.lines

    if failure.daemon and (step is None or step.status is None):
        reason = alive()
        if reason:
            during = _during(failure)
            return EngineUnavailableError(
                f"the {failure.engine} daemon stopped answering during {during}: {reason}",
                hint=(
                    f"read the daemon's log (`journalctl -u {failure.engine}`), start it (`make"
                    " engine`), and build again: finished steps are cached"
                ),
            )
    for line in evidence:
        if DISK_FULL.search(line):
            during = _during(failure)
            return OutputError(
                f"the disk is full: {during} could not write ({line.strip()}). {space()}",
                hint=(
                    "free some space there, or move the engine's"
                    " storage to a larger disk, and build again"
                ),
            )
    for line in evidence:
        if OWN_FAULT.fullmatch(line.strip()):
            return EngineError(
                f"{failure.engine} itself failed during {_during(failure)}: {line.strip()}",
                hint="this is not a fault of the step: build again, finished steps are cached",
            )
    return BuildError(_CREDENTIALS.sub("//", _paragraph(failure)), hint=_LOOK)


def shorten(step: str) -> str:
    """Return an instruction as one line of limited length."""
    line = " ".join(step.split())
    return line if len(line) <= _SHORT else f"{line[: _SHORT - 1]}…"


def free_space(folder: str, *, free: int, total: int) -> str:
    """Return a sentence about the free space of a folder's disk."""
    return f"{folder} is on a disk with {free / 1e9:.2f} GB free of {total / 1e9:.2f} GB."


def _during(failure: Failure) -> str:
    """Return the time of a failure in words: ``the build of TARGET, COMPONENT: STEP``."""
    step = failure.step
    if step is None:
        return f"the build of {failure.target}"
    owner = f"{step.component}: " if step.component else ""
    return f"the build of {failure.target}, {owner}{shorten(step.step)}"


def _paragraph(failure: Failure) -> str:
    """Return the message about a failed step: the step, its end, and its last lines."""
    step = failure.step
    component = f" in component {step.component}" if step is not None and step.component else ""
    first = f"building {failure.target} failed{component}"
    if step is None:
        return f"{first} ({failure.engine} ended with status {failure.status})" + _indented(
            failure.lines
        )
    if step.status is not None:
        end = f"exit status {step.status}"
    else:
        end = step.reason.strip() or f"{failure.engine} ended with status {failure.status}"
    last = f"\n  its last lines:{_indented(step.lines)}" if step.lines else "\n  it printed nothing"
    if step.errors:
        last = (
            f"\n  the compiler's first errors:{_indented(tuple(map(str.strip, step.errors)))}{last}"
        )
    return f"{first}\n  step: {shorten(step.step)}\n  end: {end}{last}"


def _indented(lines: tuple[str, ...]) -> str:
    """Return lines below a message: each after a line end and four blanks."""
    return "".join(f"\n    {line}" for line in lines)
