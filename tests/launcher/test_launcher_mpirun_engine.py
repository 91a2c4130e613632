"""The command lines that we write, started by the real mpirun of both lines of Open MPI.

Marked ``engine``. Open MPI 5 comes from TRAINWORKS_TEST_PREFIX, Open MPI 4 from the distribution's package (mpirun on
the system's PATH). What is missing is skipped and said.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_support import TIME_OUT, environment, plan

from trainworks_launcher.dialects import MCA_OPTIONS, OPEN_MPI_4, OPEN_MPI_5, Dialect, dialect_of

pytestmark = pytest.mark.engine

PREFIX = Path(os.environ.get("TRAINWORKS_TEST_PREFIX", "/opt/venv"))
DIALECTS = (OPEN_MPI_4, OPEN_MPI_5)
OPTIONS = "sagemaker_mpi_custom_mpi_options"
COMPLAINTS = re.compile(r"deprecat|not found|ignored|unknown|unrecognized|could not|warning|error", re.IGNORECASE)
RANK = """
import os
line = "rank " + os.environ["OMPI_COMM_WORLD_RANK"] + " of " + os.environ["OMPI_COMM_WORLD_SIZE"] + chr(10)
os.write(1, line.encode())
"""


def mpirun(dialect: Dialect) -> tuple[str, str]:
    """(path, version) of the real program of a dialect; skips if it is not here."""
    candidates = [str(PREFIX / "bin" / "mpirun"), shutil.which("mpirun", path="/usr/bin:/usr/local/bin") or ""]
    for candidate in filter(os.path.exists, candidates):
        said = subprocess.run((candidate, "--version"), capture_output=True, text=True, timeout=TIME_OUT, check=True)
        found = re.search(r"Open MPI\)? v?(\d+\.\d+\.\d+)", said.stdout)
        if found and dialect_of(found.group(1)) is dialect:
            return candidate, found.group(1)
    pytest.skip(f"no mpirun of Open MPI {dialect.major} is here (TRAINWORKS_TEST_PREFIX={PREFIX})")


def start(words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run one mpirun to its end, as root."""
    allowed = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        words, capture_output=True, text=True, timeout=TIME_OUT, check=False, env=allowed, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
def test_the_table_of_options_is_that_of_the_real_program(dialect: Dialect) -> None:
    """An option at the end of the line: what it lacks says how many words it takes."""
    path, _ = mpirun(dialect)
    wrong = []
    # These print or wait, whatever else is said. 5.0 dies of a signal where some options lack their words, and calls a
    # letter unknown that lacks its value.
    left_out = {"h", "help", "V", "version", "dvm"} | (MCA_OPTIONS - {"mca", "prtemca", "pmixmca"})
    if dialect.major == 5:
        left_out |= {"amca"} | {option for option, count in dialect.options.items() if len(option) == 1 and count == 1}
    for option, count in sorted(dialect.options.items()):
        if option in left_out:
            continue
        dashed = f"-{option}" if len(option) == 1 else f"--{option}"
        said = start((path, "--host", "localhost:1", "-np", "1", dashed))
        text = " ".join((said.stdout + said.stderr).split())
        needs = re.search(r"did not have enough parameters \((\d)\)", text)
        if needs:
            found = int(needs.group(1))
        elif "requires passing two values" in text:
            found = 2
        elif "requires an argument" in text:
            found = 1
        elif re.search("unknown option|[Uu]nrecognized option", text):
            found = -1
        else:
            found = 0
        if found != count:
            wrong.append((option, count, found, text[:160]))
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
        "-bind-to none -map-by slot -x NCCL_DEBUG=INFO -x LD_LIBRARY_PATH -x PATH -mca pml ob1 -mca btl ^openib",
        "-x HOROVOD_HIERARCHICAL_ALLREDUCE=1 -x HOROVOD_FUSION_THRESHOLD=16777216 -x orte_base_help_aggregate=0",
        "--mca btl_openib_want_fork_support 1 --mca btl_tcp_if_exclude lo,docker0",
        "-mca orte_abort_on_non_zero_status 1 -mca plm_rsh_no_tree_spawn 1 -mca plm_rsh_num_concurrent 2",
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
    """Ours, and what users write: in the documents of SageMaker and of Horovod, and for other lines of Open MPI."""
    path, version = mpirun(dialect)
    per_host = 1 if "pernode -x" in options else 2
    asked = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": per_host}
    made = plan(environment({**asked, OPTIONS: options}, open_mpi=version))
    wrapper = next(at for at, word in enumerate(made.argv) if word.endswith("/rank.py")) - 2
    said = start((path, *made.argv[1:wrapper], sys.executable, "-c", RANK))
    assert said.returncode == 0, said.stdout + said.stderr
    for rank in range(per_host):
        assert f"rank {rank} of {per_host}" in said.stdout
    assert not COMPLAINTS.search(said.stderr), said.stderr
