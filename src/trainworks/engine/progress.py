"""Parses the lines that an engine prints into the events of a build; text in, values out.

A *step* is one instruction of the Dockerfile as the engine shows it. Both parsers remember only
enough to say to which step a line belongs. They are tested on logs recorded from real engines
(``tests/engine/logs``).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from trainworks.engine.protocol import StepEvent
from trainworks.render.steps import WORDS, BuildStep

TAIL: Final = 20
"""Lines of a failing step's output that an error shows."""


@dataclass(kw_only=True)
class _Vertex:
    """One numbered node of BuildKit's graph."""

    component: str
    step: str
    stage: str = ""


class BuildKitParser:
    """Reads ``docker build --progress=plain`` (BuildKit's own of 20.10, and buildx).

    Steps run at the same time; each line starts with the number of the step that it belongs to.
    """

    _LINE: Final = re.compile(r"#(?P<number>\d+) (?P<text>.*)")
    _STEP: Final = re.compile(r"\[(?:\S+/\S+ )?(?:(?P<stage>[^\s\]]+) +)?\d+/\d+\] (?P<step>.+)")
    _INTERNAL: Final = re.compile(
        r"\[internal\] .+|\[auth\] .+|exporting .+|importing .+|resolve image config .+"
    )
    _DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}$")
    _OUTPUT: Final = re.compile(r"\d+\.\d+ ?(?P<text>.*)")
    _END: Final = re.compile(
        r"(?:DONE (?P<seconds>[\d.]+)s|(?P<cached>CACHED)|(?P<cancelled>CANCELED)|ERROR:"
        r" (?P<error>.*))$"
    )
    _GLUED: Final = re.compile(r"#(?P<number>\d+) (?P<end>DONE [\d.]+s|CACHED|CANCELED|ERROR: .*)$")

    def __init__(self, stage_components: Mapping[str, str]) -> None:
        """Start before the first line.

        Args:
            stage_components: Stage name to component.
        """
        self._components = dict(stage_components)
        # The steps so far, by their numbers.
        self._vertices: dict[str, _Vertex] = {}
        # Whether the lines are those of BuildKit's summary of a failure.
        self._summary = False

    def feed(self, line: str) -> Iterator[StepEvent]:
        """Yield what this line means."""
        # After a failure BuildKit repeats its last lines between two rulers, without step numbers.
        if line == "------":
            self._summary = True
        match = None if self._summary else self._LINE.fullmatch(line)
        if match is None:
            return
        number, text = match["number"], match["text"]
        vertex = self._vertices.get(number)
        if vertex is None:
            vertex = self._vertices[number] = self._vertex(text)
            yield StepEvent(
                component=vertex.component, step=vertex.step, stage=vertex.stage, state="started"
            )
            return
        # Output without a newline at its end is followed by the step's own end on the same line.
        glued = self._GLUED.search(text)
        if glued is not None and glued["number"] == number:
            yield from self._events(vertex, text[: glued.start()])
            text = glued["end"]
        yield from self._events(vertex, text)

    def finish(self) -> Iterator[StepEvent]:
        """Yield nothing: BuildKit says itself when each step is done."""
        return iter(())

    def _vertex(self, text: str) -> _Vertex:
        """Return the step that a first line describes: ``[stage 2/5] RUN make``."""
        heading = self._STEP.fullmatch(text)
        if heading is None:
            return _Vertex(component="", step=text)
        if heading["stage"] is None and len(self._components) == 1:
            # BuildKit leaves the name out where the Dockerfile has one stage only.
            return _Vertex(component=next(iter(self._components.values())), step=heading["step"])
        stage = heading["stage"] or ""
        return _Vertex(component=self._components.get(stage, ""), step=heading["step"], stage=stage)

    def _events(self, vertex: _Vertex, text: str) -> Iterator[StepEvent]:
        """Yield the event of a line of a step: its end, or output; none for the engine's own."""

        def event(state: str, words: str = "", seconds: float | None = None) -> StepEvent:
            return StepEvent(
                component=vertex.component,
                step=vertex.step,
                stage=vertex.stage,
                state=state,
                text=words,
                seconds=seconds,
            )

        end = self._END.match(text)
        if end is not None:
            if end["seconds"] is not None:
                yield event("done", seconds=float(end["seconds"]))
            elif end["cached"] is not None:
                yield event("cached")
            elif end["error"] is not None:
                yield event("failed", end["error"])
            return
        if self._DIGEST.match(text) or self._STEP.fullmatch(text) or self._INTERNAL.fullmatch(text):
            return
        output = self._OUTPUT.fullmatch(text)
        if output is not None:
            yield event("output", output["text"])


