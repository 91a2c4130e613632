"""The command lines that we write, started by the real mpirun of both lines of Open MPI.

Marked ``engine``. Open MPI 5 comes from TRAINWORKS_TEST_PREFIX, Open MPI 4 from the distribution's
package (mpirun on the system's PATH). A test whose program is missing is skipped with its name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_network import (
    NAMES,
    PREFIX,
    Network,
    engine_manifest,
    job_on,
    network_of,
    two_hosts,
    two_namespaces,
)
from launcher_pods import write_stand_ins
from launcher_support import LAUNCHER, TIME_OUT, environment, plan, write_manifest

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.mpirun.dialects import (
    MCA_OPTIONS,
    OPEN_MPI_4,
    OPEN_MPI_5,
    Dialect,
    dialect_of,
)

pytestmark = pytest.mark.engine

DIALECTS = (OPEN_MPI_4, OPEN_MPI_5)
MPI: dict[str, Json] = {"sagemaker_mpi_enabled": "true"}
OPTIONS = "sagemaker_mpi_custom_mpi_options"
COMPLAINTS = re.compile(
    r"deprecat|not found|ignored|unknown|unrecognized|could not|warning|error", re.IGNORECASE
)
RANK = """
import os

rank, size = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
line = "rank " + rank + " of " + size + chr(10)
os.write(1, line.encode())
"""


def mpirun(dialect: Dialect) -> tuple[str, str]:
    """(path, version) of the real program of a dialect; skips if it is not here."""
    candidates = [
        str(PREFIX / "bin" / "mpirun"),
        shutil.which("mpirun", path="/usr/bin:/usr/local/bin") or "",
    ]
    for candidate in filter(os.path.exists, candidates):
        result = subprocess.run(
            (candidate, "--version"), capture_output=True, text=True, timeout=TIME_OUT, check=True
        )
        match = re.search(r"Open MPI\)? v?(\d+\.\d+\.\d+)", result.stdout)
        if match and dialect_of(match.group(1)) is dialect:
            return candidate, match.group(1)
    pytest.skip(f"no mpirun of Open MPI {dialect.major} is here (TRAINWORKS_TEST_PREFIX={PREFIX})")


def start(words: tuple[str, ...], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one mpirun to its end, as root."""
    allowed = {
        **os.environ,
        **variables,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=TIME_OUT,
        check=False,
        env=allowed,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
def test_the_table_of_options_is_that_of_the_real_program(dialect: Dialect) -> None:
    """Put an option at the end of the line: the complaint says how many words it takes."""
    path, _ = mpirun(dialect)
    wrong = []
    # These print or wait beside any other option. 5.0 dies of a signal where some options lack
    # their words, and calls a letter unknown that lacks its value.
    left_out = {"h", "help", "V", "version", "dvm"} | (MCA_OPTIONS - {"mca", "prtemca", "pmixmca"})
    if dialect.major == 5:
        left_out |= {"amca"} | {
            option for option, count in dialect.options.items() if len(option) == 1 and count == 1
        }
    for option, count in sorted(dialect.options.items()):
        if option in left_out:
            continue
        dashed = f"-{option}" if len(option) == 1 else f"--{option}"
        result = start((path, "--host", "localhost:1", "-np", "1", dashed))
        text = " ".join((result.stdout + result.stderr).split())
        needs = re.search(r"did not have enough parameters \((\d)\)", text)
        if needs:
            arguments = int(needs.group(1))
        elif "requires passing two values" in text:
            arguments = 2
        elif "requires an argument" in text:
            arguments = 1
        elif re.search("unknown option|[Uu]nrecognized option", text):
            arguments = -1
        else:
            arguments = 0
        if arguments != count:
            wrong.append((option, count, arguments, text[:160]))
    assert not wrong


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
@pytest.mark.parametrize(
    "options",
    [
        "",
        "-verbose -x NCCL_DEBUG=VERSION",
        "--mca btl_vader_single_copy_mechanism none",
        "--mca btl_vader_single_copy_mechanism none -verbose --NCCL_DEBUG=INFO",
        "-x FI_EFA_USE_DEVICE_RDMA=1 -x FI_PROVIDER=efa -x RDMAV_FORK_SAFE=1",
        (
            "-bind-to none -map-by slot -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH -x PATH -mca pml ob1"
            " -mca btl ^openib"
        ),
        (
            "-x HOROVOD_HIERARCHICAL_ALLREDUCE=1 -x HOROVOD_FUSION_THRESHOLD=16777216 -x"
            " orte_base_help_aggregate=0"
        ),
        "--mca btl_openib_want_fork_support 1 --mca btl_tcp_if_exclude lo,docker0",
        (
            "-mca orte_abort_on_non_zero_status 1 -mca plm_rsh_no_tree_spawn 1 -mca"
            " plm_rsh_num_concurrent 2"
        ),
        "--mca orte_base_help_aggregate 0 --mca btl_base_verbose 0",
        "--mca mca_base_env_list 'A=1;B=2' -x C=3",
        "--gmca btl tcp,self --mca btl tcp,self",
        "--oversubscribe -x 'GREETING=hello; world'",
        "--bind-to core:overload-allowed --report-bindings",
        "-npernode 2",
        "-N 2 --timeout 50",
        "--pernode -x A=1",
        "--bynode --rank-by slot",
        "--byslot",
        "--ppr 2:node",
        "--map-by ppr:2:node --rank-by slot",
        "--map-by=slot:PE=1",
        "--cpus-per-proc 1",
        "--bind-to-core",
        "--mca rmaps_base_mapping_policy node --mca hwloc_base_binding_policy core",
        "--mca rmaps_base_oversubscribe 1",
        "--display-map --tag-output",
        "--stdin none --leave-session-attached",
    ],
)
def test_two_ranks_start_without_a_complaint(options: str, dialect: Dialect) -> None:
    """Start our options, and those of users: in the documents of SageMaker and of Horovod, and for
    other lines of Open MPI.
    """
    path, version = mpirun(dialect)
    per_host = 1 if "pernode -x" in options else 2
    hyperparameters = {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": per_host,
    }
    node_plan = plan(environment({**hyperparameters, OPTIONS: options}, open_mpi=version))
    wrapper = next(at for at, word in enumerate(node_plan.argv) if word.endswith("/rank.py")) - 2
    result = start((path, *node_plan.argv[1:wrapper], sys.executable, "-c", RANK))
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(per_host):
        assert f"rank {rank} of {per_host}" in result.stdout
    assert not COMPLAINTS.search(result.stderr), result.stderr


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
def test_a_world_that_is_smaller_than_the_plan_is_refused(tmp_path: Path, dialect: Dialect) -> None:
    """Start fewer ranks than planned, by the number on mpirun's line."""
    path, version = mpirun(dialect)
    (tmp_path / "environment.json").write_text(
        json.dumps({"env": dict(os.environ), "cwd": str(tmp_path)})
    )
    hyperparameters = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 3}
    node_plan = plan(environment(hyperparameters, open_mpi=version))
    for count, status in ((2, 66), (3, 0)):
        at = node_plan.argv.index("-np") + 1
        wrapper = (
            next(at for at, word in enumerate(node_plan.argv) if word.endswith("/rank.py")) - 2
        )
        end = node_plan.argv.index("--", wrapper) + 1
        line = [path, *node_plan.argv[1:end], sys.executable, "-c", RANK]
        line[at] = str(count)
        line[wrapper : wrapper + 3] = [
            sys.executable,
            "-I",
            str(LAUNCHER / "trainworks_launcher" / "programs" / "rank.py"),
        ]
        result = start(tuple(line), TRAINWORKS_RUNTIME_DIRECTORY=str(tmp_path))
        assert result.returncode == status, result.stderr
        assert ("mpirun started 2 rank(s), and the job has 3" in result.stderr) is (count == 2)
        assert (f"of {count}" in result.stdout) is (count == 3)


