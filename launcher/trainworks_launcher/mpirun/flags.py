"""mpirun's options as keyed maps with an origin (``origins``). Pure.

Open MPI refuses a command line with one MCA parameter twice and two values (4.x: even with the same
value). So parameters are merged by name before the line is written: the stronger origin wins, the
same value is written once, and two values of the user are an error that shows both. ``dialects``
has the spelling of the installed Open MPI. A user's names of the other major version are converted,
so that an old name and the launcher's new name are the same parameter.
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
        origin: Origin of the value.
        why: The reason; ``""`` for none.
        option: The option for the parameter; ``""`` for the dialect's.
    """

    name: str
    value: str
    origin: Origin
    why: str = ""
    option: str = ""


class UserParameter(NamedTuple):
    """An MCA parameter of the user.

    Attributes:
        name: Its name as the user writes it, for example ``btl_tcp_if_include``.
        value: Its value.
        option: The option for the parameter, for example ``--prtemca``; ``""`` for the dialect's.
    """

    name: str
    value: str
    option: str


class UserOptions(NamedTuple):
    """The parsed options of the user.

    Attributes:
        parameters: MCA parameters in the user's order.
        exports: Variables with a value: name, value.
        forwarded: Variables without a value; a ``*`` at the end matches any ending.
        keyed: Options that may be given once: canonical option, its words.
        left_out: Options of the launcher that conflict with the user's.
        rest: All other words, in order.
        warnings: Lines for the log.
    """

    parameters: tuple[UserParameter, ...] = ()
    exports: tuple[tuple[str, str], ...] = ()
    forwarded: tuple[str, ...] = ()
    keyed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    left_out: frozenset[str] = frozenset()
    rest: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


_PARAMETER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\*?")
_VARIABLE_LIST = "mca_base_env_list"


def parse_user_options(
    words: Sequence[str], dialect: Dialect, where: str
) -> tuple[UserOptions, list[Problem]]:
    """Parse the user's options of mpirun.

    Args:
        words: The options, split by shell rules: ``["--mca", "pml", "ob1"]``.
        dialect: The spelling of the installed Open MPI.
        where: Source of the words, for problems.

    Returns:
        The options, and the problems in the words; with a problem the options are not complete.
    """
    if any("\0" in word for word in words):
        advice = "remove it: an argument cannot have NUL"
        return UserOptions(), [Problem("a word has a NUL character", where, advice)]
    parser = _Parser(words, dialect, where)
    while parser.words:
        parser.take_option()
    parser.check_exports()
    return parser.options(), parser.problems


