"""Reads the job's environment with a bound: code, checkpoints and DNS may be on
a file system that never answers.

Reading is done in a thread. Where it takes long, the log names what does not
answer; at the limit the job is refused.
"""

from __future__ import annotations

from typing import Callable, Mapping

from trainworks_launcher.contract import inspection, names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.files import text_of
from trainworks_launcher.environment import directories
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.environment import Environment, read_environment

_SAY_AFTER_SECONDS = (10.0, 60.0)
"""After these seconds the log says what does not answer."""


def read_patiently(
    variables: Mapping[str, str],
    invocation: Invocation,
    log: Callable[[str], None],
    limit: float = names.JOIN_LIMIT_SECONDS,
) -> Environment:
    """Return what ``read_environment`` returns.

    Args:
        variables: The process's environment.
        invocation: What the command line asks for.
        log: Prints a line.
        limit: Seconds; the other hosts of a job wait no longer for this one.

    Raises:
        RefusalError: A file system or a name server did not answer within the limit.
    """
    try:
        look = inspection.Inspection(lambda: read_environment(variables, invocation))
    except RuntimeError:  # no further thread may be started on this host
        return read_environment(variables, invocation)
    waited = 0.0
    for until in (*(each for each in _SAY_AFTER_SECONDS if each < limit), limit):
        over = look.wait(until - waited)
        waited = until
        if over:
            break
        log(f"still reading this host after {waited:.0f} s: {_what_is_silent()}")
    if look.errors:
        raise look.errors[0]
    if not look.results:
        advice = "unmount or mend it, or start the job without it"
        raise RefusalError(
            [Problem(f"{_what_is_silent()} within {limit:g} s", "this host", advice)]
        )
    return look.results[0]


def _what_is_silent() -> str:
    """Return what is being looked at, with the file system that it is on."""
    looked = inspection.current()
    if not looked.path:
        return f"{looked.what} does not answer"
    kind = directories.kind_of_mount(looked.path, text_of(directories.MOUNTS))
    return f"{looked.what} {looked.path} does not answer{f' (file system {kind})' if kind else ''}"
