"""Test the grammar of every command: examples that are true, a help that fits, and the nearest
right word.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from trainworks import errors
from trainworks.cli import main
from trainworks.cli.commands import BUILD, COMMANDS, GROUPS, grammar_of
from trainworks.cli.grammar import CPU_TARGET, TARGET, WIDTH, Example
from trainworks.facts.rows import Facts

EXAMPLES = [
    pytest.param(name, example, id=example.line.removeprefix("python "))
    for name in COMMANDS
    for example in grammar_of(name).manual.examples
]


def words_of(name: str, example: Example) -> tuple[str, ...]:
    """Return an example's words for its command's parser."""
    first, *others = example.arguments
    return tuple(others) if first == name else example.arguments


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_the_parser_takes_every_example(name: str, example: Example) -> None:
    assert example.arguments[0] == name or name == BUILD
    grammar_of(name).parse_args(words_of(name, example))


@pytest.mark.parametrize(
    ("name", "example"),
    [
        example
        for example in EXAMPLES
        if isinstance(example.values[1], Example) and not example.values[1].needs
    ],
)
def test_examples_that_need_nothing_do_what_they_say(
    name: str,
    example: Example,
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tests").symlink_to(root / "tests")
    status = main(example.arguments, checkout)
    assert status == 0, dict(grammar_of(name).manual.exit_statuses)[status]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--framework", "pytorch", "--framework", "tensorflow"),
            "--framework is given twice; it takes one value",
        ),
        (
            ("--framework", "pytorch", "--framework=pytorch"),
            "--framework is given twice; it takes one value",
        ),
        (("--all", "-j", "2", "--jobs", "3"), "--jobs is given twice; it takes one value"),
        (("--cuda", "cpu", "--cuda", "cu121", "-x"), "unknown option -x"),
    ],
)
def test_an_option_with_one_value_is_given_once(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(errors.CommandLineError) as caught:
        grammar_of(BUILD).parse_args(words)
    assert message in caught.value.problems
    assert any("given twice" in problem for problem in caught.value.problems), (
        "with all else that is wrong"
    )


def test_options_that_repeat_and_flags_may_be_given_again() -> None:
    words = (
        "--framework",
        "pytorch",
        "--cuda",
        "cpu",
        "--with",
        "a",
        "--with",
        "b",
        "--verbose",
        "--verbose",
    )
    assert grammar_of(BUILD).parse_args(words).with_components == ["a", "b"]


def test_targets_of_examples_are_in_the_matrix(facts: Facts) -> None:
    assert {TARGET, CPU_TARGET} <= {facts.name_of(row) for row in facts.targets}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_and_says_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH + 40))
    grammar = grammar_of(name)
    text = grammar.format_help()
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    assert len(grammar.manual.examples) >= 2
    flat = " ".join(text.split())
    for help_text in (
        *(source.name for source in grammar.manual.reads),
        *(argument["help"] for argument in grammar.arguments()),
    ):
        assert help_text in flat
    meaning = errors.TrainworksError.meaning
    assert (
        f"exit status: 0 {grammar.manual.exit_statuses[0][1]}, 1 {meaning}, 2 wrong command line, "
        in flat
    )
    assert all(
        other in COMMANDS or other.split()[0] in COMMANDS or "." in other
        for other in grammar.manual.see_also
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_explained_in_one_short_line(name: str) -> None:
    assert [
        argument_row["help"]
        for argument_row in grammar_of(name).arguments()
        if not 0 < len(argument_row["help"]) <= 72
    ] == []


def test_every_error_has_a_status_and_a_meaning_of_its_own() -> None:
    named = [value for value in vars(errors).values() if isinstance(value, type)]
    classes = [
        value
        for value in named
        if issubclass(value, errors.TrainworksError) and "exit_status" in vars(value)
    ]
    statuses = [error_class.exit_status for error_class in classes]
    assert statuses == sorted(set(statuses)), "the file is in this order"
    assert len({error_class.meaning for error_class in classes}) == len(classes)
    assert {status for name in COMMANDS for status, _ in grammar_of(name).manual.exit_statuses} == {
        0,
        *statuses,
    }


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("help",)])
def test_overview(words: tuple[str, ...], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words, root) == 0
    output = capsys.readouterr().out
    for group, names in GROUPS.items():
        assert re.search(
            rf"^{group}:\n" + "".join(rf"  {name} +\S.*\n" for name in names), output, re.MULTILINE
        )
    assert [line for line in output.splitlines() if len(line) > WIDTH] == []


def test_the_version_is_the_distributions(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    assert main(["--version"], root) == 0
    assert capsys.readouterr().out == f"trainworks {version}\n"


def test_help_of_a_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "push"], root) == 0
    text = capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["push", "--help"], root)
    assert (caught.value.code, capsys.readouterr().out) == (0, text)


def test_help_for_programs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "--format", "json"], root) == 0
    commands = {
        command["command"]: command for command in json.loads(capsys.readouterr().out)["commands"]
    }
    assert tuple(commands) == COMMANDS
    repository = next(
        argument_row
        for argument_row in commands["push"]["arguments"]
        if argument_row["names"] == ["--repository"]
    )
    assert (repository["value"], repository["required"], repository["repeats"]) == (
        "REPOSITORY",
        True,
        True,
    )
