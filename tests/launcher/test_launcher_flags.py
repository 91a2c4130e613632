"""mpirun's options: merged by name, the user wins, nothing stands twice."""

from __future__ import annotations

import shlex
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher_support import environment, plan

from trainworks_launcher.errors import RefusalError
from trainworks_launcher.flags import OPEN_MPI_4, OPEN_MPI_5, Setting, dialect_of, merge, parse_user_options

MPI = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}
OPTIONS = "sagemaker_mpi_custom_mpi_options"
HOSTS = ("algo-1", "algo-2")


def line(options: str, open_mpi: str = "5.0.11") -> tuple[str, ...]:
    return plan(environment({**MPI, OPTIONS: options}, hosts=HOSTS, open_mpi=open_mpi)).argv


def parameters(argv: tuple[str, ...]) -> list[tuple[str, str]]:
    """(name, value) of every MCA parameter of a line, in order, before the program."""
    end = argv.index("/usr/bin/python3")
    options = ("--mca", "-mca", "--gmca", "--prtemca", "--pmixmca")
    return [(argv[i + 1], argv[i + 2]) for i, word in enumerate(argv[:end]) if word in options]


@pytest.mark.parametrize("open_mpi", ["4.1.4", "5.0.11"])
def test_the_documented_default_flag_may_be_repeated(open_mpi: str) -> None:
    argv = line("--mca btl_vader_single_copy_mechanism none", open_mpi)
    assert [name for name, _ in parameters(argv)] == [name for name, _ in parameters(line("", open_mpi))]


def test_a_user_value_wins_over_ours() -> None:
    assert dict(parameters(line("--mca pml ucx")))["pml"] == "ucx"
    assert dict(parameters(line("")))["pml"] == "ob1"


def test_the_same_value_twice_is_said_once() -> None:
    assert parameters(line("--mca btl tcp,self -mca btl tcp,self")).count(("btl", "tcp,self")) == 1


def test_an_old_name_meets_our_new_one() -> None:
    found = dict(parameters(line("--mca oob_tcp_if_include lo")))
    assert found["prte_if_include"] == "lo"
    assert "oob_tcp_if_include" not in found


def test_a_users_exclude_takes_our_include_away() -> None:
    found = dict(parameters(line("--mca btl_tcp_if_exclude docker0")))
    assert found["btl_tcp_if_exclude"] == "docker0"
    assert "btl_tcp_if_include" not in found


def test_binding_and_mapping_are_replaced_not_repeated() -> None:
    argv = line("-bind-to core --map-by ppr:1:node")
    assert argv.count("--bind-to") == 1
    assert argv[argv.index("--bind-to") + 1] == "core"
    assert argv[argv.index("--map-by") + 1] == "ppr:1:node"


def test_exports_keep_their_spaces_and_reach_the_ranks() -> None:
    argv = line("-x GREETING='hello world' --NCCL_DEBUG INFO -x PATH")
    assert "GREETING=hello world" in argv
    assert "NCCL_DEBUG=INFO" in argv
    assert "PATH=/usr/bin:/bin" in argv
    assert argv[argv.index("--keep") + 1] == "PATH,GREETING,NCCL_DEBUG"


def test_a_host_specific_variable_is_not_copied_from_the_leader() -> None:
    made = plan(environment({**MPI, OPTIONS: "-x SM_CURRENT_HOST"}, hosts=HOSTS))
    assert not any(word.startswith("SM_CURRENT_HOST") for word in made.argv)
    assert any("SM_CURRENT_HOST" in warning for warning in made.warnings)


def test_unknown_options_are_passed_on_in_order() -> None:
    argv = line("-verbose --display map --tag-output")
    at = argv.index("-verbose")
    assert argv[at : at + 4] == ("-verbose", "--display", "map", "--tag-output")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("--mca btl tcp --mca btl sm", "MCA parameter btl is given as 'tcp' and as 'sm'"),
        ("--mca oob_tcp_if_include a --mca prte_if_include b", "MCA parameter prte_if_include is given as 'a' and"),
        (
            "--mca btl_tcp_if_include a --mca btl_tcp_if_exclude b",
            "MCA parameters btl_tcp_if_include and btl_tcp_if_ex",
        ),
        ("-x A=1 -x A=2", "-x A is given as '1' and as '2'"),
        ("-x A=1 -x A", "-x A is given with a value and without"),
        ("-x =1", "-x '=1' does not begin with the name of a variable"),
        ("-x -verbose", "-x '-verbose' does not begin with the name of a variable"),
        ("--mca -x PATH", "'-x' is not the name of an MCA parameter"),
        ("-verbose -- train.py", "'--' is no option"),
        ("-x", "-x needs a value"),
        ("--mca btl", "--mca needs a name and a value"),
        ("--bind-to", "--bind-to needs a value"),
        ("--bind-to core --bind-to none", "--bind-to is given as 'core' and as 'none'"),
        ("-np 4", "-np cannot be given here"),
        ("--host a:1", "--host cannot be given here"),
        ("train.py", "'train.py' is no option"),
        ("-x 'A=1", "cannot be split into words: No closing quotation"),
    ],
)
def test_contradictions_are_refused_by_name(options: str, what: str) -> None:
    with pytest.raises(RefusalError) as refused:
        line(options)
    assert any(problem.what.startswith(what) for problem in refused.value.problems), str(refused.value)
    assert all(OPTIONS in problem.where for problem in refused.value.problems)


