"""Describe an exception that ends a Python of a job, as the fields of its record.

``python/sitecustomize.py`` runs this file when such an exception comes.
"""

import json
import os
import sys
import traceback


def describe_exception(error: BaseException, thread: str) -> str:
    """Return an exception as further fields of a JSON object: ``, "message": "...", ...``.

    The fields are those of ``supervise.outcome.records.Record``. Long texts are cut in the middle.

    Args:
        error: The exception.
        thread: Name of the thread that it ends; ``""`` for the whole program.
    """

    def first_line(exception: BaseException) -> str:
        lines = traceback.format_exception_only(type(exception), exception)
        return "".join(lines).partition("\n")[0]

    # Skip the frames of python -m or mpi4py, which run the script.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<frozen") and "/site-packages/mpi4py/" not in file:
            break
        trace = trace.tb_next
    origin, members, inner = "", getattr(error, "exceptions", ()), ""
    if members and isinstance(members[0], BaseException):
        inner = first_line(_first_of_group(error))
    elif error.__cause__ is not None:
        origin = f"caused by {first_line(_root_of(error))}"
    elif error.__context__ is not None and not error.__suppress_context__:
        origin = f"while handling {first_line(error.__context__)}"
    message = list(traceback.format_exception_only(type(error), error))
    exceptions = [member for member in members if isinstance(member, BaseException)]
    message += [f"  {first_line(member)}\n" for member in exceptions]
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("RANK", "")
    fields = {
        "message": _cut("".join(message)),
        "frames": _cut("".join(traceback.format_tb(trace))),
        "origin": _cut(origin),
        "thread": thread,
        "inner": _cut(inner),
        "rank": int(rank) if rank.isdecimal() else -1,
        "argv": _cut(" ".join(sys.argv)),
        # torch itself imports the package of smddp in each script.
        "smp": "smdistributed.modelparallel" in sys.modules,
    }
    return f", {json.dumps(fields)[1:-1]}"


def _first_of_group(error: BaseException) -> BaseException:
    """Return the first exception of a group that is not a group itself."""
    for _ in range(_DEEPEST):
        members = getattr(error, "exceptions", ())
        if not members or not isinstance(members[0], BaseException):
            break
        error = members[0]
    return error


def _root_of(error: BaseException) -> BaseException:
    """Return the first exception in a chain of direct causes, which may be a circle."""
    for _ in range(_DEEPEST):
        if error.__cause__ is None:
            break
        error = error.__cause__
    return error


_DEEPEST = 32
"""Limit of nested groups, and of causes in a chain."""

_HALF = 8192
"""Characters at each end of a long text that are kept."""


def _cut(text: str) -> str:
    """Return a text; of a long one the first and the last 8,192 characters."""
    if len(text) <= 2 * _HALF:
        return text
    return f"{text[:_HALF]}\n[...]\n{text[-_HALF:]}"
