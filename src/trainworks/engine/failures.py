"""Turn the output of a failed build into an error that says what happened and what to do.

The kinds of failures are recognised by the tools' own texts, because an engine reports only an exit status. Comments
name the tools and versions that a pattern was written for; recorded outputs are in ``tests/engine/logs``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trainworks.engine.progress import FailedStep
from trainworks.errors import BuildError, EngineError, EngineUnavailableError, OutputError, TrainworksError

_SHORT: Final = 160

_DISK_FULL: Final = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)

# uv 0.9 ("Hash mismatch for `six==1.16.0`"), pip 23 (a list below its headline), coreutils sha256sum ("x: FAILED").
_HASHES: Final = (
    re.compile(r"Hash mismatch for `(?P<what>[^`]+)`"),
    re.compile(r"^\s{2,}(?P<what>\S+==\S+)(?: \(from .*| from .*)?:$"),
    re.compile(r"^(?P<what>\S+): FAILED$"),
)
# apt 2.6: nothing of it is locked, its own index has the hash.
_APT_HASH: Final = re.compile(r"(?:Failed to fetch (?P<what>\S+)\s.*)?Hash Sum mismatch")
_HASH_HEADLINE: Final = re.compile(
    r"hash mismatch|do not match the hashes|checksum did not match|: FAILED$|hash sum", re.IGNORECASE
)

# apt 2.6, pip 23, uv 0.9, curl 7.88, git 2.39, Go's net (docker and buildah pulling).
_UNREACHABLE: Final = re.compile(
    r"could not resolve|temporary failure (?:in name resolution|resolving)|name or service not known|no such host"
    r"|dns error|failed to lookup address|connection refused|connection timed out|connection reset"
    r"|network is unreachable|no route to host|could not connect to|failed to connect to|max retries exceeded"
    r"|failed to fetch|newconnectionerror|tcp connect error|i/o timeout|could not fetch url|connection broken"
    r"|operation timed out",
    re.IGNORECASE,
)
_FETCH: Final = re.compile(r"fetch|error sending request|requested url|https?://", re.IGNORECASE)
_ANSWER: Final = re.compile(r"(?<![\d.])(?P<answer>[45]\d\d (?:[A-Z][A-Za-z]+)(?: [A-Z][A-Za-z]+)*)")
# pip, uv, apt: the name is unknown, or its index did not answer and the tool does not report that.
_ABSENT: Final = re.compile(
    r"No matching distribution found for (\S+)|Because (\S+) was not found in|Unable to locate package (\S+)"
    r"|Because there is no version of (\S+) and"
)
# uv 0.9 (with and without hashes), pip 26: what the index gave is no wheel, or a part of one.
_SPOILED: Final = re.compile(
    r"Failed to extract archive: (\S+)|Because (\S+) has an invalid package format"
    r"|Wheel '(\S+)' located at \S+ is invalid"
)
_CREDENTIALS: Final = re.compile(r"//[^/@\s]+@")
_CERTIFICATE: Final = re.compile(
    r"certificate verify failed|unknownissuer|self[- ]signed certificate|certificate signed by unknown authority"
    r"|server certificate verification failed|ssl certificate problem|certificate verification failed",
    re.IGNORECASE,
)
_HOSTS: Final = (
    re.compile(r"https?://(?:[^@/\s'\"`]*@)?(?P<host>[^/\s'\"`:)]+(?::\d+)?)"),
    re.compile(r"host='(?P<host>[^']+)'(?:, port=\d+)?"),
    re.compile(r"(?:resolve host:?|resolving|connect to|lookup) '?(?P<host>[\w.-]+)"),
)
_DEAD: Final = re.compile(
    r"error reading from server: EOF|code = Unavailable|error during connect|cannot connect to the docker daemon"
    r"|transport is closing|http2: server sent goaway|failed to dial grpc|use of closed network connection",
    re.IGNORECASE,
)

OWN_FAULT: Final = re.compile(
    # buildah 1.28, whose processes copy themselves before they run a step: sealing fails while the kernel moves a page.
    r"(?:Close_Fd sealing memfd copy|memfd_create\(\)|(?:open|fstat|read)\(\"/proc/self/exe\"\)|write\(anonfd\)"
    r"|Error (?:during (?:reexec|unshare|set\w+)|writing PID to pipe)[^:]*): .*"
    # buildah 1.28 again: a stage failed while another one was being started, and its own Go code fell over that.
    r"|panic: runtime error: .*"
    # containerd and BuildKit: the runtime ended before the command was started.
    r"|.*(?:runc did not terminate succ?ess?fully|failed to create shim).*"
)
"""A line that an engine's own processes print if they fail before a command is started."""

