"""mpirun's options as keyed maps with an origin (``origins``). Pure.

Open MPI refuses a command line that has one MCA parameter twice with two values (4.x: even with the
same value). So parameters are merged by name before the line is written: the stronger origin wins,
the same value is written once, and two values from the user are an error that shows both.
``dialects`` has the spelling of the installed Open MPI: a user's words for the other line become
this one's, so that an old name and our new name are the same parameter.
"""

from __future__ import annotations

import re
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.mpirun.dialects import FOREIGN, INSTEAD, KEYED, MCA_OPTIONS, OURS, Dialect


class Setting(NamedTuple):
    """One named value.

    Attributes:
        name: Name of the parameter.
        value: Its value.
        origin: Who decided on it.
        why: The reason; ``""`` where none is needed.
        option: The option that introduces it; ``""`` for the dialect's.
    """

    name: str
    value: str
    origin: Origin
    why: str = ""
    option: str = ""


class UserOptions(NamedTuple):
    """The user's words, sorted.

    Attributes:
        parameters: MCA parameters in the order given: name, value, option.
        exports: Variables with a value: name, value.
        forwarded: Variables without a value; a ``*`` at the end stands for any ending.
        keyed: Options that can stand once: canonical option, its words.
        left_out: Options of ours that cannot stand beside the user's.
        rest: Everything else, in order.
        warnings: Lines for the log.
    """

    parameters: tuple[tuple[str, str, str], ...] = ()
    exports: tuple[tuple[str, str], ...] = ()
    forwarded: tuple[str, ...] = ()
    keyed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    left_out: frozenset[str] = frozenset()
    rest: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


_PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_VARIABLES = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\*?")
_VARIABLE_LIST = "mca_base_env_list"


def parse_user_options(
    words: Sequence[str], dialect: Dialect, where: str
) -> tuple[UserOptions, list[Problem]]:
    """Sort the user's words (already split by shell rules).

    ``where`` names their source in the problems.
    """
    if any("\0" in word for word in words):
        return UserOptions(), [
            Problem("a word has a NUL character", where, "remove it: an argument cannot have NUL")
        ]
    parser = _Parser(words, dialect, where)
    while parser.words:
        parser.take_option()
    parser.check_exports()
    return parser.options(), parser.problems