class BuildahParser:
    """Reads ``buildah build``: steps run one after another, each prints below its heading.

    buildah prints neither the duration nor the end of a step: a step is done when the next one
    starts.
    """

    _HEADING: Final = re.compile(
        r"(?:^|\[(?P<stage>\d+)/\d+\] )STEP \d+/\d+:"
        r" (?P<step>.+)$|\[\d+/\d+\] (?P<commit>COMMIT(?: .+)?)$"
    )
    _FROM: Final = re.compile(r"FROM \S+(?: \S+)*? AS (?P<stage>\S+)$", re.IGNORECASE)
    _CACHED: Final = re.compile(r"--> Using cache [0-9a-f]{12,}$")
    _NOISE: Final = re.compile(
        r"--> [0-9a-f]{11,}$|subprocess exited (?:with status \d+|on [a-z ]+)$|^Successfully tagged"
        r" |^[0-9a-f]{64}$"
    )
    _WARNING: Final = re.compile(r'time="[^"]*" level=\w+ msg="(?P<text>.*)"$')
    _ERROR: Final = re.compile(r"[Ee]rror: (?P<text>.*)$")
    _BUILDING: Final = re.compile(r'(?:error )?building at STEP "')

    def __init__(self, stage_components: Mapping[str, str]) -> None:
        """Take the names of the stages."""
        self._components = dict(stage_components)
        self._component_of_stage: dict[str, str] = {}
        self._begun: dict[str, tuple[str, str]] = {}
        self._component = ""
        self._step = ""
        self._ended = True

    def feed(self, line: str) -> Iterator[StepEvent]:
        """Yield what this line means."""
        heading = self._heading(line)
        if heading is not None:
            start, component, step = heading
            # Output without a newline at its end has the next heading on the same line.
            if start:
                yield from self._output(line[:start])
            yield from self._end()
            self._component, self._step, self._ended = component, step, False
            self._begun[_one_spaced(step)] = (component, step)
            yield self._event("started")
            return
        error = self._ERROR.match(line)
        if error is not None and (self._BUILDING.match(error["text"]) or self._is_own_error()):
            # Another stage may have begun its next step before buildah names the failed step.
            failed = self._failed_step(error["text"])
            if failed != (self._component, self._step):
                yield from self._end()
                self._component, self._step = failed
            self._ended = True
            yield self._event("failed", self._reason(error["text"]))
        elif self._CACHED.match(line):
            if not self._ended:
                self._ended = True
                yield self._event("cached")
        elif not self._ended:
            noise = self._NOISE.search(line)
            if noise is None:
                yield from self._output(line)
            elif noise.start():
                yield from self._output(line[: noise.start()])

    def finish(self) -> Iterator[StepEvent]:
        """Yield the end of the last step, which buildah does not announce."""
        yield from self._end()

    def _heading(self, line: str) -> tuple[int, str, str] | None:
        """Return the column, the component and the step of a heading in a line, or ``None``."""
        heading = self._HEADING.search(line)
        if heading is None:
            return None
        if heading["commit"]:
            return heading.start(), "", heading["commit"]
        text = heading["step"]
        # Steps of two stages may alternate: a stage that waits for another one goes on later, and
        # its headings then have its number alone.
        number = heading["stage"] or ""
        if text.upper().startswith("FROM "):
            stage = self._FROM.fullmatch(text)
            stage_name = stage["stage"] if stage else ""
            self._component_of_stage[number] = self._components.get(stage_name, "")
        return heading.start(), self._component_of_stage.get(number, ""), text

    def _is_own_error(self) -> bool:
        """Return whether an ``Error:`` line is buildah's own; a RUN step may print such lines."""
        return not self._step.upper().startswith("RUN ") or self._ended

    def _failed_step(self, text: str) -> tuple[str, str]:
        """Return the component and the step that an error names.

        They are the current ones if the error names no step that has begun.
        """
        current = (self._component, self._step)
        if not self._BUILDING.match(text):
            return current
        # The error quotes the instruction with its spaces made one.
        quoted, _, _ = text.partition('STEP "')[2].rpartition('": ')
        return self._begun.get(_one_spaced(quoted), current)

    def _reason(self, text: str) -> str:
        """Return the text after the quoted instruction, which the event names already."""
        if self._BUILDING.match(text):
            _, end_of_quote, reason = text.rpartition('": ')
            return reason if end_of_quote else text
        return text

    def _output(self, line: str) -> Iterator[StepEvent]:
        """Yield a line of output of the current step; of a warning of buildah the text alone."""
        warning = self._WARNING.match(line)
        yield self._event("output", warning["text"] if warning else line)

    def _end(self) -> Iterator[StepEvent]:
        """Yield the end of the current step, unless it has ended."""
        if not self._ended:
            self._ended = True
            yield self._event("done")

    def _event(self, state: str, text: str = "") -> StepEvent:
        """Return an event of the current step."""
        return StepEvent(component=self._component, step=self._step, state=state, text=text)


