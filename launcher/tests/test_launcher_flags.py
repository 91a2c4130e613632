"""mpirun's options: merged by name, the user wins, nothing stands twice."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launcher_support import environment, plan

from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.mpirun.dialects import (
    FOREIGN,
    KEYED,
    OPEN_MPI_4,
    OPEN_MPI_5,
    OURS,
    dialect_of,
)
from trainworks_launcher.mpirun.flags import Setting, merge, parse_user_options

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


def exports(argv: tuple[str, ...]) -> list[str]:
    """Yield the word behind each -x."""
    return [argv[i + 1] for i, word in enumerate(argv) if word == "-x"]


@pytest.mark.parametrize("open_mpi", ["4.1.4", "5.0.11"])
def test_the_documented_default_flag_may_be_repeated(open_mpi: str) -> None:
    argv = line("--mca btl_vader_single_copy_mechanism none", open_mpi)
    assert [name for name, _ in parameters(argv)] == [
        name for name, _ in parameters(line("", open_mpi))
    ]
    job_environment = environment(
        {**MPI, OPTIONS: "--mca btl_vader_single_copy_mechanism none"},
        hosts=HOSTS,
        open_mpi=open_mpi,
    )
    assert plan(job_environment).warnings == ()


def test_a_user_value_wins_over_ours() -> None:
    assert dict(parameters(line("--mca pml ucx")))["pml"] == "ucx"
    assert dict(parameters(line("")))["pml"] == "ob1"


def test_the_same_value_twice_is_said_once() -> None:
    assert parameters(line("--mca btl tcp,self -mca btl tcp,self")).count(("btl", "tcp,self")) == 1


def test_an_old_name_meets_our_new_one() -> None:
    found_parameters = dict(parameters(line("--mca oob_tcp_if_include lo")))
    assert found_parameters["prte_if_include"] == "lo"
    assert "oob_tcp_if_include" not in found_parameters


def test_a_users_exclude_takes_our_include_away() -> None:
    values_by_name = dict(parameters(line("--mca btl_tcp_if_exclude docker0")))
    assert values_by_name["btl_tcp_if_exclude"] == "docker0"
    assert "btl_tcp_if_include" not in values_by_name


def test_binding_and_mapping_are_replaced_not_repeated() -> None:
    argv = line("-bind-to core --map-by ppr:1:node")
    assert argv.count("--bind-to") == 1
    assert argv[argv.index("--bind-to") + 1] == "core"
    assert argv[argv.index("--map-by") + 1] == "ppr:1:node"


def test_exports_keep_their_spaces_and_reach_the_ranks() -> None:
    argv = line("-x GREETING='hello world' --NCCL_DEBUG INFO -x PATH")
    assert exports(argv) == ["PATH", "GREETING=hello world", "NCCL_DEBUG=INFO"]
    assert argv[argv.index("--keep") + 1] == "PATH,GREETING,NCCL_DEBUG"


def test_a_secret_that_is_exported_by_name_stands_on_no_command_line() -> None:
    secret = {
        "PATH": "/bin",
        "API_KEY": "do-not-show",
        "API_URL": "https://example.org",
        "OTHER": "1",
    }
    for options in ("-x API_KEY -x API_URL", "-x 'API_*'"):
        node_plan = plan(environment({**MPI, OPTIONS: options}, hosts=HOSTS, variables=secret))
        assert exports(node_plan.argv) == ["API_KEY", "API_URL"]
        assert "do-not-show" not in node_plan.to_json()


def test_a_list_of_variables_is_the_same_as_exporting_each() -> None:
    argv = line("--mca mca_base_env_list 'A=1;PATH' -x B=2")
    assert exports(argv) == ["PATH", "A=1", "B=2"]
    assert "mca_base_env_list" not in argv


def test_what_is_not_set_or_differs_by_host_is_not_exported() -> None:
    node_plan = plan(
        environment(
            {**MPI, OPTIONS: "-x NOT_SET -x SM_CURRENT_HOST -x NCCL_SOCKET_IFNAME"}, hosts=HOSTS
        )
    )
    assert exports(node_plan.argv) == []
    assert node_plan.warnings == ("left out -x NOT_SET: it is not set",)
    left_out = [
        reason.subject for reason in node_plan.why if reason.subject.startswith("left out ")
    ]
    assert left_out == ["left out -x SM_CURRENT_HOST", "left out -x NCCL_SOCKET_IFNAME"]


def test_other_options_are_passed_on_in_order_with_their_values() -> None:
    argv = line("-verbose --display map -timeout 60 --tag-output")
    at = argv.index("--verbose")
    assert argv[at : at + 6] == ("--verbose", "--display", "map", "--timeout", "60", "--tag-output")
    quiet = line("-q")
    assert ("-q" in quiet, "--q" in quiet) == (True, False)


@pytest.mark.parametrize(
    ("options", "four", "five"),
    [
        (
            "-bind-to core -map-by node",
            "--bind-to core --map-by node",
            "--bind-to core --map-by node",
        ),
        ("-npernode 2", "--bind-to none --map-by ppr:2:node", "--bind-to none --map-by ppr:2:node"),
        (
            "-N 2 --oversubscribe",
            "--map-by ppr:2:node --oversubscribe",
            "--map-by ppr:2:node --oversubscribe",
        ),
        ("--npersocket 1", "--map-by ppr:1:socket", "--map-by ppr:1:package"),
        ("--bind-to-socket", "--bind-to socket", "--bind-to package"),
        ("--bynode", "--map-by node", "--map-by node"),
        ("--cpus-per-proc 4", "--map-by slot:PE=4", "--map-by slot:PE=4"),
        ("--map-by=slot:PE=4", "--map-by slot:PE=4", "--map-by slot:PE=4"),
        ("-rank-by slot", "--map-by slot --rank-by slot", "--map-by slot --rank-by slot"),
        ("--rankfile ranks", "--rankfile ranks", "--rankfile ranks"),
    ],
)
def test_options_for_placing_are_said_as_the_installed_mpirun_takes_them(
    options: str, four: str, five: str
) -> None:
    for open_mpi, expected in (("4.1.4", four), ("5.0.11", five)):
        argv = line(options, open_mpi)
        assert f" {expected} " in f" {' '.join(argv)} "
        assert argv.count("--map-by") == (0 if "rankfile" in options else 1)
        assert argv.count("--bind-to") == (0 if "rankfile" in options or "PE=" in expected else 1)


def test_a_placement_that_is_given_as_a_parameter_takes_ours_away() -> None:
    argv = line("--mca rmaps_base_mapping_policy node --mca hwloc_base_binding_policy core")
    assert "--map-by" not in argv
    assert "--bind-to" not in argv
    values_by_name = dict(parameters(argv))
    assert values_by_name["rmaps_default_mapping_policy"] == "node"
    assert values_by_name["hwloc_default_binding_policy"] == "core"


def test_a_parameter_keeps_the_class_that_the_user_gave_it() -> None:
    assert "--pmixmca gds hash" in " ".join(line("--pmixmca gds hash"))
    assert "--mca gds hash" in " ".join(line("--pmixmca gds hash", "4.1.4"))


def test_the_containers_environment_wins_over_ours_and_the_options_over_it() -> None:
    variables = {
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_btl_tcp_if_exclude": "docker0",
        "OMPI_MCA_oob_tcp_if_include": "eth1",
    }
    node_plan = plan(environment(MPI, hosts=HOSTS, variables=variables))
    values_by_name = dict(parameters(node_plan.argv))
    assert values_by_name["pml"] == "ucx"
    assert values_by_name["prte_if_include"] == "eth1"
    assert "btl_tcp_if_include" not in values_by_name
    assert [reason.origin for reason in node_plan.why if reason.subject == "--mca pml"] == [
        Origin.IMAGE
    ]
    node_plan = plan(
        environment({**MPI, OPTIONS: "--mca pml cm"}, hosts=HOSTS, variables=variables)
    )
    assert dict(parameters(node_plan.argv))["pml"] == "cm"


def test_an_unknown_option_is_passed_on_with_a_warning() -> None:
    node_plan = plan(
        environment({**MPI, OPTIONS: "--reprot-bindings --newer-option a b -q"}, hosts=HOSTS)
    )
    argv = " ".join(node_plan.argv)
    assert "--reprot-bindings --newer-option a b -q " in argv
    assert "did you mean 'report-bindings'?" in node_plan.warnings[0]
    assert [
        warning.split(" is not a known option of Open MPI ")[0] for warning in node_plan.warnings
    ] == [
        "--reprot-bindings",
        "--newer-option",
        "-q",
    ]


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ("--mca btl tcp --mca btl sm", "MCA parameter btl is given as 'tcp' and as 'sm'"),
        (
            "--mca oob_tcp_if_include a --mca prte_if_include b",
            "MCA parameter prte_if_include is given as 'a' and",
        ),
        (
            "--mca btl_tcp_if_include a --mca btl_tcp_if_exclude b",
            "MCA parameters btl_tcp_if_include and btl_tcp_if_ex",
        ),
        ("-x A=1 -x A=2", "-x A is given as '1' and as '2'"),
        ("-x A=1 -x A", "-x A is given with a value and without"),
        ("-x =1", "-x '=1' does not begin with the name of a variable"),
        ("-x -verbose", "-x '-verbose' does not begin with the name of a variable"),
        ("--mca -x PATH", "'-x' is not the name of an MCA parameter"),
        ("-verbose -- train.py", "'--' is not an option"),
        ("-x", "-x needs a value"),
        ("--mca btl", "--mca needs a name and a value"),
        ("--bind-to", "--bind-to needs a value"),
        ("-x A='\0'", "a word has a NUL character"),
        ("--bind-to= --map-by slot", "--bind-to= needs a value"),
        ("--bind-to core --bind-to none", "--bind-to is given as 'core' and as 'none'"),
        ("-np 4", "-np cannot be given"),
        ("--host a:1", "--host cannot be given"),
        ("train.py", "'train.py' is not an option"),
        ("-verbose train.py", "'train.py' is not an option"),
        ("--display map train.py", "'train.py' is not an option"),
        ("-x A=1 B=2", "'B=2' is not an option"),
        ("--mca btl=tcp self", "'btl=tcp' is not the name of an MCA parameter"),
        ("--npernode 2 --map-by slot", "--map-by is given as 'ppr:2:node' and as 'slot'"),
        ("--npernode", "--npernode needs a value"),
        ("--timeout", "--timeout needs a value"),
        ("--tag-output=yes", "--tag-output=yes has a value"),
        ("--version", "--version cannot be given"),
        ("--do-not-launch", "--do-not-launch cannot be given"),
        ("--wdir /tmp", "--wdir cannot be given"),
        ("-genv A 1", "-genv is an option of MPICH"),
        ("-ppn 8", "-ppn is an option of MPICH"),
        ("-x TRAINWORKS_CONTROL_PORT=1", "-x TRAINWORKS_CONTROL_PORT is a setting of the launcher"),
        ("-x 'A=1", "cannot be split into words: No closing quotation"),
    ],
)
def test_contradictions_are_refused_by_name(options: str, subject: str) -> None:
    with pytest.raises(RefusalError) as refused:
        line(options)
    assert any(problem.what.startswith(subject) for problem in refused.value.problems), str(
        refused.value
    )
    assert all(OPTIONS in problem.where for problem in refused.value.problems)


def test_origins_from_weak_to_strong() -> None:
    rows = [
        Setting("a", "1", Origin.USER),
        Setting("a", "2", Origin.DEFAULT),
        Setting("b", "3", Origin.DEFAULT),
    ]
    rows += [Setting("b", "4", Origin.PLATFORM), Setting("c", "5", Origin.DEFAULT)]
    assert [(row.name, row.value) for row in merge(rows)] == [("a", "1"), ("b", "4"), ("c", "5")]


@pytest.mark.parametrize(
    ("version", "major"),
    [("4.1.4", 4), ("5.0.11", 5), ("5.1", 5), ("6.0.0", 5), ("", 4), ("unknown", 4)],
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
ALL_OPTIONS = sorted({*OPEN_MPI_4.options, *OPEN_MPI_5.options, *FOREIGN, *OURS})
WORDS = st.one_of(
    st.tuples(
        st.sampled_from(["--mca", "-mca", "--gmca", "--prtemca"]),
        NAMES,
        st.sampled_from(["a", "b", "^c d"]),
    ),
    st.tuples(
        st.just("-x"),
        st.sampled_from(["A=1", "A=2", "B", "PATH", "FI_PROVIDER=tcp", "SM_CURRENT_HOST", "="]),
    ),
    st.tuples(
        st.sampled_from(["--bind-to", "-bind-to", "--map-by"]), st.sampled_from(["core", "none"])
    ),
    st.tuples(
        st.sampled_from(
            ["-verbose", "--tag-output", "--oversubscribe", "-np", "--mca", "-x", "word", "--"]
        )
    ),
    st.tuples(
        st.sampled_from(ALL_OPTIONS), st.sampled_from(["-", "--"]), st.sampled_from(["", "=v", "="])
    ).map(lambda parts: (parts[1] + parts[0] + parts[2],)),
    st.tuples(st.text(max_size=6)),
)


def options_in(argv: Sequence[str], argument_counts: Mapping[str, int]) -> Iterator[str]:
    """Yield the options of a command line: ``-am --oversubscribe`` is a file of
    that name, and no option.
    """
    words = iter(argv)
    for word in words:
        yield word
        for _ in range(argument_counts.get(word.lstrip("-"), 0)):
            next(words, None)


@settings(max_examples=100, deadline=None)
@example([("--oversubscribe",), ("--mca", "v", "--oversubscribe")], "4.1.4")
@given(st.lists(WORDS, max_size=8), st.sampled_from(["4.1.4", "5.0.11"]))
def test_no_mca_parameter_stands_twice_whatever_the_user_says(
    words: list[tuple[str, ...]], open_mpi: str
) -> None:
    """Get always a plan or a refusal, never a traceback."""
    options = shlex.join(word for group in words for word in group)
    try:
        argv = line(options, open_mpi)
    except RefusalError:
        return
    dialect = dialect_of(open_mpi)
    names = Counter(dialect.canonical(name) for name, _ in parameters(argv))
    assert not [name for name, count in names.items() if count > 1]
    assert not {"btl_tcp_if_include", "btl_tcp_if_exclude"} <= set(names)
    exported = Counter(export.partition("=")[0] for export in exports(argv))
    assert not [name for name, count in exported.items() if count > 1]
    ours = argv[: argv.index("/usr/bin/python3")]
    option_counts = Counter(options_in(ours, dialect.options))
    assert not [option for option, _ in KEYED.values() if option_counts[f"--{option}"] > 1]
    assert argv == line(options, open_mpi)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(NAMES, st.sampled_from(["a", "b"]), max_size=6),
    st.sampled_from(["4.1.4", "5.0.11"]),
)
def test_what_the_user_says_is_what_stands_there_in_the_users_order(
    user_parameters: dict[str, str], open_mpi: str
) -> None:
    options = shlex.join(word for pair in user_parameters.items() for word in ("--mca", *pair))
    dialect = dialect_of(open_mpi)
    try:
        all_parameters = parameters(line(options, open_mpi))
    except RefusalError:
        return
    expected_parameters = {
        dialect.canonical(name): value
        for name, value in user_parameters.items()
        if name not in dialect.gone
    }
    assert expected_parameters.items() <= dict(all_parameters).items()
    ours = [name for name, _ in parameters(line("", open_mpi))]
    assert [name for name, _ in all_parameters] == [
        *(name for name in ours if name in dict(all_parameters)),
        *(name for name in expected_parameters if name not in ours),
    ]


@pytest.mark.parametrize(
    ("hostname", "shim", "open_mpi", "resolves"),
    [
        ("algo-1", "", "5.0.11", False),
        ("aws", "/lib/shim.so", "5.0.11", False),
        ("aws", "", "4.1.4", False),
        ("aws", "", "5.0.11", True),
    ],
)
def test_a_host_with_a_wrong_name_and_no_shim_is_known_by_its_address(
    hostname: str, shim: str, open_mpi: str, resolves: bool
) -> None:
    job_environment = environment(MPI, hosts=HOSTS, open_mpi=open_mpi)
    argv = plan(job_environment._replace(hostname=hostname, hostname_shim=shim)).argv
    assert (("prte_do_not_resolve", "0") in parameters(argv)) is resolves


def test_every_flag_of_ours_says_why() -> None:
    node_plan = plan(environment(MPI, hosts=HOSTS))
    subjects = " ".join(reason.subject for reason in node_plan.why)
    end = node_plan.argv.index("/usr/bin/python3")
    for word in node_plan.argv[:end]:
        if word.startswith("--") and word not in ("--mca", "--prtemca"):
            assert word in subjects
    for name, _ in parameters(node_plan.argv):
        assert name in subjects
    assert all(reason.why for reason in node_plan.why)


def test_options_are_parsed_without_a_job() -> None:
    options, problems = parse_user_options(
        ("--mca", "btl", "tcp", "-x", "A", "--display", "map"), OPEN_MPI_5, "here"
    )
    assert problems == []
    assert options.parameters == (("btl", "tcp", ""),)
    assert options.forwarded == ("A",)
    assert options.rest == ("--display", "map")