class _Parser:
    """Goes through the words once. Every method takes its words off the front of ``words``."""

    def __init__(self, words: Sequence[str], dialect: Dialect, where: str) -> None:
        self.words = list(words)
        self.problems: list[Problem] = []
        self._dialect = dialect
        self._where = where
        self._parameters: dict[str, str] = {}
        self._classes: dict[str, str] = {}
        self._exports: dict[str, str] = {}
        self._forwarded: dict[str, None] = {}
        self._keyed: dict[str, tuple[str, ...]] = {}
        self._left_out: set[str] = set()
        self._rest: list[str] = []
        self._warnings: list[str] = []

    def options(self) -> UserOptions:
        """Return what was found."""
        return UserOptions(
            parameters=tuple(
                (name, value, self._classes.get(name, ""))
                for name, value in self._parameters.items()
            ),
            exports=tuple(self._exports.items()),
            forwarded=tuple(self._forwarded),
            keyed=tuple(self._keyed.items()),
            left_out=frozenset(self._left_out),
            rest=tuple(self._rest),
            warnings=tuple(self._warnings),
        )

    def take_option(self) -> None:
        """One option with its values."""
        word = self.words.pop(0)
        option, equals, value = word.lstrip("-").partition("=")
        if not option or not word.startswith("-"):
            self._stray(word)
            return
        if equals and option not in self._dialect.optional:
            # Both programs refuse --OPTION=VALUE, and for both it can mean one thing only.
            self.words.insert(0, value)
        if option in MCA_OPTIONS:
            self._take_parameter(word, option)
        elif option in ("x", "NCCL_DEBUG"):
            self._take_export(word, option)
        elif option in OURS:
            values = 0 if equals else self._dialect.options.get(option, 1)
            self._refuse(word, f"leave it out: {OURS[option]}", values)
            if equals and option not in self._dialect.optional:
                self.words.pop(0)
        elif option in KEYED:
            self._take_keyed(word, option)
        elif option in FOREIGN and option not in self._dialect.options:
            count, advice = FOREIGN[option]
            text = f"{word} is an option of MPICH, and this is Open MPI"
            self.problems.append(Problem(text, self._where, advice))
            del self.words[: max(count, 1 if equals else 0)]
        elif option in self._dialect.options:
            self._take_known(word, option, value if equals else None)
        else:
            self._take_unknown(word, option)

    def check_exports(self) -> None:
        """A variable that is given both ways, or is ours."""
        for name in self._forwarded:
            if name in self._exports:
                self._problem(f"-x {name} is given with a value and without", "give it once")
        for name in (*self._exports, *self._forwarded):
            if name.startswith(names.OWN_PREFIX):
                self._problem(
                    f"-x {name} is a setting of the launcher, not of a rank",
                    "set it in every container",
                )

    def _problem(self, what: str, advice: str) -> None:
        self.problems.append(Problem(what, self._where, advice))

    def _refuse(self, word: str, advice: str, values: int) -> None:
        self._problem(f"{word} cannot be given", advice)
        del self.words[:values]

    def _values(self, word: str, count: int, example: str) -> tuple[str, ...] | None:
        """Return the next ``count`` words; None, with a problem, if there are too few."""
        if len(self.words) < count:
            self.words.clear()
            self._problem(
                f"{word} needs {'a name and a value' if count > 1 else 'a value'}",
                f"for example: {example}",
            )
            return None
        taken = tuple(self.words[:count])
        del self.words[:count]
        return taken

    def _keep(self, into: dict[str, str], kind: str, name: str, value: str) -> None:
        if into.get(name, value) != value:
            self._problem(
                f"{kind} {name} is given as {into[name]!r} and as {value!r}", "give it once"
            )
        else:
            into[name] = value

    def _take_parameter(self, word: str, option: str) -> None:
        example = f"--{option} NAME VALUE"
        taken = self._values(word, 2, example)
        if taken is None:
            return
        name, value = taken
        if not _PARAMETER.fullmatch(name):
            self._problem(
                f"{name!r} is not the name of an MCA parameter", f"for example: {example}"
            )
        elif name == _VARIABLE_LIST:
            # Open MPI 4 refuses this parameter beside -x, which the ranks' own
            # variables may come with.
            for entry in filter(None, value.split(";")):
                self._export(f"--{option} {name}", entry)
        else:
            self._keep(self._parameters, "MCA parameter", name, value)
            self._left_out.update(INSTEAD.get(name, ()))
            if self._dialect.own_classes and option not in ("mca", "gmca"):
                self._classes[name] = f"--{option}"

    def _take_export(self, word: str, option: str) -> None:
        taken = self._values(word, 1, "-x NAME=VALUE" if option == "x" else f"{word} INFO")
        if taken is None:
            return
        if option == "x":
            self._export("-x", taken[0])
        else:
            # ``--NCCL_DEBUG LEVEL`` is an option of sagemaker-training, not of
            # mpirun; it means the variable.
            self._keep(self._exports, "-x", option, taken[0])

    def _export(self, said: str, entry: str) -> None:
        name, equals, value = entry.partition("=")
        if not (_VARIABLE if equals else _VARIABLES).fullmatch(name):
            self._problem(
                f"{said} {entry!r} does not begin with the name of a variable",
                "for example: -x NAME=VALUE",
            )
        elif equals:
            self._keep(self._exports, "-x", name, value)
        else:
            self._forwarded.setdefault(name)

    def _take_keyed(self, word: str, option: str) -> None:
        """An option that can stand once, by any of its names."""
        canonical, pattern = KEYED[option]
        example = f"--{option} {'none' if option == canonical else '2'}"
        taken = self._values(word, pattern.count("{}"), example)
        if taken is None:
            return
        if "" in taken:
            self._problem(f"{word} needs a value", f"for example: {example}")
            return
        value = pattern.replace("{socket}", self._dialect.socket).format(*taken)
        values = (value,) if value else ()
        if self._keyed.get(canonical, values) != values:
            text = f"--{canonical} is given as {self._keyed[canonical][0]!r} and as {value!r}"
            self._problem(text + (f" ({word})" if option != canonical else ""), "give it once")
        self._keyed[canonical] = values
        if canonical == "map-by" and "pe=" in value.lower():
            # PE=N binds each process to N cores; Open MPI 5 refuses both.
            self._left_out.add("bind-to")

    def _take_known(self, word: str, option: str, value: str | None) -> None:
        """An option of the installed mpirun: two dashes, which both lines take for every name
        longer than a letter.
        """
        self._left_out.update(INSTEAD.get(option, ()))
        dashed = f"-{option}" if len(option) == 1 else f"--{option}"
        if option in self._dialect.optional:
            self._rest.append(dashed if value is None else f"{dashed}={value}")
            return
        count = self._dialect.options[option]
        if count == 0 and value is not None:
            self._problem(f"{word} has a value, and --{option} takes none", f"write: --{option}")
            self.words.pop(0)
            return
        taken = self._values(word, count, f"{word} VALUE")
        self._rest += (dashed, *(taken or ()))

    def _take_unknown(self, word: str, option: str) -> None:
        """Passed on: the image may have a newer mpirun than we know.

        The words up to the next option are its values.
        """
        self._warnings.append(
            f"{word} is not a known option of Open MPI {self._dialect.major}; it is passed on to"
            f" mpirun; {nearest(option, self._dialect.options)}"
        )
        if "=" in word:
            self.words.pop(0)
        self._rest.append(word)
        while self.words and not self.words[0].startswith("-"):
            self._rest.append(self.words.pop(0))

    def _stray(self, word: str) -> None:
        """A word that mpirun would take for the program."""
        advice = "options start with -; quote a value that has a space"
        name, equals, _ = word.partition("=")
        if equals and _VARIABLE.fullmatch(name):
            advice = f"to set a variable, write: -x {word}"
        self._problem(
            f"{word!r} is not an option: mpirun would start it instead of the training script",
            advice,
        )


