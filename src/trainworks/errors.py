"""Every error a user can cause or meet, in one file: one class is one exit status.

An error is a paragraph: what is wrong and where (``message``), then what to do next (``hint``). The exit statuses are
part of the command line's contract, and their meanings stand in every command's ``--help``; ``0`` is success.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class TrainworksError(Exception):
    """A problem the user can act on.

    Attributes:
        message: What is wrong, and where.
        hint: What to do next; empty where the message says it all.
        exit_status: The process's exit status when this error ends the command.
        meaning: That exit status in a few words, for the command line's help.
        reported: Whether what it is about is on stdout already, in full.
    """

    exit_status: ClassVar[int] = 1
    meaning: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str = "", reported: bool = False) -> None:
        """Store the two halves of the text; ``str()`` of the error shows both."""
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reported = reported

    def __str__(self) -> str:
        """Return the message, and the hint on a line of its own."""
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class CommandLineError(TrainworksError):
    """Words of the command line that no parser takes; ``problems`` has every one of them."""

    exit_status = 2
    meaning = "wrong command line"

    def __init__(self, problems: Sequence[str], *, hint: str = "") -> None:
        """Join all problems, one a line."""
        self.problems = tuple(problems)
        first, *others = self.problems
        super().__init__(
            "".join(
                (f"{len(self.problems)} problems with the command line:", *(f"\n  {each}" for each in self.problems))
            )
            if others
            else first,
            hint=hint,
        )


class FactsError(TrainworksError):
    """Rows in ``images/`` or the front matter of a recipe are malformed; ``problems`` has every one of them."""

    exit_status = 3
    meaning = "malformed facts"

    def __init__(self, problems: Sequence[str]) -> None:
        """Join all problems, one a line, each with its file, row and key."""
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the facts:{lines}")


class UnknownNameError(TrainworksError):
    """A framework, version, CUDA, Python, component or engine was asked for that does not exist."""

    exit_status = 4
    meaning = "unknown name"


class RecipeError(TrainworksError):
    """A recipe and the values it is given do not fit each other."""

    exit_status = 5
    meaning = "a recipe does not fit"


class EngineError(TrainworksError):
    """The engine failed at its own work, such as starting a container, also when it was tried again.

    It says nothing of the image: what that or a step of a build did wrong is an ``ImageTestError`` or a ``BuildError``.
    """

    exit_status = 19
    meaning = "the engine itself failed"


class EngineUnavailableError(TrainworksError):
    """No container engine answers, or the one asked for does not."""

    exit_status = 6
    meaning = "no engine answers"

    def __init__(self, message: str, *, hint: str = "", denied: bool = False) -> None:
        """Store the text; ``denied``: an engine is there, and this user may not use it."""
        super().__init__(message, hint=hint)
        self.denied = denied


class BuildError(TrainworksError):
    """The engine refused or failed a step; says which component, which command, and its last lines."""

    exit_status = 7
    meaning = "build failed"


class ImageTestError(TrainworksError):
    """The image was built, and does not keep every promise of its plan."""

    exit_status = 8
    meaning = "image tests failed"


class OutputError(TrainworksError):
    """A file or folder cannot be written or read: wrong permissions, or the disk is full."""

    exit_status = 9
    meaning = "a file or stdout cannot be read or written"


class HostError(TrainworksError):
    """This machine lacks something other than an engine that the build needs (a bootstrap tool, a local file)."""

    exit_status = 10
    meaning = "this machine lacks something"


class LockError(TrainworksError):
    """A lock cannot be made, or does not fit the row that it is for."""

    exit_status = 11
    meaning = "not locked, or a lock does not fit"


class ExtendError(TrainworksError):
    """An image cannot be extended as asked for: base, requirements, code or entry point; has every problem found."""

    exit_status = 12
    meaning = "cannot be extended so"

    def __init__(self, problems: Sequence[str], *, hint: str = "") -> None:
        """Join all problems, one a line."""
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} with the extension:{lines}", hint=hint)


class CompatibilityError(TrainworksError):
    """A target's parts do not go together; ``problems`` has every one of them, with its reason and source."""

    exit_status = 13
    meaning = "parts do not go together"

    def __init__(self, target: str, problems: Sequence[str]) -> None:
        """Join all problems, one a line."""
        self.problems = tuple(problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(
            f"{target}: its parts do not go together:{lines}", hint="change the versions in its row or stack"
        )


class LintError(TrainworksError):
    """A Dockerfile has findings that are more than advice."""

    exit_status = 14
    meaning = "findings of lint"


class ProofError(TrainworksError):
    """Proof cannot be given, or does not hold; ``problems`` has every reason."""

    exit_status = 17
    meaning = "no proof, or it does not hold"

    def __init__(self, problems: Sequence[str], *, hint: str = "") -> None:
        """Join all problems, one a line."""
        self.problems = tuple(problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} with the proof:{lines}", hint=hint)


class RegistryError(TrainworksError):
    """A registry refuses what it is asked for, or cannot be reached; never has a password or token in its text."""

    exit_status = 15
    meaning = "a registry refuses or cannot be reached"


class OutdatedError(TrainworksError):
    """An image lacks security updates of its distribution."""

    exit_status = 18
    meaning = "security updates are missing"


class InterruptionError(TrainworksError):
    """Ctrl-C or SIGTERM came."""

    exit_status = 130
    meaning = "interrupted"

    def __init__(self, *, reported: bool = False) -> None:
        """Say what became of the rest; ``reported``: what was done until then is on stdout."""
        super().__init__("everything that was started has been stopped", reported=reported)