_CHANGED: Final = (
    "the publisher, or a proxy on the way, changed the file: compare it with the publisher's own hash before you run "
    "`build.py lock`"
)
_MIRROR: Final = (
    "the archive is being updated, or a proxy or mirror changes files: build again in a few minutes, or set another "
    "mirror in /etc/apt/sources.list"
)
_UNTRUSTED: Final = (
    "the build uses this machine's CA bundle, pip and apt settings: add the CA to this machine, then build again"
)
_NO_WAY: Final = (
    "the build uses this machine's pip and apt settings (index, mirror, proxy, CA): try the same download on this "
    "machine, correct the settings, and build again: finished steps are cached"
)
_OTHER_ANSWER: Final = (
    "a proxy, a mirror or a page to sign in answers in the index's place, or half of a file was kept: open the index's "
    "page of this package on this machine (INDEX/NAME/), correct the settings of pip, and build again"
)
_LOOK: Final = "`build.py ... --until render --output DIR` writes the Dockerfile, to try the step by hand"


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


def explain(failure: Failure, *, alive: Callable[[], str], space: Callable[[], str]) -> TrainworksError:
    """Return the error to raise.

    Args:
        alive: Returns why the engine's daemon does not answer, ``""`` if it does; called only when needed.
        space: Returns a sentence about the free space of the engine's storage; called only when needed.
    """
    step = failure.step
    # If the command's own status is known, its output is the evidence: the engine's text quotes the whole command.
    evidence = step.lines if step is not None and step.status is not None else _all_words(failure)
    if failure.daemon and (step is None or step.status is None):
        words = alive()
        dead = words or next((line for line in evidence if _DEAD.search(line)), "")
        if dead:
            return EngineUnavailableError(
                f"the {failure.engine} daemon stopped answering during {_during(failure)}: {dead.strip()}",
                hint=f"read the daemon's log (`journalctl -u {failure.engine}`), start it (`make engine`), and build "
                "again: finished steps are cached",
            )
    full = next((line for line in evidence if _DISK_FULL.search(line)), None)
    if full is not None:
        return OutputError(
            f"the disk is full: {_during(failure)} could not write ({full.strip()}). {space()}",
            hint="free some space there, or move the engine's storage to a larger disk, and build again",
        )
    fault = next((line.strip() for line in evidence if OWN_FAULT.fullmatch(line.strip())), None)
    if fault is not None:
        return EngineError(
            f"{failure.engine} itself failed during {_during(failure)}: {fault}",
            hint="this is not a fault of the step: build again, finished steps are cached",
        )
    headline, hint = _cause(evidence)
    return BuildError(_CREDENTIALS.sub("//", _paragraph(failure, headline)), hint=hint)


def shorten(step: str) -> str:
    """Return an instruction as one line of limited length."""
    line = " ".join(step.split())
    return line if len(line) <= _SHORT else f"{line[: _SHORT - 1]}…"


def free_space(folder: str, *, free: int, total: int) -> str:
    """Return a sentence about the free space of a folder's disk."""
    return f"{folder} is on a disk with {free / 1e9:.2f} GB free of {total / 1e9:.2f} GB."


