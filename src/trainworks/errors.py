"""The errors of the builder, by exit status. One class is one exit status.

An error says what failed and where (``message``), then what to do next (``hint``). Exit statuses do
not change, and every ``--help`` shows their meanings. Status 0 is success. 14 and 16 are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class TrainworksError(Exception):
    """A problem that the user can act on.

    Attributes:
        message: What is wrong, and where.
        hint: What to do next; empty if the message is enough.
        exit_status: The process's exit status when this error ends the command.
        meaning: The exit status in a few words, for ``--help``.
        reported: Whether stdout has all of it already.
    """

    exit_status: ClassVar[int] = 1
    meaning: ClassVar[str] = "not set up: wrong Python, or run `make setup`"

    def __init__(self, message: str, *, hint: str = "", reported: bool = False) -> None:
        """Store both parts of the text; ``str()`` of the error shows both."""
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reported = reported

    def __str__(self) -> str:
        """Return the message, and the hint on a line of its own."""
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    @property
    def line(self) -> str:
        """The message and the hint on one line, for a list of problems."""
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def as_values(self) -> dict[str, object]:
        """Return it for programs, as JSON."""
        name, status = type(self).__name__, self.exit_status
        return {"error": name, "message": self.message, "hint": self.hint, "exit_status": status}


class CommandLineError(TrainworksError):
    """The command line is wrong; ``problems`` has every problem."""

    exit_status = 2
    meaning = "wrong command line"

    def __init__(self, problems: Sequence[str], *, hint: str = "") -> None:
        """Join all problems, one a line."""
        self.problems = tuple(problems)
        first, *others = self.problems
        super().__init__(
            "".join(
                (
                    f"{len(self.problems)} problems with the command line:",
                    *(f"\n  {each}" for each in self.problems),
                )
            )
            if others
            else first,
            hint=hint,
        )


class ProblemsError(TrainworksError):
    """Several problems at once, in ``problems``.

    Each error of this kind says ``where`` they are.
    """

    where: ClassVar[str]

    def __init__(self, problems: Sequence[str], *, hint: str = "") -> None:
        """Join all problems, one a line."""
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(
            f"{count} problem{'s' if count != 1 else ''} {self.where}:{lines}", hint=hint
        )


class FactsError(ProblemsError):
    """Rows in ``images/``, or the front matter of a recipe, are malformed.

    ``problems`` has every problem.
    """

    exit_status = 3
    meaning = "malformed facts"
    where = "in the facts"


class UnknownNameError(TrainworksError):
    """A framework, version, CUDA release, Python, component, engine or image does not exist."""

    exit_status = 4
    meaning = "unknown name"


class RecipeError(TrainworksError):
    """A recipe does not fit the values that it is rendered with."""

    exit_status = 5
    meaning = "a recipe does not fit its values"


class EngineUnavailableError(TrainworksError):
    """No container engine answers, or the chosen one does not."""

    exit_status = 6
    meaning = "no engine answers"

    def __init__(self, message: str, *, hint: str = "", denied: bool = False) -> None:
        """Store the text.

        ``denied``: an engine answers, but this user has no permission to use it.
        """
        super().__init__(message, hint=hint)
        self.denied = denied


class BuildError(TrainworksError):
    """A step of the build failed; the message has its component, its command and its last lines."""

    exit_status = 7
    meaning = "build failed"


class ImageTestError(TrainworksError):
    """The image was built, but one of its tests failed."""

    exit_status = 8
    meaning = "image tests failed"


class OutputError(TrainworksError):
    """A file or folder cannot be written or read: wrong permissions, or the disk is full."""

    exit_status = 9
    meaning = "cannot read or write a file or stdout"


class HostError(TrainworksError):
    """This machine does not have something that the build needs: a bootstrap tool, a local file."""

    exit_status = 10
    meaning = "something is missing on this machine"


class LockError(TrainworksError):
    """A lock cannot be made, or does not fit its row."""

    exit_status = 11
    meaning = "not locked, or a lock does not fit its row"


class ExtendError(ProblemsError):
    """Base, requirements, code or entry point of an extension are invalid.

    ``problems`` has every problem.
    """

    exit_status = 12
    meaning = "invalid extension"
    where = "with the extension"


class CompatibilityError(TrainworksError):
    """Components of a target are incompatible.

    ``problems`` has every problem with its reason and source.
    """

    exit_status = 13
    meaning = "incompatible components"

    def __init__(self, target: str, problems: Sequence[str]) -> None:
        """Join all problems, one a line."""
        self.problems = tuple(problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(
            f"{target}: incompatible components:{lines}",
            hint="change the versions in its row or stack",
        )


class RegistryError(TrainworksError):
    """A registry refused a request or cannot be reached; the text never has a password or token."""

    exit_status = 15
    meaning = "a registry refused, or cannot be reached"


class ProofError(ProblemsError):
    """A proof cannot be made, or does not hold; ``problems`` has every reason."""

    exit_status = 17
    meaning = "a proof cannot be made, or does not hold"
    where = "with the proof"


class OutdatedError(TrainworksError):
    """An image lacks security updates of its distribution."""

    exit_status = 18
    meaning = "security updates are missing, an advisory is published, or the framework has ended"


class EngineError(TrainworksError):
    """The engine failed at its own work, such as starting a container, in every attempt.

    A failing step is a ``BuildError``, and a failing image test an ``ImageTestError``.
    """

    exit_status = 19
    meaning = "the engine itself failed"


class NotComparedError(TrainworksError):
    """Nothing that was compared is missing in an image, but not everything was compared."""

    exit_status = 20
    meaning = "the advisory service did not answer; nothing else is missing"


class InterruptionError(TrainworksError):
    """Ctrl-C or SIGTERM came."""

    exit_status = 130
    meaning = "interrupted"

    def __init__(self, *, reported: bool = False) -> None:
        """Store the text; ``reported``: stdout has the results until then."""
        super().__init__("everything that was started has been stopped", reported=reported)