def _one_spaced(text: str) -> str:
    """Return a text with one blank in the place of blanks and line ends."""
    return " ".join(text.split())


COMPILER_ERROR: Final = re.compile(
    r"(?:^|\s)\S+(?::\d+(?::\d+)?:|\(\d+\):) (?:fatal |catastrophic )?error\b"
)
"""A line of gcc 12 (``x.cpp:21:10: fatal error: ...``) or nvcc 13 (``x.cu(21): error: ...``)."""

MOST_ERRORS: Final = 3
"""Errors of a compiler that are remembered for each step."""


@dataclass(frozen=True, kw_only=True)
class FailedStep:
    """The first step that failed.

    Attributes:
        component: The component that the step belongs to.
        step: The instruction.
        reason: The engine's words.
        lines: The last lines of the step's output.
        errors: The first errors of a compiler that are not among the last lines: those may be a
            traceback of the compiler's caller.
    """

    component: str
    step: str
    reason: str
    lines: tuple[str, ...]
    errors: tuple[str, ...] = ()

    @property
    def status(self) -> int | None:
        """The command's exit status, or ``None`` if the engine does not report the status."""
        # The last one: the engine quotes the command first, which may hold such words itself.
        statuses = re.findall(r"(?:exit code:|exit status) (\d+)", self.reason)
        return int(statuses[-1]) if statuses else None


@dataclass(kw_only=True)
class StepLog:
    """Remembers the last lines of each step of a build, for an error message.

    Attributes:
        failed: The first failed step; ``None`` while no step failed.
        running: The step with the last event.
    """

    failed: FailedStep | None = None
    running: StepEvent | None = None
    _tails: dict[tuple[str, str], deque[str]] = field(default_factory=dict)
    _errors: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, event: StepEvent) -> None:
        """Remember an event of a build: a line of output, or the first failure."""
        key = (event.component, event.step)
        match event.state:
            case "output":
                self.running = event
                self._tails.setdefault(key, deque(maxlen=TAIL)).append(event.text)
                if COMPILER_ERROR.search(event.text):
                    errors = self._errors.setdefault(key, [])
                    if len(errors) < MOST_ERRORS:
                        errors.append(event.text)
            case "started":
                self.running = event
            case "failed":
                if self.failed is None:
                    self.failed = self._failed(event.component, event.step, event.text)
            case _:
                # The lines stay after the step's end: buildah reports a failure after it has
                # begun a step of another stage.
                pass

    def broken_off(self, reason: str) -> FailedStep | None:
        """Return the failed step, or the one that was running when the engine itself ended.

        Args:
            reason: The reason of that end, for the running step.
        """
        if self.failed is not None or self.running is None:
            return self.failed
        return self._failed(self.running.component, self.running.step, reason)

    def _failed(self, component: str, step: str, reason: str) -> FailedStep:
        """Return a failed step with its last lines, and the compiler's errors before those."""
        key = (component, step)
        lines = tuple(self._tails.get(key, ()))
        errors = tuple(error for error in self._errors.get(key, ()) if error not in lines)
        return FailedStep(component=component, step=step, reason=reason, lines=lines, errors=errors)


class StepTally:
    """Counts the steps of a build that have ended."""

    def __init__(self, steps: Sequence[BuildStep]) -> None:
        """Start before the first of the Dockerfile's steps."""
        self._steps = tuple(steps)
        self._ended: set[int] = set()

    @property
    def total(self) -> int:
        """The number of all steps."""
        return len(self._steps)

    @property
    def done(self) -> int:
        """The number of steps that have ended."""
        return len(self._ended)

    def add(self, event: StepEvent) -> None:
        """Count the step of an event if it has ended.

        Events of the engine's own work and of other instructions are ignored.
        """
        instruction = event.step.partition(" ")[0].upper()
        if event.state in ("done", "cached") and instruction in WORDS:
            number = self._number(event)
            if number is not None:
                self._ended.add(number)

    def _number(self, event: StepEvent) -> int | None:
        """Return the number of an event's step, or ``None``.

        Engines show variables of COPY and ADD with their values, so that the texts differ: then
        the step is the next one with the same instruction.
        """
        text = _one_spaced(event.step)
        word = text.partition(" ")[0].upper()
        next_alike = None
        for number, step in enumerate(self._steps):
            if step.component != event.component or number in self._ended:
                continue
            if step.text == text:
                return number
            if next_alike is None and step.text.partition(" ")[0].upper() == word:
                next_alike = number
        return next_alike