class _Parser:
    """Parses the words in order. Every ``_take_`` method removes its words from the front.

    Attributes:
        words: The words that are not parsed yet.
        problems: The problems so far.
    """

    def __init__(self, words: Sequence[str], dialect: Dialect, where: str) -> None:
        """Begin; the parameters are those of ``parse_user_options``."""
        self.words = list(words)
        self.problems: list[Problem] = []
        self._dialect = dialect
        self._where = where
        self._parameters: dict[str, str] = {}
        self._classes: dict[str, str] = {}  # parameter -> its option, where that is not --mca
        self._exports: dict[str, str] = {}
        self._forwarded: dict[str, None] = {}
        self._keyed: dict[str, tuple[str, ...]] = {}
        self._left_out: set[str] = set()
        self._rest: list[str] = []
        self._warnings: list[str] = []

    def options(self) -> UserOptions:
        """Return the options that were parsed so far."""
        parameters = []
        for name, value in self._parameters.items():
            parameters.append(UserParameter(name, value, self._classes.get(name, "")))
        return UserOptions(
            parameters=tuple(parameters),
            exports=tuple(self._exports.items()),
            forwarded=tuple(self._forwarded),
            keyed=tuple(self._keyed.items()),
            left_out=frozenset(self._left_out),
            rest=tuple(self._rest),
            warnings=tuple(self._warnings),
        )

    def take_option(self) -> None:
        """Parse one option with its values, or add a problem. Needs at least one word."""
        word = self.words.pop(0)
        option, equals, value = word.lstrip("-").partition("=")
        if not option or not word.startswith("-"):
            self._refuse_stray_word(word)
            return
        if equals and option not in self._dialect.optional:
            # Both versions refuse --OPTION=VALUE, which can only mean the value: it is put back as
            # a word of its own.
            self.words.insert(0, value)
        if option in MCA_OPTIONS:
            self._take_parameter(word, option)
        elif option in ("x", "NCCL_DEBUG"):
            self._take_export(word, option)
        elif option in OURS:
            # Words to skip. Of an option that this version does not have, one.
            values = 0 if equals else self._dialect.options.get(option, 1)
            self._refuse(word, f"leave it out: {OURS[option]}", values)
            if equals and option not in self._dialect.optional:
                # The value, which was put back above.
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
        """Add a problem for each variable that is given in both ways, or is the launcher's."""
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
        """Add a problem."""
        self.problems.append(Problem(what, self._where, advice))

    def _refuse(self, word: str, advice: str, values: int) -> None:
        """Add a problem for an option that is not allowed, and skip its values.

        Args:
            word: The option as the user writes it.
            advice: What to do.
            values: Number of its values.
        """
        self._problem(f"{word} cannot be given", advice)
        del self.words[:values]

    def _take_values(self, word: str, count: int, example: str) -> tuple[str, ...] | None:
        """Remove and return the values of an option.

        Args:
            word: The option as the user writes it.
            count: Number of its values.
            example: A correct use, for the problem.

        Returns:
            The values; None, with a problem, if there are too few words.
        """
        if len(self.words) < count:
            self.words.clear()
            needed = "a name and a value" if count > 1 else "a value"
            self._problem(f"{word} needs {needed}", f"for example: {example}")
            return None
        values = tuple(self.words[:count])
        del self.words[:count]
        return values

    def _set_once(self, values: dict[str, str], kind: str, name: str, value: str) -> None:
        """Set the value of a name, or add a problem if the name has another value already.

        Args:
            values: Name -> value.
            kind: What the name is, for the problem: ``MCA parameter`` or ``-x``.
            name: The name.
            value: The value.
        """
        if values.get(name, value) != value:
            self._problem(
                f"{kind} {name} is given as {values[name]!r} and as {value!r}", "give it once"
            )
        else:
            values[name] = value

    def _take_parameter(self, word: str, option: str) -> None:
        """Parse ``--mca NAME VALUE``, or an option for a parameter of another class.

        Args:
            word: The option as the user writes it.
            option: The option without dashes, one of ``MCA_OPTIONS``.
        """
        example = f"--{option} NAME VALUE"
        taken = self._take_values(word, 2, example)
        if taken is None:
            return
        name, value = taken
        if not _PARAMETER_NAME.fullmatch(name):
            self._problem(
                f"{name!r} is not the name of an MCA parameter", f"for example: {example}"
            )
        elif name == _VARIABLE_LIST:
            # Open MPI 4 refuses this parameter beside -x, which the launcher may need for the
            # ranks' own variables.
            for entry in filter(None, value.split(";")):
                self._export(f"--{option} {name}", entry)
        else:
            self._set_once(self._parameters, "MCA parameter", name, value)
            self._left_out.update(INSTEAD.get(name, ()))
            if self._dialect.own_classes and option not in ("mca", "gmca"):
                self._classes[name] = f"--{option}"

    def _take_export(self, word: str, option: str) -> None:
        """Parse ``-x NAME=VALUE``, ``-x NAME``, or ``--NCCL_DEBUG LEVEL``.

        Args:
            word: The option as the user writes it.
            option: ``x`` or ``NCCL_DEBUG``.
        """
        example = "-x NAME=VALUE" if option == "x" else f"{word} INFO"
        taken = self._take_values(word, 1, example)
        if taken is None:
            return
        if option == "x":
            self._export("-x", taken[0])
        else:
            # ``--NCCL_DEBUG LEVEL`` is an option of sagemaker-training, not of mpirun, and sets
            # the variable.
            self._set_once(self._exports, "-x", option, taken[0])

    def _export(self, source: str, entry: str) -> None:
        """Note a variable for the ranks, or add a problem.

        Args:
            source: The option that names it, for the problem.
            entry: ``NAME=VALUE``, or ``NAME`` and ``NAME*`` for values of the environment.
        """
        name, equals, value = entry.partition("=")
        pattern = _VARIABLE_NAME if equals else _VARIABLE_PATTERN
        if not pattern.fullmatch(name):
            self._problem(
                f"{source} {entry!r} does not begin with the name of a variable",
                "for example: -x NAME=VALUE",
            )
        elif equals:
            self._set_once(self._exports, "-x", name, value)
        else:
            self._forwarded.setdefault(name)

    def _take_keyed(self, word: str, option: str) -> None:
        """Parse an option that may be given once, under any of its names.

        ``--npernode 4`` and ``--map-by ppr:4:node`` are the same option; another value is a
        problem.

        Args:
            word: The option as the user writes it.
            option: The option without dashes, a key of ``KEYED``.
        """
        canonical, pattern = KEYED[option]
        value_of_example = "none" if option == canonical else "2"
        example = f"--{option} {value_of_example}"
        taken = self._take_values(word, pattern.count("{}"), example)
        if taken is None:
            return
        if "" in taken:
            self._problem(f"{word} needs a value", f"for example: {example}")
            return
        value = pattern.replace("{socket}", self._dialect.socket).format(*taken)
        values = (value,) if value else ()
        earlier = self._keyed.get(canonical, values)
        if earlier != values:
            text = f"--{canonical} is given as {earlier[0]!r} and as {value!r}"
            if option != canonical:
                text += f" ({word})"
            self._problem(text, "give it once")
        self._keyed[canonical] = values
        if canonical == "map-by" and "pe=" in value.lower():
            # PE=N binds each process to N cores; Open MPI 5 refuses that beside bind-to.
            self._left_out.add("bind-to")

    def _take_known(self, word: str, option: str, value: str | None) -> None:
        """Parse an option of the installed mpirun, which is passed on, or add a problem.

        The launcher's options that conflict with it are left out.

        Args:
            word: The option as the user writes it.
            option: The option without dashes.
            value: The value after an equals sign; None without one.
        """
        self._left_out.update(INSTEAD.get(option, ()))
        # Both versions accept two dashes for every name that is longer than a letter.
        dashed = f"-{option}" if len(option) == 1 else f"--{option}"
        if option in self._dialect.optional:
            if value is not None:
                dashed = f"{dashed}={value}"
            self._rest.append(dashed)
            return
        count = self._dialect.options[option]
        if count == 0 and value is not None:
            self._problem(f"{word} has a value, and --{option} takes none", f"write: --{option}")
            self.words.pop(0)
            return
        taken = self._take_values(word, count, f"{word} VALUE")
        self._rest += (dashed, *(taken or ()))

    def _take_unknown(self, word: str, option: str) -> None:
        """Pass an unknown option on with a warning: the image may have a newer mpirun.

        The words up to the next option are its values.

        Args:
            word: The option as the user writes it.
            option: The option without dashes.
        """
        self._warnings.append(
            f"{word} is not a known option of Open MPI {self._dialect.major}; it is passed on to"
            f" mpirun; {nearest(option, self._dialect.options)}"
        )
        if "=" in word:
            # The value is in the word itself, and was put back by ``take_option``.
            self.words.pop(0)
        self._rest.append(word)
        while self.words and not self.words[0].startswith("-"):
            self._rest.append(self.words.pop(0))

    def _refuse_stray_word(self, word: str) -> None:
        """Add a problem for a word that mpirun would take for the program."""
        advice = "options start with -; quote a value that has a space"
        name, equals, _ = word.partition("=")
        if equals and _VARIABLE_NAME.fullmatch(name):
            advice = f"to set a variable, write: -x {word}"
        self._problem(
            f"{word!r} is not an option: mpirun would start it instead of the training script",
            advice,
        )