def complaints(message: str, *usual: str) -> list[str]:
    """The lines with a complaint, but for those with usual words.

    Open MPI 5 complains of setpgid where an agent has started before its parent
    could make it a group leader.
    """
    lines = (
        line
        for line in message.splitlines()
        if not any(words in line for words in ("setpgid(", *usual))
    )
    return [line for line in lines if COMPLAINTS.search(line)]


PLAIN_RANK = """
import os, socket, sys

rank, size = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
words = ["rank", rank, "of", size, "on", os.environ["SM_CURRENT_HOST"]]
words += ["greeting", os.environ.get("GREETING", "")]
words += ["provider", os.environ.get("FI_PROVIDER", "")]
words += ["interface", os.environ["NCCL_SOCKET_IFNAME"]]
os.write(1, (" ".join(words) + chr(10)).encode())
"""


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts that can be resolved as algo-1 and algo-2."""
    with two_namespaces() as spaces:
        yield spaces


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
@pytest.mark.parametrize(
    "options",
    [
        "",
        (
            "--mca btl_vader_single_copy_mechanism none -verbose -x GREETING='hello world' -x"
            " FI_PROVIDER=tcp"
        ),
        (
            "-bind-to none -map-by slot -mca pml ob1 -mca btl ^openib -x PATH -x GREETING='hello"
            " world' -x FI_PROVIDER=tcp"
        ),
    ],
    ids=["ours", "documented", "horovod"],
)
def test_the_whole_world_starts_on_two_hosts(
    tmp_path: Path, network: Network, dialect: Dialect, options: str
) -> None:
    """Ranks need no MPI library for this, so it holds without mpi4py: each rank
    says where it is.
    """
    path, version = mpirun(dialect)
    programs = {"mpirun": path, "python": sys.executable}
    manifest = write_manifest(
        tmp_path / "image.json", programs, components={"open-mpi": {"version": version}}
    )
    hyperparameters: dict[str, Json] = {
        "sagemaker_mpi_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": "2",
    }
    with two_hosts(
        tmp_path, network, manifest, PLAIN_RANK, {**hyperparameters, OPTIONS: options}
    ) as launchers:
        statuses = [launcher.wait() for launcher in launchers]
    texts = [launcher.text for launcher in launchers]
    assert statuses == [0, 0], texts
    text = "".join(texts)
    for rank in range(4):
        where = f"rank {rank} of 4 on {NAMES[rank // 2]}"
        then = "greeting hello world provider tcp" if options else "greeting  provider "
        assert f"{where} {then} interface eth0\n" in text
    assert all(launcher.succeeded for launcher in launchers)
    assert not complaints(text, "rank", "'ethwe' does not exist")


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
def test_more_hosts_start_than_the_leader_has_agents_at_once(
    tmp_path: Path, dialect: Dialect
) -> None:
    path, version = mpirun(dialect)
    programs = {"mpirun": path, "python": sys.executable}
    manifest = write_manifest(
        tmp_path / "image.json", programs, components={"open-mpi": {"version": version}}
    )
    with (
        network_of(36) as new_network,
        job_on(new_network, tmp_path, PLAIN_RANK, MPI, manifest=manifest) as launchers,
    ):
        statuses = [launcher.wait() for launcher in launchers]
    assert statuses == [0] * 36, launchers[0].text
    assert all(
        f"rank {rank} of 36 on algo-{rank + 1} " in host.text for rank, host in enumerate(launchers)
    )


CALLER = """
import os, subprocess, sys
me = os.environ["SM_CURRENT_HOST"]
asks = {asks!r}
if me in asks.split(","):
    with open("hosts", "w") as hostfile:
        hostfile.write("{hosts}")
    words = ["--hostfile", "hosts", "-np", "4", "-x", "GREETING=hello world"]
    words += [sys.executable, "-c", {rank!r}]
    root = {{"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}}
    done = subprocess.run(["{mpirun}", *words], env={{**os.environ, **root}})
    print("mpirun ended with", done.returncode, flush=True)
    sys.exit(0 if done.returncode == 0 else 5)
"""
NAMED = "algo-1 slots=2\\nalgo-2 slots=2\\n"
ADDRESSED = "10.77.0.1 slots=2\\n10.77.0.2 slots=2\\n"


def called(
    tmp_path: Path, network: Network, dialect: Dialect, hidden: str = "", **script: str
) -> tuple[list[int], list[str]]:
    """Run a job without a distribution, whose program on one host calls mpirun for both.

    (statuses, texts).

    hidden: a program that is empty on algo-2.
    """
    path, version = mpirun(dialect)
    manifest = engine_manifest(tmp_path, mpirun=path)
    document = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(
        json.dumps({**document, "components": {"open-mpi": {"version": version}}}), encoding="utf-8"
    )
    write_stand_ins(tmp_path, manifest)
    values = {"asks": "algo-1", "hosts": NAMED, "rank": PLAIN_RANK, **script}
    text = CALLER.format(mpirun=tmp_path / "mpirun", **values)
    hide = ("unshare", "--mount", "sh", "-c", f'mount --bind /dev/null {hidden} && exec "$@"', "sh")
    before = {"algo-2": hide} if hidden else {}
    with job_on(network, tmp_path, text, {}, manifest=manifest, before=before) as launchers:
        statuses = [launcher.wait() for launcher in launchers]
    return statuses, [launcher.text for launcher in launchers]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
@pytest.mark.parametrize("hosts", [NAMED, ADDRESSED], ids=["names", "addresses"])
def test_a_program_calls_mpirun_for_all_hosts(
    tmp_path: Path, network: Network, dialect: Dialect, hosts: str
) -> None:
    """Call mpirun as scripts for AWS's images do, over ssh. Ranks have the variables of their own
    host.
    """
    statuses, texts = called(tmp_path, network, dialect, hosts=hosts)
    assert statuses == [0, 0], texts
    for rank in range(4):
        assert (
            f"rank {rank} of 4 on {NAMES[rank // 2]} greeting"
            " hello world provider  interface eth0\n" in texts[0]
        )
    assert "mpirun ended with 0\n" in texts[0]
    # That a script will call mpirun is not known before it does.
    assert not complaints("".join(texts), "each of the 2 hosts runs the whole program")


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
def test_the_program_hears_how_its_mpirun_ended(
    tmp_path: Path, network: Network, dialect: Dialect
) -> None:
    rank = "import os, sys; sys.exit(7 if os.environ['OMPI_COMM_WORLD_RANK'] == '3' else 0)"
    statuses, texts = called(tmp_path, network, dialect, rank=rank)
    assert statuses == [5, 5], texts
    assert "mpirun ended with 7\n" in texts[0], texts


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
@pytest.mark.parametrize("code", [0, 7])
def test_a_script_that_calls_mpirun_on_every_host_runs_once(
    tmp_path: Path, network: Network, dialect: Dialect, code: int
) -> None:
    """docs/migrate.md's own line: each host runs the same script, with the same list of hosts."""
    ends = f"sys.exit({code} if os.environ['OMPI_COMM_WORLD_RANK'] == '3' else 0)"
    rank = f"import os, sys; print('STARTED', flush=True); {ends}"
    statuses, texts = called(tmp_path, network, dialect, asks="algo-1,algo-2", rank=rank)
    assert statuses == [5 if code else 0] * 2, texts
    ran = "".join(texts).count("STARTED")
    # mpirun ends the others with the one that fails.
    assert ran == 4 or (code and 0 < ran < 4), texts
    assert "mpirun ended with" not in texts[1], texts


def test_another_host_than_the_first_starts_nothing_and_says_so(
    tmp_path: Path, network: Network
) -> None:
    statuses, texts = called(tmp_path, network, OPEN_MPI_5, asks="algo-2")
    assert statuses == [0, 0], texts
    assert "warning: mpirun was called on this host alone, not on the first one" in texts[1], texts


def test_a_leader_whose_name_is_loopback_uses_the_interface_to_the_others(network: Network) -> None:
    """Debian writes 127.0.1.1 for a machine's own name.

    With a port on that address, no other host could reach the leader.
    """
    hosts = Path("/etc/netns", network.space("algo-1"), "hosts")
    hosts.write_text(f"127.0.1.1 algo-1\n{network.address('algo-2')} algo-2\n", encoding="ascii")
    message = (
        "from trainworks_launcher.environment.network_routes import interface_that_reaches as find;"
        " print(find(*{}))"
    )
    for names, expected in (
        (("algo-1", "algo-2"), "eth0"),
        (("algo-1",), "lo"),
        (("algo-2",), "eth0"),
    ):
        words = (sys.executable, "-c", message.format(names))
        result = start(network.inside("algo-1", *words), PYTHONPATH=str(LAUNCHER))
        assert result.stdout == f"{expected}\n", result.stderr
