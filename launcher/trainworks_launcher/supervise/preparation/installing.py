"""Find the reason of a failed preparation in the output of uv, pip or a program of the launcher.

Pure; loaded only for a failure. The reason is shown to people, and nothing is decided by it. uv
prints ``error:`` and below it each ``cause:``, the innermost one last; pip and the launcher's own
programs print one line.
"""

from __future__ import annotations

import re

_ERROR_OF_UV = re.compile(r"^error: (.+)\n((?:[ \t]+.*\n|\n(?=[ \t]))*)", re.MULTILINE)
_CAUSE_OF_UV = re.compile(r"^  cause: ", re.MULTILINE)
_UNSENT_REQUEST = re.compile(
    r"^  cause: error sending request for url \(\w+://(?:[^/@)]*@)?([^/)]+)", re.MULTILINE
)
_HINT_OF_UV = re.compile(r"^hint: (.+)$", re.MULTILINE)
_REASON_LINE = re.compile(r"^(?:ERROR: |error: |trainworks: )(.+)$", re.MULTILINE)
_TRACEBACK_AT_END = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+\S.*\s*\Z", re.MULTILINE
)
_REASON_CHARACTERS = 400


def reason_of(tail: bytes) -> str:
    """Return why a preparation failed, as one line.

    Args:
        tail: End of the output of the tool.

    Returns:
        For example ``No solution found when resolving dependencies: Because torch was not found
        ...``. ``""`` if the output has no reason, or ends with a traceback.
    """
    words = tail.decode("utf-8", "replace")
    if _TRACEBACK_AT_END.search(words):
        return ""
    # The last reason of any tool, unless it is the first line of uv's last error.
    reasons = _REASON_LINE.findall(words)
    errors = _ERROR_OF_UV.findall(f"{words}\n")
    if not reasons:
        return ""
    if not errors or reasons[-1] != errors[-1][0]:
        return str(reasons[-1]).strip()
    first_line, below = errors[-1]
    return _describe_error_of_uv(first_line, below, words)


def _describe_error_of_uv(first_line: str, below: str, words: str) -> str:
    """Write an error of uv as one line: the error, its innermost cause, and a hint.

    Args:
        first_line: The first line of the error.
        below: The indented lines below: the rest of the error, and each cause.
        words: The whole output, which may have a hint.
    """
    rest, *causes = _CAUSE_OF_UV.split(below)
    # uv breaks a long line, and indents what follows.
    error = " ".join([first_line, *rest.split()])
    if not causes:
        return error
    # After a build that failed uv shows the build's output: its last line is the build's reason.
    head, _, output = causes[-1].partition("[stderr]")
    cause = " ".join(head.partition("[stdout]")[0].split())
    output_lines = [line.strip() for line in output.splitlines() if line.strip()]
    request = _UNSENT_REQUEST.search(below)
    if request:
        # uv names the index in its first line only if it has not tried again.
        error = f"the package index {request[1]} cannot be reached: {error}"
    text = ": ".join(filter(None, [error, cause, *output_lines[-1:]]))
    hints = _HINT_OF_UV.findall(words)
    if hints and not output_lines:
        text += f" ({hints[-1]})"
    if len(text) <= _REASON_CHARACTERS:
        return text
    return f"{text[:_REASON_CHARACTERS]} ..."
