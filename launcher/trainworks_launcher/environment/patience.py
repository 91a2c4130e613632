"""Reads the job's environment within a time limit.

A file system or a name server may never answer. So a thread reads, and this one waits. If the
reading takes long, the log names the path or host name that does not answer; at the limit the job
is refused.
"""

from __future__ import annotations

from typing import Callable, Mapping

from trainworks_launcher.contract import inspection, names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.files import text_of
from trainworks_launcher.environment import directories
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.environment import Environment, read_environment

_LOG_AFTER_SECONDS = (10.0, 60.0)
"""Times after the start at which the log names the path or host name that does not answer."""


def read_patiently(
    variables: Mapping[str, str],
    invocation: Invocation,
    log: Callable[[str], None],
    limit: float = names.JOIN_LIMIT_SECONDS,
) -> Environment:
    """Call ``read_environment`` in a thread, and return its result.

    An error of the reading is raised as it is. After the limit the thread is left behind. Where no
    thread can be started, the reading has no limit.

    Args:
        variables: The process's environment.
        invocation: The words after ``train``.
        log: Prints a line.
        limit: Seconds; the other hosts of a job wait no longer for this one.

    Raises:
        RefusalError: A file system or a name server did not answer within the limit.
    """
    try:
        reading = inspection.Inspection(lambda: read_environment(variables, invocation))
    except RuntimeError:  # no further thread may be started on this host
        return read_environment(variables, invocation)
    deadlines = [seconds for seconds in _LOG_AFTER_SECONDS if seconds < limit]
    waited = 0.0
    # The log has a line at each of these times, also at the limit.
    for deadline in (*deadlines, limit):
        has_ended = reading.wait(deadline - waited)
        waited = deadline
        if has_ended:
            break
        log(f"still reading this host after {waited:.0f} s: {_describe_current()}")
    if reading.errors:
        raise reading.errors[0]
    if not reading.results:
        problem = f"{_describe_current()} within {limit:g} s"
        advice = "unmount or repair it, or start the job without it"
        raise RefusalError([Problem(problem, "this host", advice)])
    return reading.results[0]


def _describe_current() -> str:
    """Return a sentence about the object that is being read.

    For example ``the code /data does not answer (file system nfs4)``.
    """
    inspected = inspection.current()
    if not inspected.path:
        return f"{inspected.what} does not answer"
    sentence = f"{inspected.what} {inspected.path} does not answer"
    kind = directories.find_mount_kind(inspected.path, text_of(directories.MOUNTS))
    if kind:
        sentence += f" (file system {kind})"
    return sentence
