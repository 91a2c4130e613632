"""Test that any files of the platform, variables and options give a well-formed plan, or a refusal
that tells the problem and its place. Never a traceback.

The default run is short. ``TRAINWORKS_FUZZ_EXAMPLES=20000 python -m pytest
launcher/tests/test_launcher_fuzz.py`` goes deeper; every defect that was found so has a test of its
own below.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher_support import INSTANCES, manifest_document

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.environment import PROGRAMS, read_environment
from trainworks_launcher.job.arguments import STYLES
from trainworks_launcher.job.job import make_job
from trainworks_launcher.plan.modes import plan_host
from trainworks_launcher.plan.plan import NodePlan

EXAMPLES = int(os.environ.get("TRAINWORKS_FUZZ_EXAMPLES", "60"))


def words(text: str) -> list[str]:
    return text.split()


ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=12)
"""Text with everything that JSON can carry: NUL, halves of surrogate pairs, right-to-left marks."""

ODD_WORDS = words("""
    a=b - -- ' " $(id) `id` \\ .. / None null true True [] {} NaN Infinity -1 0 1e400
    algo-1 eth0 ßßß 日本 ٣ ² s3://bucket/code.tar.gz""")
LONG = ["9" * 30, "9" * 5000, "[" * 3000, "x" * 300, "a." * 200, '{"a":' * 500 + "1" + "}" * 500]
ODD_TEXT = st.sampled_from(["", " ", "\n", "\0", "\ud800", "\udcff", *ODD_WORDS, *LONG])
TEXT = ODD_TEXT | ANY_TEXT
NUMBER = (
    st.integers()
    | st.sampled_from(
        [0, -1, 10**25, 10**400, 2**63, 1.5, -0.0, 1e308, math.inf, -math.inf, math.nan]
    )
    | st.floats()
)
SCALAR = st.none() | st.booleans() | NUMBER | TEXT
ANY: st.SearchStrategy[Json] = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
DEEP: st.SearchStrategy[Json] = st.sampled_from([80, 101, 150]).map(
    lambda depth: json.loads("[" * depth + "]" * depth)  # more breaks the test's own encoder
)

SWITCHES = [
    f"sagemaker_{name}_enabled"
    for name in words("""
        mpi torch_distributed torch_distribute distributed_dataparallel pytorch_ddp
        pytorch_xla_multi_worker parameter_server multi_worker_mirrored_strategy
        toolkit_native_launcher""")
]
OPTION_WORDS = words("""
    --mca -mca --gmca --prtemca -x --NCCL_DEBUG INFO --bind-to core --map-by ppr:2:node
    -np 4 --host algo-9 -verbose --oversubscribe --tag-output pml ucx btl ^openib
    btl_vader_single_copy_mechanism none btl_tcp_if_include = A btl_tcp_if_exclude
    oob_tcp_if_include orte_abort_on_non_zero_status plm_rsh_agent A=B A=C SM_CURRENT_HOST
    NCCL_DEBUG=WARN -- - --mca=pml=ob1 --prefix /usr -x=A=B @file --app $HOME""")
MPI_WORDS = st.lists(
    st.sampled_from(["", "\0", "\ud800", "a\nb", *OPTION_WORDS]) | TEXT, max_size=8
)
MPI_PHRASES = st.lists(
    st.sampled_from(
        [
            *(
                "--mca pml ucx",
                "--mca btl_vader_single_copy_mechanism none",
                "-x NCCL_DEBUG=INFO",
                "-x PATH",
                "-verbose",
            ),
            *(
                "--mca oob_tcp_if_include eth0",
                "--mca btl_tcp_if_exclude lo",
                "--bind-to core",
                "--NCCL_DEBUG WARN",
            ),
            *(
                "--mca orte_abort_on_non_zero_status 1",
                "-mca pml ucx",
                "-x SM_CURRENT_HOST",
                "-x 'A=b c'",
                "--oversubscribe",
            ),
        ]
    ),
    max_size=5,
)
MPI_OPTIONS = st.one_of(
    MPI_PHRASES.map(" ".join), MPI_WORDS.map(" ".join), MPI_WORDS.map(shlex.join)
)


