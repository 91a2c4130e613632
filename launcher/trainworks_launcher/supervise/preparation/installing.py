"""The reason of a failed preparation, as the tool or the program says it, in one line.

Pure; loaded only for a failure.

The text is shown, and nothing is decided by it. uv prints ``error:`` and below it each ``cause:``,
the innermost one last; pip and our own programs print a line.
"""

from __future__ import annotations

import re

_ERROR = re.compile(r"^error: (.+)\n((?:[ \t]+.*\n|\n(?=[ \t]))*)", re.MULTILINE)
_CAUSE = re.compile(r"^  cause: ", re.MULTILINE)
_SENT = re.compile(
    r"^  cause: error sending request for url \(\w+://(?:[^/@)]*@)?([^/)]+)", re.MULTILINE
)
_HINT = re.compile(r"^hint: (.+)$", re.MULTILINE)
_REASON = re.compile(r"^(?:ERROR: |error: |trainworks: )(.+)$", re.MULTILINE)
_CRASH = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+\S.*\s*\Z", re.MULTILINE)
_LONGEST = 400


def reason_of(tail: bytes) -> str:
    """Return why a preparation failed, from the end of its output.

    ``""`` if it does not say, or ends with a traceback.

    Args:
        tail: End of the output.
    """
    words = tail.decode("utf-8", "replace")
    if _CRASH.search(words):
        return ""
    said = _REASON.findall(words)
    errors = _ERROR.findall(f"{words}\n")
    if not errors or said[-1] != errors[-1][0]:
        return str(said[-1]).strip() if said else ""
    (begun, below) = errors[-1]
    rest, *causes = _CAUSE.split(below)
    error = " ".join([begun, *rest.split()])  # a long line goes on in the next one
    if not causes:
        return error
    # Of a build that failed uv shows the output, whose last line is the build's own reason.
    head, _, output = causes[-1].partition("[stderr]")
    first = " ".join(head.partition("[stdout]")[0].split())
    last = [line.strip() for line in output.splitlines() if line.strip()][-1:]
    hints = [f"({hint})" for hint in _HINT.findall(words)[-1:] if not last]
    sent = _SENT.search(below)
    if sent:  # uv names the index in its first line only if it has not tried again
        error = f"the package index {sent[1]} cannot be reached: {error}"
    text = " ".join([": ".join(filter(None, [error, first, *last])), *hints])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