def host_in(text: str) -> str:
    """Return the host that a line names, without credentials; ``""`` if it names none."""
    for pattern in _HOSTS:
        found = pattern.search(text)
        if found is not None:
            return found["host"].rstrip(".")
    return ""


def _all_words(failure: Failure) -> tuple[str, ...]:
    step = failure.step
    return ((*step.lines, step.reason) if step is not None else ()) + failure.lines


def _cause(evidence: tuple[str, ...]) -> tuple[str, str]:
    """Return the cause for the first line of the error, and the hint."""
    changed = next((found for line in evidence if (found := _APT_HASH.search(line))), None)
    if changed is not None:
        what = changed["what"] or "a package"
        return f"{what} does not have the hash of its archive's index (Hash Sum mismatch)", _MIRROR
    if _found(_HASH_HEADLINE, evidence):
        for pattern in _HASHES:
            found = next((match for line in evidence if (match := pattern.search(line))), None)
            if found is not None:
                return f"the hash of {found['what']} is not the locked one", _CHANGED
        return "a downloaded file does not have the locked hash", _CHANGED
    broken = next((line for line in evidence if _CERTIFICATE.search(line)), None)
    if broken is not None:
        return (
            f"the certificate of {_host(evidence, _CERTIFICATE)} is not trusted",
            _UNTRUSTED,
        )
    refused = next((found for line in evidence if _FETCH.search(line) and (found := _ANSWER.search(line))), None)
    if refused is not None:
        return f"{_host(evidence, _FETCH)} answers {refused['answer']}", _NO_WAY
    if _found(_UNREACHABLE, evidence):
        return (
            f"{_host(evidence, _UNREACHABLE)} cannot be reached",
            _NO_WAY,
        )
    spoiled = next((found for line in evidence if (found := _SPOILED.search(line))), None)
    if spoiled is not None:
        what = next(name for name in spoiled.groups() if name)
        return f"what the package index gave for {what} is not that file, or not all of it", _OTHER_ANSWER
    absent = next((found for line in evidence if (found := _ABSENT.search(line))), None)
    if absent is not None:
        what = next(name for name in absent.groups() if name)
        return f"no package index that answered has {what}", f"{_NO_WAY}. Or {_OTHER_ANSWER}"
    return "", _LOOK


def _host(evidence: tuple[str, ...], pattern: re.Pattern[str]) -> str:
    """Return the host that the lines name; lines with the error come first."""
    ordered = [line for line in evidence if pattern.search(line)]
    return next((host for line in (*ordered, *evidence) if (host := host_in(line))), "a package index")


def _found(pattern: re.Pattern[str], evidence: tuple[str, ...]) -> bool:
    return any(pattern.search(line) for line in evidence)


def _during(failure: Failure) -> str:
    step = failure.step
    if step is None:
        return f"the build of {failure.target}"
    owner = f"{step.component}: " if step.component else ""
    return f"the build of {failure.target}, {owner}{shorten(step.step)}"


def _paragraph(failure: Failure, headline: str) -> str:
    step = failure.step
    component = f" in component {step.component}" if step is not None and step.component else ""
    first = f"building {failure.target} failed{component}" + (f": {headline}" if headline else "")
    if step is None:
        return f"{first} ({failure.engine} ended with status {failure.status})" + _indented(failure.lines)
    if step.status is not None:
        end = f"exit status {step.status}"
    else:
        end = step.reason.strip() or f"{failure.engine} ended with status {failure.status}"
    last = f"\n  its last lines:{_indented(step.lines)}" if step.lines else "\n  it printed nothing"
    if step.errors:
        last = f"\n  the compiler's first errors:{_indented(tuple(map(str.strip, step.errors)))}{last}"
    return f"{first}\n  step: {shorten(step.step)}\n  end: {end}{last}"


def _indented(lines: tuple[str, ...]) -> str:
    return "".join(f"\n    {line}" for line in lines)