def merge(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """One setting per name: the strongest origin wins, the first place in the order is kept.

    Two values of one origin cannot occur: the user's were checked by
    ``parse_user_options``, and ours are code.
    """
    merged: dict[str, Setting] = {}
    for setting in settings:
        held = merged.get(setting.name)
        if held is None or setting.origin >= held.origin:
            merged[setting.name] = setting
    return tuple(merged.values())


def merge_parameters(
    ours: Sequence[Setting],
    user: UserOptions,
    dialect: Dialect,
    variables: Mapping[str, str],
    where: str,
) -> tuple[tuple[Setting, ...], tuple[tuple[str, str], ...], list[Problem]]:
    """Merge our MCA parameters with the user's and the container's.

    A ``*_if_exclude`` removes our ``*_if_include`` and the reverse: Open MPI
    accepts only one of the two.

    Args:
        ours: Parameters of the launcher.
        user: The user's options.
        dialect: How the installed Open MPI spells them.
        variables: The container's environment. ``OMPI_MCA_NAME`` in it wins over ours; the user's
            options win over it.
        where: The setting that the user's options come from.

    Returns:
        The parameters of the line; what was left out and why; problems.
    """
    problems: list[Problem] = []
    left_out: list[tuple[str, str]] = []
    theirs: dict[str, Setting] = {}
    for name, value, option in user.parameters:
        if name in dialect.gone:
            left_out.append((f"--mca {name} {value}", dialect.gone[name]))
            continue
        canonical = dialect.canonical(name)
        renamed = (
            f"{name} is called {canonical} in Open MPI {dialect.major}" if canonical != name else ""
        )
        held = theirs.get(canonical)
        if held and held.value != value:
            text = (
                f"MCA parameter {canonical} is given as {held.value!r} and, as {name}, as {value!r}"
            )
            problems.append(Problem(text, where, "give it once"))
            continue
        theirs[canonical] = Setting(
            canonical, value, Origin.USER, renamed or "from the job's custom_mpi_options", option
        )
    problems.extend(
        Problem(
            f"MCA parameters {name} and {_opposite(name)} are both given",
            where,
            "Open MPI accepts one of them",
        )
        for name in theirs
        if name.endswith("_if_include") and _opposite(name) in theirs
    )
    image = _from_environment(variables, dialect)
    kept: list[Setting] = []
    for setting in ours:
        opposite = _opposite(setting.name)
        if opposite and opposite in theirs:
            left_out.append((f"{setting.name} {setting.value}", f"the job gives {opposite}"))
        elif opposite and opposite in image and setting.name not in theirs:
            left_out.append(
                (f"{setting.name} {setting.value}", f"the container's environment gives {opposite}")
            )
        else:
            kept.append(image.get(setting.name, setting))
    return merge([*kept, *theirs.values()]), tuple(left_out), problems


def _from_environment(variables: Mapping[str, str], dialect: Dialect) -> dict[str, Setting]:
    """Parameters that the container's environment sets, by their canonical names."""
    found: dict[str, Setting] = {}
    for variable, value in sorted(variables.items()):
        for prefix in ("OMPI_MCA_", "PRTE_MCA_"):
            name = variable[len(prefix) :]
            if variable.startswith(prefix) and name not in dialect.gone:
                name = dialect.canonical(name)
                found[name] = Setting(
                    name, value, Origin.IMAGE, f"the container's environment sets {variable}"
                )
    return found


def _opposite(name: str) -> str:
    """Return the parameter that excludes this one, "" if there is none."""
    for one, other in (("_if_include", "_if_exclude"), ("_if_exclude", "_if_include")):
        if name.endswith(one):
            return name[: -len(one)] + other
    return ""