def test_origins_from_weak_to_strong() -> None:
    rows = [Setting("a", "1", "user"), Setting("a", "2", "default"), Setting("b", "3", "default")]
    rows += [Setting("b", "4", "platform"), Setting("c", "5", "default")]
    assert [(row.name, row.value) for row in merge(rows)] == [("a", "1"), ("b", "4"), ("c", "5")]


@pytest.mark.parametrize(
    ("version", "major"), [("4.1.4", 4), ("5.0.11", 5), ("5.1", 5), ("6.0.0", 5), ("", 4), ("unknown", 4)]
)
def test_the_installed_version_chooses_the_dialect(version: str, major: int) -> None:
    assert dialect_of(version).major == major


@pytest.mark.parametrize(
    ("old", "four", "five"),
    [
        ("plm_rsh_agent", "plm_rsh_agent", "plm_ssh_agent"),
        ("plm_ssh_agent", "plm_rsh_agent", "plm_ssh_agent"),
        ("oob_tcp_if_include", "oob_tcp_if_include", "prte_if_include"),
        ("orte_base_help_aggregate", "orte_base_help_aggregate", "prte_base_help_aggregate"),
        ("btl_vader_eager_limit", "btl_vader_eager_limit", "btl_sm_eager_limit"),
        ("btl", "btl", "btl"),
    ],
)
def test_names_by_dialect(old: str, four: str, five: str) -> None:
    assert (OPEN_MPI_4.canonical(old), OPEN_MPI_5.canonical(old)) == (four, five)


NAMES = st.sampled_from(
    [
        "btl",
        "pml",
        "smsc",
        "btl_tcp_if_include",
        "btl_tcp_if_exclude",
        "oob_tcp_if_include",
        "prte_if_include",
        "plm_rsh_agent",
        "plm_ssh_agent",
        "plm_rsh_no_tree_spawn",
        "orte_abort_on_non_zero_status",
        "btl_vader_single_copy_mechanism",
        "btl_sm_single_copy_mechanism",
        "plm_rsh_num_concurrent",
        "other",
    ]
)
WORDS = st.one_of(
    st.tuples(st.sampled_from(["--mca", "-mca", "--gmca", "--prtemca"]), NAMES, st.sampled_from(["a", "b", "^c d"])),
    st.tuples(st.just("-x"), st.sampled_from(["A=1", "A=2", "B", "PATH", "FI_PROVIDER=tcp", "SM_CURRENT_HOST", "="])),
    st.tuples(st.sampled_from(["--bind-to", "-bind-to", "--map-by"]), st.sampled_from(["core", "none"])),
    st.tuples(st.sampled_from(["-verbose", "--tag-output", "--oversubscribe", "-np", "--mca", "-x", "word", "--"])),
    st.tuples(st.text(max_size=6)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, max_size=8), st.sampled_from(["4.1.4", "5.0.11"]))
def test_no_mca_parameter_stands_twice_whatever_the_user_says(words: list[tuple[str, ...]], open_mpi: str) -> None:
    """And the answer is always a plan or a refusal, never a traceback."""
    options = shlex.join(word for group in words for word in group)
    try:
        argv = line(options, open_mpi)
    except RefusalError:
        return
    dialect = dialect_of(open_mpi)
    names = Counter(dialect.canonical(name) for name, _ in parameters(argv))
    assert not [name for name, count in names.items() if count > 1]
    assert not {"btl_tcp_if_include", "btl_tcp_if_exclude"} <= set(names)
    exports = Counter(argv[i + 1].partition("=")[0] for i, word in enumerate(argv) if word == "-x")
    assert not [name for name, count in exports.items() if count > 1]


def test_every_flag_of_ours_says_why() -> None:
    made = plan(environment(MPI, hosts=HOSTS))
    subjects = " ".join(reason.subject for reason in made.why)
    end = made.argv.index("/usr/bin/python3")
    for word in made.argv[:end]:
        if word.startswith("--") and word not in ("--mca", "--prtemca"):
            assert word in subjects
    for name, _ in parameters(made.argv):
        assert name in subjects
    assert all(reason.why for reason in made.why)


def test_options_are_parsed_without_a_job() -> None:
    options, problems = parse_user_options(("--mca", "btl", "tcp", "-x", "A", "--display", "map"), "here")
    assert problems == []
    assert options.parameters == (("btl", "tcp"),)
    assert options.forwarded == ("A",)
    assert options.rest == ("--display", "map")
