"""Parse what torchrun, mpirun and deepspeed print about the ranks that they started. Pure.

The user's own script may have started them, so the reports of all three are parsed in every mode.
Loaded only when something fails.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Sequence

from trainworks_launcher.contract.json_values import printable
from trainworks_launcher.supervise.outcome.outcome import LAST_SIGNAL, returncode_of


class Report(NamedTuple):
    """The rank that a starter names as the first to fail.

    Attributes:
        rank: Its global rank; -1 if the starter names none.
        code: Its return code, negative after a signal.
        host: Its host; "" if the starter names none.
        ended_early: Whether it ended with status 0 while others went on, and the starter ended
            the job for that.
        starter: ``torchrun``, ``mpirun`` or ``deepspeed``; "" without a report.
    """

    rank: int = -1
    code: int = 0
    host: str = ""
    ended_early: bool = False
    starter: str = ""


def report_of(tail: bytes, ranks_by: str = "") -> Report:
    """Find the report in the output of a starter, or of a script that started one.

    Args:
        tail: End of the output.
        ranks_by: Starter of the job's ranks: only its report counts. ``""``: that of any starter.

    Returns:
        The report; an empty one, with ``starter`` ``""``, if there is none.
    """
    words = tail.decode("utf-8", "replace")
    readers = {
        "torchrun": _read_torchrun_report,
        "mpirun": _read_mpirun_report,
        "deepspeed": _read_deepspeed_report,
    }
    chosen = list(readers.values())
    if ranks_by in readers:
        chosen = [readers[ranks_by]]
    for read in chosen:
        report = read(words)
        if report.starter:
            return report._replace(code=printed_code(report.code))
    return Report()


_LAST_EXIT_STATUS = 0xFF


def printed_code(number: int) -> int:
    """Return the return code for a number that a starter prints.

    Some starters print the wait status itself, with a minus too.

    >>> printed_code(-9), printed_code(-256), printed_code(9 << 8)
    (-9, 1, 9)
    """
    # Within these limits it is a return code; a wait status is larger.
    if -LAST_SIGNAL <= number <= _LAST_EXIT_STATUS:
        return number
    return returncode_of(abs(number))


_TORCHRUN_REPORT = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def _read_torchrun_report(words: str) -> Report:
    """Find the report of torchrun, and of accelerate, which starts torch's agent too.

    The last one counts: after a restart there are several.
    """
    reports = _TORCHRUN_REPORT.findall(words)
    if not reports:
        return Report()
    rank, code = reports[-1]
    return Report(int(rank), int(code), starter="torchrun")


def find_torchrun_status(tail: bytes, pid: int) -> int | None:
    """Find the return code of a process in torchrun's log.

    Args:
        tail: End of the log.
        pid: The process.

    Returns:
        The code, negative after a signal; None for any process but the one of the host that failed
        first: torchrun logs only that one.
    """
    match = re.search(rb"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: %d\)" % pid, tail)
    if match is None:
        return None
    return printed_code(int(match[1]))


_DEEPSPEED_REPORT = re.compile(r"--local_rank=(\d+)[^\n]*\] exits with return code = (-?\d+)")


def _read_deepspeed_report(words: str) -> Report:
    """Find the report of deepspeed's own launcher.

    The report names the local rank, which is the global rank in a job of one host.
    """
    match = _DEEPSPEED_REPORT.search(words)
    if match is None:
        return Report()
    return Report(int(match[1]), int(match[2]), starter="deepspeed")


_MPIRUN_REPORTS = (
    # "The first process to do so was: Process name: [[39593,1],2] Exit code: 42"; 5.x writes
    # [prterun-host-77@1,2]
    re.compile(
        r"first process to do so was:\s+Process name:\s*\[.*?,(?P<rank>\d+)\]\s+Exit"
        r" code:\s*(?P<code>\d+)",
        re.DOTALL,
    ),
    re.compile(
        r"noticed that process rank (?P<rank>\d+) with PID \d+ on\s+node (?P<host>\S+)"
        r".*?exited\s+on\s+signal\s+(?P<signal>\d+)",
        re.DOTALL,
    ),
    re.compile(
        r"MPI_ABORT was invoked on rank (?P<rank>\d+).*?(?:errorcode|Errorcode:)\s*(?P<code>-?\d+)",
        re.DOTALL,
    ),
    # The words are the same in 4.x and 5.x, but for the name of the program;
    # lines break where they get too long.
    re.compile(
        r"exited\s+due\s+to\s+process\s+rank\s+(?P<rank>\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+(?P<host>\S+)"
        r"\s+exiting\s+improperly(?P<early>)"
    ),
)


def _read_mpirun_report(words: str) -> Report:
    """Find the report of mpirun (4.x and 5.x): the earliest one, if there are several."""
    searches = [pattern.search(words) for pattern in _MPIRUN_REPORTS]
    matches = [match for match in searches if match is not None]
    if not matches:
        return Report()
    # The earliest one: an abort is reported when it happens, the summary comes at the end.
    values = min(matches, key=lambda match: match.start()).groupdict()
    code = int(values.get("code") or 0)
    if values.get("signal"):
        code = -int(values["signal"])
    host = printable(values.get("host") or "")
    return Report(int(values["rank"]), code, host, "early" in values, "mpirun")


_DAEMON_REPORTS = (
    # Open MPI 5, also where the daemon could not be started
    re.compile(r"daemon executable.*?Local host:\s+\S+\s+Remote host:\s+(\S+)", re.DOTALL),
    # both lines, where the connection broke
    re.compile(
        r"lost communication with a remote daemon.*?Remote daemon:\s+\S+ on node (\S+)", re.DOTALL
    ),
)


def find_lost_daemon(tail: bytes) -> str:
    """Find the host of a daemon that mpirun reports as lost or not started; ``""`` for none."""
    words = tail.decode("utf-8", "replace")
    for pattern in _DAEMON_REPORTS:
        match = pattern.search(words)
        if match is not None:
            return printable(match[1])
    return ""


_HELP_BLOCK = re.compile(r"^-{20,}\n(.+?)\n-{20,}$", re.DOTALL | re.MULTILINE)
_NAMES_OF_MPIRUN = re.compile(r"Open MPI|PR?RTE\b|\bmpirun\b|\bprterun\b|\bORTE\b|\bMPI_")
_REASON_CHARACTERS = 300


def find_mpirun_reason(tail: bytes) -> str:
    """Find the reason for mpirun's end: the first sentence of its help text; ``""`` for none.

    The help text stands between two lines of dashes, with its lines broken.
    """
    for block in _HELP_BLOCK.findall(tail.decode("utf-8", "replace")):
        # A script may print such lines, too.
        if not _NAMES_OF_MPIRUN.search(block):
            continue
        first_paragraph = block.strip().split("\n\n")[0]
        paragraph = " ".join(first_paragraph.split())
        sentence = re.split(r"(?<=[.!])\s", paragraph)[0].rstrip(".:")
        return printable(sentence)[:_REASON_CHARACTERS]
    return ""


_UNREACHED_REPORTS = (
    # 5.x, in a help text of mpirun's: opal/mca/btl/tcp/help-mpi-btl-tcp.txt
    re.compile(r"connect\(\) to (\S+):(\d+) failed\s+Error:\s+([^\n]+)"),
    # 4.x, a line of the rank
    re.compile(r"Unable to connect to the peer (\S+) on port (\d+): ([^\n]+)"),
)


def describe_unreached_address(tail: bytes) -> str:
    """Describe the address to which a rank of Open MPI could not connect.

    Args:
        tail: End of mpirun's output.

    Returns:
        A sentence with the address, the port, the error and advice; ``""`` if there is none.
    """
    words = tail.decode("utf-8", "replace")
    for pattern in _UNREACHED_REPORTS:
        match = pattern.search(words)
        if match is None:
            continue
        address, port, error = map(printable, match.groups())
        advice = "OMPI_MCA_btl_tcp_if_include names the interface that reaches the other hosts"
        return f"Open MPI could not connect to {address} port {port}: {error.strip()}; {advice}"
    return ""


def find_failed_host(tail: bytes) -> str:
    """Find the host of the process that mpirun reports as the first to fail; ``""`` for none."""
    match = re.search(
        r"process rank \d+ with PID \d+ on node ([A-Za-z0-9._-]+)", tail.decode("utf-8", "replace")
    )
    if match is None:
        return ""
    return match.group(1)


_HELP_EDGE = re.compile(r"^-{20,}$")
_ABORT_LINE = re.compile(r"^\[[\w.-]+:\d+\] (\*\*\* |Delaying for \d+ seconds before aborting)")


def without_help(lines: Sequence[str]) -> list[str]:
    """Empty the lines of mpirun's help, which stands between two lines of dashes, or to the end.

    >>> without_help(["step 1", "-" * 30, "long help", "-" * 30])
    ['step 1', '', '', '']
    """
    remaining: list[str] = []
    is_in_help = False
    for line in lines:
        # A line of dashes begins the help, and the next one ends it.
        is_edge = _HELP_EDGE.match(line.strip()) is not None
        if is_edge or is_in_help or _ABORT_LINE.match(line):
            remaining.append("")
        else:
            remaining.append(line)
        is_in_help = is_in_help != is_edge
    return remaining
