"""What pip and our own programs say of a failed preparation, as one line that a person can act on. Pure.

Loaded only when a preparation fails. The words are those of pip 25 and 26, which the images have.
"""

from __future__ import annotations

import re
from typing import Container, Sequence

_REASON = re.compile(r"^(?:ERROR: |error: |trainworks: )(.+)$", re.MULTILINE)
_NO_REASON = re.compile(r"ResolutionImpossible|Exception:$|[a-z]+(-[a-z]+)+$")  # said below or above the reason itself
_DIAGNOSIS = re.compile(r"^\u00d7 (.+)\n(?:\u2502.*\n)*(?:\u2570\u2500> (.+))?", re.MULTILINE)
_CRASH = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+\S.*\s*\Z", re.MULTILINE)
_CONFLICT = re.compile(r"Cannot install (.+) because these package versions")
_CAUSE = re.compile(r"^    (The user requested .+|\S+ \S+ depends on .+)", re.MULTILINE)
_CONSTRAINT = re.compile(r"The user requested \(constraint\) ([\w.-]+)==(\S+)")
_DEPENDS = re.compile(r"(\S+) (\S+) depends on (([\w.-]+).*)")
_DOING = re.compile(r"\u00d7 (.+?) did not run successfully")
_BUILD_BEGIN, _BUILD_END = "of output]\n", "[end of output]"
_BUILT = re.compile(r"(?:Failed building wheel for|Failed to build) '?(?!installable)([^'\s]+)")
_BEGUN = re.compile(r"^ *(?:Collecting|Processing) (\S+)", re.MULTILINE)
_COMPILER = r"[\w./-]*(?:gcc|g\+\+|cc|c\+\+|clang)"
_NO_COMPILER = re.compile(
    rf"No such file or directory: '{_COMPILER}'|'{_COMPILER}' failed: No such file|{_COMPILER}: (?:command )?not found"
    rf"|unable to execute '?{_COMPILER}|CMAKE_C(?:XX)?_COMPILER (?:could be found|not set)|Unknown compiler\(s\)"
    r"|requires a compiler|find Rust compiler|Rust package manager, is not installed"
)
_DIAGNOSTIC = re.compile(r": (?:fatal )?error: ")
_ERROR = re.compile(r"(?:error|ERROR|\w*(?:Error|Exception)): ")
_NOT_FOUND = "No matching distribution found"
_BROKEN = re.compile(r"total=0,.*connection broken by '(.+)': /|confirming the ssl certificate: (.+) - skipping")
_INDEX = re.compile(r"host='([^']+)'|(?:^Looking in indexes:|fetch URL) \w+://(?:[^/\s@]*@)?([^/\s,]+)", re.MULTILINE)
_INNERMOST = re.compile(r"""[( ](["'])(?:<.*?>: |\w+\(host=.*?\): )?((?:(?!\1).)+)\1\)*$""")
_LONGEST = 240


def reason_of(tail: bytes, kept: Container[str] = ()) -> str:
    """Return why a preparation failed, from the end of its output; ``""`` if it does not say, or ends with a traceback.

    Args:
        tail: End of the output.
        kept: Distributions that pip had to keep as the image has them.
    """
    words = tail.decode("utf-8", "replace")
    if _CRASH.search(words):
        return ""
    broken = next(filter(None, reversed([a or b for a, b in _BROKEN.findall(words)])), "")
    if broken and _NOT_FOUND in words:  # what pip says last follows from it
        host = next((f" {a or b}" for a, b in _INDEX.findall(f"{broken}\n{words}")), "")
        innermost = _INNERMOST.search(broken)
        proxy = "the proxy: " if broken.startswith("ProxyError") else ""
        return f"the package index{host} cannot be reached: {proxy}{_short(innermost[2] if innermost else broken)}"
    conflict = _CONFLICT.findall(words)
    if conflict:
        # They come through two pipes: whatever is between them, and in whatever order.
        return _conflict(conflict[-1], list(dict.fromkeys(_CAUSE.findall(words))), kept)
    if _BUILD_END in words:
        return _build(words)
    said = [line.strip() for line in _REASON.findall(words)]
    telling = [line for line in said if not _NO_REASON.match(line)]
    diagnoses = [": ".join(filter(None, found)) for found in _DIAGNOSIS.findall(words)]
    return (telling or diagnoses or [""])[-1]


def _conflict(asked: str, causes: Sequence[str], kept: Container[str]) -> str:
    """Requirements that contradict each other, or what the image keeps."""
    asked = re.sub(r"-r (\S+) \(line (\d+)\)", r"\1 line \2", asked)
    said = list(causes)
    for cause in causes:
        constraint = _CONSTRAINT.fullmatch(cause)
        if constraint is None or _normalised(constraint[1]) not in kept:
            continue
        have = f"{constraint[1]} {constraint[2]}"
        said[said.index(cause)] = f"this image has {have}"
        needs = [found for found in map(_DEPENDS.fullmatch, causes) if found and _same(found[4], constraint[1])]
        if needs:
            package, first, wanted = needs[0].group(1, 2, 3)
            also = f" (and {len(needs) - 1} other version{'s' * (len(needs) > 2)})" if len(needs) > 1 else ""
            return (
                f"cannot install {_short(asked)}: {package} {first}{also} depends on {wanted}, and this image has"
                f" {have}; ask for a version of {package} that fits {have}, or choose an image with {wanted}"
            )
    return f"cannot install {_short(asked)}: {_short('; '.join(said))}"


def _same(one: str, other: str) -> bool:
    return _normalised(one) == _normalised(other)


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _build(words: str) -> str:
    """Return a package that has no wheel for this machine, and could not be built."""
    before, _, output = words.rpartition(_BUILD_END)[0].rpartition(_BUILD_BEGIN)
    doing = (_DOING.findall(before) or [""])[-1]
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    name = (_BUILT.findall(words) or _BEGUN.findall(words) or ["a requirement"])[-1]
    missing = next((line for line in lines if _NO_COMPILER.search(line)), "")
    if missing:
        advice = "ask for a version that has a wheel, or choose an image with a compiler"
        return f"{name} has to be compiled, and no compiler was found ({_short(missing)}); {advice}"
    diagnostics = [line for line in lines if _DIAGNOSTIC.search(line)][:1]
    errors = [line for line in lines if _ERROR.match(line)][-1:]
    why = (diagnostics or errors or lines[-1:] or ["it printed nothing"])[0]
    return f"{name} could not be built: {_short(why)}" + (f" ({doing})" if doing else "")


def _short(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."
