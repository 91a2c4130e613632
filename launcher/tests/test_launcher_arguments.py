"""Hyperparameters to arguments: a table per style, and each style read back by
the program it was made for.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher_support import REPOSITORY, TIME_OUT, environment, plan

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.hyperparameters import decode_values, split_reserved, truth
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.job.arguments import STYLES, to_arguments

NASTY = (
    "two words",
    "a'b",
    'a"b',
    "$HOME",
    "`id`",
    "; id",
    "a\nb",
    "back\\slash",
    "--",
    "-x",
    "",
    "größe",
    "\\'",
    "a\\",
)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", 0.1, ("--lr", "0.1")),
        ("n", 3, ("-n", "3")),
        ("batch-size", 64, ("--batch-size", "64")),
        ("amp", True, ("--amp", "True")),
        ("amp", False, ("--amp", "False")),
        ("tag", None, ("--tag", "")),
        ("tag", "", ("--tag", "")),
        ("tag", "two words; $HOME", ("--tag", "two words; $HOME")),
        ("layers", [1, 2], ("--layers", "[1, 2]")),
        ("words", ["a", "b"], ("--words", "['a', 'b']")),
        ("options", {"b": 1, "a": "x"}, ("--options", "a=x,b=1")),
        ("big", 1e-05, ("--big", "1e-05")),
        ("umlaut", "größe", ("--umlaut", "größe")),
    ],
)
def test_one_hyperparameter(name: str, value: Json, expected: tuple[str, ...]) -> None:
    assert to_arguments({name: value}) == expected


def test_arguments_are_sorted_by_name() -> None:
    assert to_arguments({"b": 1, "a": 2, "aa": 3}) == ("-a", "2", "--aa", "3", "-b", "1")


@pytest.mark.parametrize(
    ("value", "flag", "as_json", "assignment"),
    [
        (True, "--x-y", "--x-y true", "x-y=true"),
        (False, "", "--x-y false", "x-y=false"),
        ("True", "--x-y", "--x-y True", "x-y='True'"),
        (None, "", "--x-y null", "x-y=null"),
        (3, "--x-y 3", "--x-y 3", "x-y=3"),
        (1e-05, "--x-y 1e-05", "--x-y 1e-05", "x-y=1e-05"),
        (math.inf, "--x-y inf", "--x-y Infinity", "x-y=inf"),
        ("adam", "--x-y adam", "--x-y adam", "x-y=adam"),
        ("7", "--x-y 7", "--x-y 7", "x-y='7'"),
        ("", "--x-y ", "--x-y ", "x-y=''"),
        ([1, "b"], "--x-y 1 b", '--x-y [1,·"b"]', "x-y=[1,b]"),
        ([], "", "--x-y []", "x-y=[]"),
        (
            {"b": {"c": None}, "a": "x,y"},
            "--x-y a=x,y,b={'c':·None}",
            None,
            "x-y.b.c=null x-y.a='x,y'",
        ),
        ({"not a key": 1}, "--x-y not·a·key=1", '--x-y {"not·a·key":·1}', "x-y={not\\·a\\·key:1}"),
        ({}, "--x-y ", "--x-y {}", "x-y={}"),
    ],
)
def test_the_other_styles(value: Json, flag: str, as_json: str | None, assignment: str) -> None:
    """A space parts two arguments, a ``·`` stands for one inside an argument."""

    def words(text: str) -> tuple[str, ...]:
        return tuple(word.replace("·", " ") for word in text.split(" ")) if text else ()

    assert to_arguments({"x-y": value}, "flag") == words(flag)
    assert to_arguments({"x-y": value}, "key=value") == words(assignment)
    assert to_arguments({"x-y": value}, "none") == ()
    if as_json is not None:
        assert to_arguments({"x-y": value}, "json") == words(as_json)


def test_the_table_of_styles_is_true() -> None:
    """Each cell of the launcher's README, as a shell would read it."""
    text = (
        (REPOSITORY / "launcher/README.md")
        .read_text(encoding="utf-8")
        .partition("| style | true")[2]
    )
    rows = []
    for line in text.partition("\n\n")[0].splitlines()[2:]:
        cells = line.split("|")[1:-1]
        rows.append([cell.strip(" `") for cell in cells])
    assert [row[0] for row in rows] == list(STYLES)
    values: tuple[Json, ...] = (True, False, None, [1, "a b"], {"a": {"b": 1}})
    for style, *cells in rows:
        for value, cell in zip(values, cells[:5], strict=True):
            assert tuple(shlex.split(cell)) == to_arguments({"name": value}, style), (style, value)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_the_json_style_reads_back(user: dict[str, Json]) -> None:
    words = to_arguments(user, "json")
    assert [word.removeprefix("--") for word in words[::2]] == sorted(user)
    for name, word in zip(sorted(user), words[1::2], strict=True):
        value = user[name]
        assert word == value if isinstance(value, str) else json.loads(word) == value


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.sampled_from(sorted(STYLES)))
def test_every_style_takes_every_value(user: dict[str, Json], style: str) -> None:
    assert all(isinstance(word, str) for word in to_arguments(user, style))