def merge(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """Return one setting for each name: that of the strongest origin, in the place of the first.

    Of two settings of one origin the later one counts. That does not occur:
    ``parse_user_options`` has checked the user's, and the launcher's are code.
    """
    merged: dict[str, Setting] = {}
    for setting in settings:
        earlier = merged.get(setting.name)
        if earlier is None or setting.origin >= earlier.origin:
            merged[setting.name] = setting
    return tuple(merged.values())


def merge_parameters(
    ours: Sequence[Setting],
    user: UserOptions,
    dialect: Dialect,
    variables: Mapping[str, str],
    where: str,
) -> tuple[tuple[Setting, ...], tuple[tuple[str, str], ...], list[Problem]]:
    """Merge the launcher's MCA parameters with the user's and the container's.

    A ``*_if_exclude`` removes the launcher's ``*_if_include`` and the reverse: Open MPI accepts
    only one of the two.

    Args:
        ours: Parameters of the launcher.
        user: The user's options.
        dialect: The spelling of the installed Open MPI.
        variables: The container's environment. ``OMPI_MCA_NAME`` in it wins over the launcher's;
            the user's options win over both.
        where: Source of the user's options, for problems.

    Returns:
        The parameters of the line; the parameters that were left out, with reasons; problems.
    """
    problems: list[Problem] = []
    left_out: list[tuple[str, str]] = []
    user_settings: dict[str, Setting] = {}
    for name, value, option in user.parameters:
        if name in dialect.gone:
            left_out.append((f"--mca {name} {value}", dialect.gone[name]))
            continue
        canonical = dialect.canonical(name)
        why = "from the job's custom_mpi_options"
        if canonical != name:
            why = f"{name} is called {canonical} in Open MPI {dialect.major}"
        earlier = user_settings.get(canonical)
        if earlier and earlier.value != value:
            text = (
                f"MCA parameter {canonical} is given as {earlier.value!r} and, as {name},"
                f" as {value!r}"
            )
            problems.append(Problem(text, where, "give it once"))
            continue
        user_settings[canonical] = Setting(canonical, value, Origin.USER, why, option)
    for name in user_settings:
        opposite = _opposite(name)
        if name.endswith("_if_include") and opposite in user_settings:
            text = f"MCA parameters {name} and {opposite} are both given"
            problems.append(Problem(text, where, "Open MPI accepts one of them"))
    image = _from_environment(variables, dialect)
    # The launcher's parameters, with the container's value where there is one.
    remaining: list[Setting] = []
    for setting in ours:
        opposite = _opposite(setting.name)
        shown = f"{setting.name} {setting.value}"
        if opposite and opposite in user_settings:
            left_out.append((shown, f"the job gives {opposite}"))
        elif opposite and opposite in image and setting.name not in user_settings:
            left_out.append((shown, f"the container's environment gives {opposite}"))
        else:
            remaining.append(image.get(setting.name, setting))
    return merge([*remaining, *user_settings.values()]), tuple(left_out), problems


def _from_environment(variables: Mapping[str, str], dialect: Dialect) -> dict[str, Setting]:
    """Return the parameters in the container's environment: canonical name -> setting.

    They are in variables such as ``OMPI_MCA_pml``. Parameters that this Open MPI does not have are
    left out.
    """
    settings: dict[str, Setting] = {}
    for variable, value in sorted(variables.items()):
        for prefix in ("OMPI_MCA_", "PRTE_MCA_"):
            name = variable[len(prefix) :]
            if variable.startswith(prefix) and name not in dialect.gone:
                name = dialect.canonical(name)
                why = f"the container's environment sets {variable}"
                settings[name] = Setting(name, value, Origin.IMAGE, why)
    return settings


def _opposite(name: str) -> str:
    """Return the parameter that excludes this one: ``btl_tcp_if_exclude`` for its ``_if_include``.

    ``""`` for a parameter of another kind.
    """
    for one, other in (("_if_include", "_if_exclude"), ("_if_exclude", "_if_include")):
        if name.endswith(one):
            return name[: -len(one)] + other
    return ""