def as_delivered(values: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    """Values as they are, or as JSON text, which is how the platform delivers them."""
    return values | values.map(json.dumps)


def mostly(
    likely: st.SearchStrategy[Any], odd: st.SearchStrategy[Any] | None = None
) -> st.SearchStrategy[Any]:
    """A plausible value nearly always: with anything everywhere no example
    would get past the first check.
    """
    other = as_delivered(ANY | DEEP) if odd is None else odd
    return st.sampled_from([True] * 24 + [False]).flatmap(
        lambda plausible: likely if plausible else other
    )


NAME = mostly(st.text("abcdefgh-_.XYZ", min_size=1, max_size=8), TEXT)
"""Of a hyperparameter, a channel."""

HOST = mostly(
    st.sampled_from(["algo-1", "algo-2", "algo-3", "10.0.0.1", "a.b.c"]),
    st.sampled_from(["a" * 70, "-x", "a b", "ä", "::1"]) | TEXT,
)
GROUP = st.fixed_dictionaries(
    {"instance_group_name": mostly(st.sampled_from(["one", "two"]))},
    optional={
        "instance_type": mostly(st.sampled_from(sorted(INSTANCES))),
        "hosts": mostly(
            st.lists(st.sampled_from(["algo-1", "algo-2"]), max_size=2), st.lists(HOST)
        ),
    },
)
RESOURCE_CONFIG = st.fixed_dictionaries(
    {
        "hosts": mostly(
            st.lists(HOST, max_size=3).map(lambda more: list(dict.fromkeys(["algo-1", *more])))
        ),
        "current_host": mostly(st.just("algo-1"), HOST),
    },
    optional={
        "current_instance_type": mostly(st.sampled_from([*INSTANCES, "local"])),
        "current_group_name": mostly(st.sampled_from(["one", "two", "three"])),
        "instance_groups": mostly(st.lists(GROUP, max_size=2)),
        "network_interface_name": mostly(st.sampled_from(["lo", "eth0", "ethwe", "x" * 40])),
        "topology": ANY,
    },
)
NESTED = st.recursive(
    st.text("ab ,='\\") | st.integers() | ODD_TEXT.filter(lambda text: len(text) < 9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab=-", max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
"""Lists and objects that become arguments in one style or another."""
DATA_PARALLEL_OPTIONS = "sagemaker_distributed_dataparallel_custom_mpi_options"
PROGRAM = mostly(
    st.sampled_from(["train.py", "run.sh", "tool", "-m package.module"]),
    st.sampled_from(["absent.py", "a/../b.py"]) | ANY,
)
OFTEN = st.fixed_dictionaries(
    {},
    optional={
        names.PROCESSES_PER_HOST: mostly(st.integers(1, 8), st.integers() | ANY),
        names.MPI_PROCESSES: mostly(st.integers(1, 2), st.integers() | ANY),
        names.MPI_OPTIONS: mostly(MPI_OPTIONS),
        DATA_PARALLEL_OPTIONS: mostly(MPI_OPTIONS),
        names.LOG_LEVEL: mostly(st.sampled_from([10, "20", "INFO"])),
        names.ARGUMENT_STYLE: mostly(st.sampled_from([*STYLES])),
        names.JOB_NAME: mostly(st.just("job")),
        names.REGION: mostly(st.just("region")),
        "sagemaker_instance_type": mostly(st.sampled_from(sorted(INSTANCES))),
        "sagemaker_s3_output": mostly(st.just("s3://bucket/output")),
    },
)
RARELY = mostly(
    st.just({}),
    st.fixed_dictionaries(
        {},
        optional={
            names.SUBMIT_DIRECTORY: (
                st.sampled_from(["/nowhere", "/nowhere/x.tar.gz", "s3://b/c.tar.gz", "code"]) | ANY
            ),
            names.DISTRIBUTION_INSTANCE_GROUPS: (
                st.lists(st.sampled_from(["one", "two", "three"]), max_size=3) | ANY
            ),
            names.MODEL_PARALLEL_PARAMETERS: st.just({"partitions": 2}) | ANY,
        },
    ),
)
HYPERPARAMETERS = st.builds(
    lambda program, *parts: {
        names.PROGRAM: program,
        **{name: value for part in parts for name, value in part.items()},
    },
    PROGRAM,
    st.dictionaries(
        NAME,
        mostly(
            st.text("abc xyz'$") | st.integers() | st.booleans() | st.none() | NESTED,
            NESTED | as_delivered(ANY | DEEP),
        ),
        max_size=3,
    ),
    OFTEN,
    RARELY,
    mostly(
        st.just({}), st.dictionaries(st.sampled_from(SWITCHES), mostly(st.booleans()), max_size=2)
    ),
    st.sampled_from(SWITCHES).flatmap(lambda name: st.just({name: True})) | st.just({}),
)
CHANNELS = st.dictionaries(NAME, ANY, max_size=3)

VARIABLE_WORDS = words(
    "0 -1 7777 7780 65536 1e3 nan inf 12 train.py s3://x/y /nowhere true {} { eth0 ٣ ² 1:2 INFO"
)
VARIABLE_TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=12
) | st.sampled_from(["", "\udcff", "a\udc80b", "x" * 5000, '{"a": 1}', *VARIABLE_WORDS])
"""Texts that a process's environment can hold: no NUL.

Bytes that are not UTF-8 are lone surrogates from U+DC80 on.
"""

READ = [
    value
    for name, value in vars(names).items()
    if name.endswith("_VARIABLE")
    and isinstance(value, str)
    and value != names.BASE_DIRECTORY_VARIABLE
]
READ += ["AWS_REGION", "PYTHONPATH", "LD_PRELOAD", "NCCL_DEBUG", "FI_PROVIDER", "PYTHONUNBUFFERED"]
VARIABLES = st.builds(
    lambda *parts: {name: value for part in parts for name, value in part.items()},
    st.dictionaries(
        st.sampled_from([name for name in READ if "SECONDS" in name]), st.just("60"), max_size=2
    ),
    mostly(st.just({}), st.dictionaries(st.sampled_from(READ), VARIABLE_TEXT, max_size=3)),
    mostly(st.just({}), st.dictionaries(st.sampled_from(READ), VARIABLE_TEXT, max_size=1)),
)
BROKEN = [b"", b"[]", b"null", b'"x"', b"{", b"\xef\xbb\xbf{}", b"\xff\xfe{}"]
BROKEN += [b"[" * 200_000, b'{"a":' * 3000, b"9" * 5000]
WHOLE_FILE: st.SearchStrategy[bytes | None] = (
    st.none() | st.binary(max_size=20) | st.sampled_from(BROKEN)
)
"""A file with wrong content; None is an absent one."""

TRAINER_NAMES = (names.SOURCE_CODE_FILE, names.DISTRIBUTED_FILE)
MAPPINGS = {
    names.HYPERPARAMETERS_FILE: HYPERPARAMETERS,
    names.RESOURCE_CONFIG_FILE: RESOURCE_CONFIG,
    names.INPUT_DATA_CONFIG_FILE: CHANNELS,
}
FILES = st.fixed_dictionaries(
    {
        name: mostly(strategy.map(lambda document: json.dumps(document).encode()), WHOLE_FILE)
        for name, strategy in MAPPINGS.items()
    }
)


# ModelTrainer's files, which are the job where no program is named.
SOURCE_CODE = st.fixed_dictionaries(
    {},
    optional={
        "entry_script": mostly(st.sampled_from(["train.py", "./train.py", "run.sh", "absent.py"])),
        "command": mostly(st.sampled_from(["train", "python3 train.py", "echo 'a'", ""])),
        "args": mostly(st.lists(TEXT | NUMBER, max_size=3)),
        "source_dir": mostly(
            st.sampled_from(["src", "src.tar.gz", "s3://bucket/x.tar.gz", "../up"])
        ),
        "requirements": mostly(st.sampled_from(["requirements.txt", "auto", "./more.txt"])),
    },
)
DISTRIBUTED = st.fixed_dictionaries(
    {},
    optional={
        "smp": st.none() | ANY,
        "mpi_additional_options": mostly(MPI_WORDS),
        "process_count_per_node": mostly(st.integers(1, 4), ANY),
    },
)
TRAINER_FILES = st.fixed_dictionaries(
    {
        name: mostly(strategy.map(lambda document: json.dumps(document).encode()), WHOLE_FILE)
        for name, strategy in {
            names.SOURCE_CODE_FILE: SOURCE_CODE,
            names.DISTRIBUTED_FILE: DISTRIBUTED,
        }.items()
    }
)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory with code, programs that can be found, and an image manifest."""
    base = tmp_path_factory.mktemp("fuzz")
    for directory in ("input/config", "input/data/sm_drivers", "code/package", "programs"):
        (base / directory).mkdir(parents=True)
    for name in ("train.py", "run.sh", "package/module.py", "requirements.txt"):
        (base / "code" / name).write_text("", encoding="utf-8")
    shutil.copytree(base / "code", base / "input/data/code")
    for path in (
        base / "code/tool",
        *(base / "programs" / name for name in (*PROGRAMS, "nvidia-smi")),
    ):
        # Executable, and not a program: a start of it is an OSError.
        path.write_text("", encoding="utf-8")
        path.chmod(0o755)
    document = manifest_document() | {"programs": {}}
    (base / "image.json").write_text(json.dumps(document), encoding="utf-8")
    return base


def outcome(
    base: Path, files: Mapping[str, bytes | None], variables: Mapping[str, str]
) -> list[NodePlan] | RefusalError:
    """The plans of every host of the job, or the refusal."""
    for name, content in {**dict.fromkeys(TRAINER_NAMES), **files}.items():
        if content is None:
            (base / name).unlink(missing_ok=True)
        else:
            (base / name).write_bytes(content)
    shutil.rmtree(base / "output", ignore_errors=True)
    host_variables = {
        "PATH": str(base / "programs"),
        names.IMAGE_MANIFEST_VARIABLE: str(base / "image.json"),
        **variables,
    }
    environment = read_environment({**host_variables, names.BASE_DIRECTORY_VARIABLE: str(base)})
    try:
        job = make_job(environment)
        return [
            plan_host(make_job(environment, host))
            for host in (job.placement.host, *job.placement.hosts)
        ]
    except RefusalError as refusal:
        return refusal


def repeated(plan: NodePlan) -> list[tuple[str, str]]:
    """MCA parameters and exported variables that mpirun is given more than once."""
    options = (("-x",), ("--mca",), ("--prtemca",), ("--pmixmca",))
    rows = [reason.words for reason in plan.why if reason.words[:1] in options]
    heard = [(option, value.split("=")[0]) for option, value, *_ in rows]
    return sorted({name for name in heard if heard.count(name) > 1})


def assert_well_formed(plan: NodePlan) -> None:
    for word in (
        *plan.argv,
        *plan.needs,
        *plan.requirements,
        plan.cwd,
        *plan.env,
        *plan.env.values(),
    ):
        assert isinstance(word, str)
        assert "\0" not in word
        os.fsencode(word)
    assert [name for name in plan.env if not name or "=" in name] == []
    assert plan.argv or plan.role == "worker"
    assert repeated(plan) == []
    assert json.loads(plan.to_json().encode("utf-8"))["host"] == plan.host
    for text in (*plan.warnings, *(reason.why for reason in plan.why)):
        assert text.encode("utf-8")


def assert_plan_or_clear_refusal(result: list[NodePlan] | RefusalError) -> None:
    if isinstance(result, RefusalError):
        assert result.problems
        assert result.status == names.EXIT_NOT_STARTED
        for problem in result.problems:
            assert problem.what.strip()
            assert problem.where.strip()
            assert len(str(problem)) < 1200, "a person is to read it"
        assert str(result).encode("utf-8")
        return
    for plan in result:
        assert_well_formed(plan)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
@given(input_files=FILES, variables=VARIABLES)
def test_any_input_is_a_plan_or_a_clear_refusal(
    machine: Path, input_files: Mapping[str, bytes | None], variables: Mapping[str, str]
) -> None:
    assert_plan_or_clear_refusal(outcome(machine, input_files, variables))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(options=MPI_OPTIONS, hosts=st.integers(1, 3))
def test_any_mpi_options_are_a_plan_or_a_clear_refusal(
    machine: Path, options: str, hosts: int
) -> None:
    config: dict[str, Json] = {
        "current_host": "algo-1",
        "hosts": [f"algo-{number + 1}" for number in range(hosts)],
    }
    hyperparameters: dict[str, Json] = {names.MPI_ENABLED: "true", names.MPI_OPTIONS: options}
    assert_plan_or_clear_refusal(outcome(machine, files(hyperparameters, config), {}))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(input_files=TRAINER_FILES, config=RESOURCE_CONFIG, style=st.sampled_from([*STYLES, ""]))
def test_any_files_of_model_trainer_are_a_plan_or_a_clear_refusal(
    machine: Path, input_files: Mapping[str, bytes | None], config: dict[str, Json], style: str
) -> None:
    hyperparameters: dict[str, Json] = {names.PROGRAM: "", names.ARGUMENT_STYLE: style, "epochs": 3}
    assert_plan_or_clear_refusal(
        outcome(machine, {**files(hyperparameters, config), **input_files}, {})
    )


# --- findings, each by name -----------------------------------------------------------------------
def files(
    hyperparameters: Mapping[str, Json], config: Mapping[str, Json] | None = None
) -> dict[str, bytes | None]:
    return {
        names.HYPERPARAMETERS_FILE: (
            json.dumps({names.PROGRAM: "train.py", **hyperparameters}).encode()
        ),
        names.RESOURCE_CONFIG_FILE: None if config is None else json.dumps(config).encode(),
        names.INPUT_DATA_CONFIG_FILE: None,
    }


def test_a_variable_that_is_not_utf_8_is_passed_on_and_shown(machine: Path) -> None:
    plans_or_refusal = outcome(machine, files({}), {"PYTHONPATH": "/b\udcff"})
    assert isinstance(plans_or_refusal, list)
    assert plans_or_refusal[0].env["PYTHONPATH"].endswith(":/b\udcff"), (
        "the script gets the bytes as they are"
    )
    assert json.loads(plans_or_refusal[0].to_json().encode("utf-8"))["env"]["PYTHONPATH"].endswith(
        ":/b\udcff"
    )


def test_a_refusal_that_quotes_what_is_not_utf_8_can_be_written(machine: Path) -> None:
    plans_or_refusal = outcome(machine, files({}), {names.IMAGE_MANIFEST_VARIABLE: "/b\udcff"})
    assert isinstance(plans_or_refusal, RefusalError)
    assert b"/b\\udcff" in str(plans_or_refusal).encode("utf-8")


def test_a_refusal_shows_both_ends_of_a_long_value(machine: Path) -> None:
    plans_or_refusal = outcome(machine, files({names.LOG_LEVEL: "x" * 100_000}), {})
    assert isinstance(plans_or_refusal, RefusalError)
    assert "'xxxx" in str(plans_or_refusal)
    assert "xxxx' is not a log level" in str(plans_or_refusal)


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 100_000, b"[" * 150 + b"]" * 150])
def test_a_file_that_is_nested_too_deep_is_refused(machine: Path, content: bytes) -> None:
    plans_or_refusal = outcome(machine, {**files({}), names.RESOURCE_CONFIG_FILE: content}, {})
    assert "resourceconfig.json); the platform writes this file as JSON" in str(plans_or_refusal)
    assert "cannot be read" in str(plans_or_refusal)


def test_a_hyperparameter_that_is_nested_too_deep_is_the_text_that_it_is(machine: Path) -> None:
    plans_or_refusal = outcome(machine, files({"x": "[" * 5000}), {})
    assert isinstance(plans_or_refusal, list)
    assert plans_or_refusal[0].argv[-2:] == ("-x", "[" * 5000)


@pytest.mark.parametrize(
    "location", ["/code\0.tar.gz", "/code\ud800.tar.gz", "/code\0", "/code\ud800"]
)
def test_a_code_location_that_cannot_be_a_path_is_refused(machine: Path, location: str) -> None:
    plans_or_refusal = outcome(machine, files({names.SUBMIT_DIRECTORY: location}), {})
    assert isinstance(plans_or_refusal, RefusalError)
    assert [problem.where for problem in plans_or_refusal.problems] == [
        f"hyperparameter {names.SUBMIT_DIRECTORY}"
    ]


def test_a_host_that_cannot_be_looked_up_does_not_stop_the_search_for_an_interface(
    machine: Path,
) -> None:
    hosts = ["a" * 70, "algo-2"]
    config: dict[str, Json] = {
        "current_host": "algo-2",
        "hosts": [*hosts],
        "network_interface_name": "absent0",
    }
    plans_or_refusal = outcome(machine, files({}, config), {})
    assert not isinstance(plans_or_refusal, RefusalError), plans_or_refusal
    assert any(
        "the network interface 'absent0' does not exist on this host" in warning
        for warning in plans_or_refusal[0].warnings
    )


def test_a_host_name_with_a_nul_is_refused_where_an_interface_is_looked_for(machine: Path) -> None:
    config: dict[str, Json] = {
        "current_host": "algo-1",
        "hosts": ["algo\0"],
        "network_interface_name": "absent0",
    }
    plans_or_refusal = outcome(machine, files({}, config), {})
    assert isinstance(plans_or_refusal, RefusalError)
    assert plans_or_refusal.problems[0].what == "'hosts' has a NUL character"


@pytest.mark.parametrize(
    "field",
    [{"args": ["a\0b"]}, {"args": ["\ud800"]}, {"requirements": "a\0b"}, {"command": "a\0b"}],
)
def test_what_no_program_can_be_given_is_refused_in_model_trainers_files_too(
    machine: Path, field: dict[str, Json]
) -> None:
    source: dict[str, Json] = {
        "entry_script": "train.py",
        "source_dir": "src",
        "command": "python3 train.py",
        **field,
    }
    input_files = {
        **files({names.PROGRAM: ""}),
        names.SOURCE_CODE_FILE: json.dumps(source).encode(),
    }
    plans_or_refusal = outcome(machine, input_files, {})
    assert isinstance(plans_or_refusal, RefusalError)
    assert plans_or_refusal.problems[0].where == names.SOURCE_CODE_FILE
    assert plans_or_refusal.problems[0].advice == "leave it out"