def peer(name: str) -> str:
    python = REPOSITORY / ".cache/peers" / name / "bin/python"
    if not python.exists():
        pytest.skip(f"no {python.relative_to(REPOSITORY)}; make it with: tools/set-up-peers {name}")
    return str(python)


def ask(python: str, program: str, questions: list[Json], cwd: Path) -> list[Json]:
    """Have another environment's Python answer a list of questions."""
    done = subprocess.run(
        (python, "-c", f"import json, sys\nquestions = json.load(sys.stdin)\n{program}"),
        input=json.dumps(questions).encode(),
        capture_output=True,
        timeout=TIME_OUT,
        check=False,
        cwd=cwd,
        env={
            "HOME": str(cwd),
            "PATH": "/usr/bin:/bin",
            "SAGEMAKER_BASE_DIR": str(cwd),
            "PYTHONUTF8": "1",
        },
    )
    assert done.returncode == 0, done.stderr.decode()
    answers: list[Json] = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == len(questions)
    return answers


def many(strategy: st.SearchStrategy[dict[str, Json]], count: int) -> list[dict[str, Json]]:
    """Examples of a strategy, all together, for a program that is slow to start."""
    examples: list[dict[str, Json]] = []

    @settings(max_examples=count, database=None, derandomize=True)
    @given(strategy)
    def collect(example: dict[str, Json]) -> None:
        examples.append(example)

    collect()
    return examples


@pytest.mark.engine
def test_the_value_style_is_what_sagemaker_training_gives(tmp_path: Path) -> None:
    users = many(st.dictionaries(NAMES, VALUES, max_size=4), 500)
    program = (
        "from sagemaker_training.mapping import to_cmd_args\n"
        "print(json.dumps([to_cmd_args(question) for question in questions]))"
    )
    expected = ask(peer("sagemaker-training"), program, [dict(user) for user in users], tmp_path)
    assert [list(to_arguments(user)) for user in users] == expected


@pytest.mark.engine
def test_the_json_style_is_what_model_trainer_gives(tmp_path: Path) -> None:
    """Compare the reading of a hyperparameters file by the SDK's driver with ours.

    The order may differ.
    """
    users = many(st.dictionaries(NAMES, VALUES, max_size=4), 300)
    raw: list[Json] = []
    for user in users:
        raw.append({name: json.dumps(value) for name, value in user.items()})
    program = (
        "from sagemaker.train.container_drivers.common.utils"
        " import hyperparameters_to_cli_args as words\n"
        "print(json.dumps([words(dict(sorted(question.items()))) for question in questions]))"
    )
    expected = ask(peer("sdk-v3"), program, raw, tmp_path)
    argument_lists = [
        list(to_arguments(decode_values(r), "json")) for r in raw if isinstance(r, dict)
    ]
    assert argument_lists == expected


@pytest.mark.engine
def test_hydra_reads_back_what_the_assignments_say(tmp_path: Path) -> None:
    key = st.from_regex(r"[a-z][a-z0-9_]{0,4}", fullmatch=True)
    word = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8).filter(
        lambda t: "${" not in t
    )
    leaf = (
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | word
    )
    leaf |= st.sampled_from(
        [*NASTY, "true", "null", "1e3", "inf", "a,b", "[1]", "{a:1}", "f(x)", "a=b", "_", "a/b.c"]
    )
    values = st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(key, inner, max_size=3)
    )
    users = many(st.dictionaries(key.map(lambda name: f"h_{name}"), values, max_size=3), 300)
    program = (
        "from hydra.core.override_parser.overrides_parser import OverridesParser\n"
        "parser, answers = OverridesParser.create(), []\n"
        "for question in questions:\n"
        "    parsed = [parser.parse_override(word) for word in question]\n"
        "    assert not any(override.is_sweep_override() for override in parsed)\n"
        "    answers.append([[override.key_or_group, override.value()] for override in parsed])\n"
        "print(json.dumps(answers))"
    )
    argument_lists: list[Json] = [list(to_arguments(user, "key=value")) for user in users]
    for user, answer in zip(
        users, ask(peer("hydra"), program, argument_lists, tmp_path), strict=True
    ):
        rebuilt: dict[str, Json] = {}
        assert isinstance(answer, list)
        for pair in answer:
            assert isinstance(pair, list)
            path, value = pair
            *parents, last = str(path).split(".")
            place = rebuilt
            for parent in parents:
                inner = place.setdefault(parent, {})
                assert isinstance(inner, dict)
                place = inner
            place[last] = value
        assert rebuilt == user


@pytest.mark.parametrize(
    ("hyperparameter", "variable", "expected"),
    [
        (None, "", ("--amp", "True")),
        ("flag", "", ("--amp",)),
        (None, "flag", ("--amp",)),
        ("json", "flag", ("--amp", "true")),
        ("", "key=value", ("amp=true",)),
        ("none", "flag", ()),
    ],
)
def test_the_job_chooses_the_style_and_the_image_the_default(
    hyperparameter: Json, variable: str, expected: tuple[str, ...]
) -> None:
    hyperparameters = {"amp": True} | (
        {} if hyperparameter is None else {names.ARGUMENT_STYLE: hyperparameter}
    )
    node_plan = plan(
        environment(
            hyperparameters, variables={"PATH": "/usr/bin", names.ARGUMENT_STYLE_VARIABLE: variable}
        )
    )
    assert node_plan.argv[2:] == expected
    assert json.loads(node_plan.env["SM_USER_ARGS"]) == list(expected)


@pytest.mark.parametrize(("hyperparameter", "variable"), [("given", "name"), (None, "given")])
def test_arguments_may_keep_the_order_of_the_platforms_file(
    hyperparameter: Json, variable: str
) -> None:
    hyperparameters = {
        "config": "a.yaml",
        "batch": 2,
        **({names.ARGUMENT_ORDER: hyperparameter} if hyperparameter else {}),
    }
    node_plan = plan(
        environment(
            hyperparameters, variables={"PATH": "/usr/bin", names.ARGUMENT_ORDER_VARIABLE: variable}
        )
    )
    assert node_plan.argv[2:] == ("--config", "a.yaml", "--batch", "2")


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(RefusalError, match="'names' is not an order of arguments"):
        plan(environment({names.ARGUMENT_ORDER: "names"}))


@pytest.mark.parametrize(
    ("hyperparameter", "variable", "words"),
    [
        (
            "flags",
            "",
            (
                "'flags' is not an argument style (hyperparameter sagemaker_argument_style); did"
                " you mean 'flag'?"
            ),
        ),
        (None, "JSON", "'JSON' is not an argument style (TRAINWORKS_ARGUMENT_STYLE); "),
        (3, "", "3 is not an argument style"),
    ],
)
def test_an_unknown_style_is_refused_with_the_nearest_one(
    hyperparameter: Json, variable: str, words: str
) -> None:
    job_environment = environment(
        {names.ARGUMENT_STYLE: hyperparameter},
        variables={"PATH": "/", names.ARGUMENT_STYLE_VARIABLE: variable},
    )
    with pytest.raises(RefusalError) as refused:
        plan(job_environment)
    assert words in str(refused.value)


def test_an_argument_over_the_kernels_limit_is_refused_with_advice() -> None:
    with pytest.raises(RefusalError) as refused:
        plan(environment({"vocabulary": "x" * 131_072, "b": "ä" * 70_000, "fits": "x" * 131_071}))
    assert len(refused.value.problems) == 2
    text = str(refused.value.problems[1])
    assert text.startswith(
        "its argument has 131,072 bytes, and the kernel takes at most 131,071 (hyperparameter voc"
    )
    assert "set sagemaker_argument_style to 'none'" in text
    assert "SM_HP_VOCABULARY_FILE" in text
    assert "SM_HPS_FILE" in text
    assert (
        plan(environment({"vocabulary": "x" * 131_072, names.ARGUMENT_STYLE: "none"})).argv[2:]
        == ()
    )


@pytest.mark.parametrize(
    ("delivered", "decoded"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ('"it is"', "it is"),
        ("it is", "it is"),
        ("true", True),
        ("True", "True"),
        ("", ""),
    ],
)
def test_the_platform_delivers_strings(delivered: str, decoded: Json) -> None:
    assert decode_values({"x": delivered}) == {"x": decoded}


def test_reserved_names_never_reach_the_script() -> None:
    user, reserved = split_reserved(
        {
            "epochs": 1,
            "sagemaker_anything": 2,
            "_tuning_objective_metric": "m",
            "default_user_module_name": "x",
        }
    )
    assert dict(user) == {"epochs": 1}
    assert set(reserved) == {
        "sagemaker_anything",
        "_tuning_objective_metric",
        "default_user_module_name",
    }


ON: tuple[Json, ...] = (True, "true", "True", 1, "1")
OFF: tuple[Json, ...] = (False, "false", None, "", 0, "0", 2, [])


@pytest.mark.parametrize("value", ON)
def test_what_switches_on(value: Json) -> None:
    assert truth(value) is True


@pytest.mark.parametrize("value", OFF)
def test_what_does_not(value: Json) -> None:
    assert truth(value) is False
