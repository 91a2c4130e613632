"""The programs that stand in front of mpirun and sshd, called by the SDK's
driver and by anybody else.

The tests that need a host without ssh host keys are in tests/sdk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_support import LAUNCHER, TIME_OUT

from trainworks_launcher.command.stand_ins import corrected, own_names
from trainworks_launcher.mpirun.dialects import dialect_of

DRIVERS_LINE = (
    *("--host", "algo-1:2,algo-2:2", "-np", "2", "--allow-run-as-root", "--tag-output"),
    *("-mca", "btl_tcp_if_include", "ethwe", "-mca", "oob_tcp_if_include", "ethwe"),
    *("-mca", "pml", "ob1", "-x", "NCCL_SOCKET_IFNAME=ethwe", "-x", "PATH"),
)
"""The driver's code of sagemaker-train 1.27.0, without the parts that do not matter in this test.
"""

PROGRAM = (
    "/opt/venv/bin/python3",
    "-m",
    "mpi4py",
    "train.py",
    "-np",
    "1",
    "-x",
    "NCCL_SOCKET_IFNAME=ethwe",
)


def test_a_missing_interface_is_replaced_in_mpiruns_options_and_not_in_the_programs() -> None:
    words, notes = corrected((*DRIVERS_LINE, *PROGRAM), "ethwe", "eth0")
    assert words == [word.replace("ethwe", "eth0") for word in DRIVERS_LINE] + list(PROGRAM)
    assert (
        notes[0] == "the network interface 'ethwe' does not exist on this host; mpirun gets 'eth0'"
    )


def test_nothing_is_replaced_where_the_interface_exists_or_none_is_known_to_be_better() -> None:
    for missing, reaching in (("", "eth0"), ("ethwe", ""), ("eth9", "eth0")):
        words, notes = corrected((*DRIVERS_LINE, *PROGRAM), missing, reaching)
        assert words == [*DRIVERS_LINE, *PROGRAM]
        assert not any("interface" in note for note in notes)


@pytest.mark.parametrize(
    ("hosts", "ranks", "message"),
    [
        ("algo-1:2,algo-2:2", "2", "asks for 2 process(es), and the hosts have room for 4"),
        ("algo-1,algo-2", "1", "asks for 1 process(es), and the hosts have room for 2"),
        ("algo-1:8", "8", ""),
        ("algo-1", "1", ""),
        ("algo-1:2,algo-2:2", "4", ""),
    ],
)
def test_a_world_that_is_too_small_is_said_and_left_as_it_is(
    hosts: str, ranks: str, message: str
) -> None:
    words_before = ["--host", hosts, "-np", ranks, *PROGRAM]
    words, notes = corrected(words_before, "", "")
    assert words == words_before
    assert message in "".join(notes)
    assert len(notes) == bool(message)


@pytest.mark.parametrize(
    "words_before", [[], ["-np"], ["--host"], ["-mca", "x"], ["-x"], ["--version"], ["hostname"]]
)
def test_a_line_that_mpirun_would_refuse_is_left_to_mpirun(words_before: list[str]) -> None:
    assert corrected(words_before, "ethwe", "eth0") == (words_before, ())


REAL = (
    "import os, sys\n"
    "print(sys.argv[1:], os.environ.get('TRAINWORKS_HOSTNAME'), os.environ.get('LD_PRELOAD'))\n"
)
CALLER = "import subprocess, sys\nsys.exit(subprocess.run(sys.argv[1:]).returncode)\n"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Give a folder with both links, laid out as in an image, real programs
    that say how they were called, callers.
    """
    library = tmp_path / "lib"
    library.mkdir()
    (library / "trainworks_launcher").symlink_to(LAUNCHER / "trainworks_launcher")
    (library / "stand-in").write_bytes((LAUNCHER / "entrypoint" / "stand-in").read_bytes())
    (library / "stand-in").chmod(0o755)
    real = tmp_path / "real"
    real.write_text(f"#!{sys.executable} -I\n{REAL}", encoding="utf-8")
    real.chmod(0o755)
    shim = tmp_path / "libhostname.so"
    shim.touch()
    manifest = {
        "schema": 1,
        "programs": {"mpirun": str(real), "sshd": str(real)},
        "hostname_shim": str(shim),
    }
    (tmp_path / "image.json").write_text(json.dumps(manifest), encoding="utf-8")
    for name in ("mpirun", "sshd"):
        (tmp_path / name).symlink_to(library / "stand-in")
    for name in ("mpi_driver.py", "somebody_else.py"):
        (tmp_path / name).write_text(CALLER, encoding="utf-8")
    return tmp_path


def called(
    folder: Path, caller: str, *words: str, hosts: int = 2
) -> subprocess.CompletedProcess[str]:
    """Let a caller run one of the links, as the SDK's script would have prepared it."""
    return subprocess.run(
        (sys.executable, "-I", str(folder / caller), str(folder / words[0]), *words[1:]),
        env={
            "PATH": os.environ["PATH"],
            "SAGEMAKER_BASE_DIR": str(folder / "ml"),
            "TRAINWORKS_IMAGE_MANIFEST": str(folder / "image.json"),
            "SM_HOSTS": json.dumps([f"algo-{number}" for number in range(1, hosts + 1)]),
            "SM_CURRENT_HOST": "algo-2",
            "SM_MASTER_ADDR": "127.0.0.1",
            "SM_NETWORK_INTERFACE_NAME": "ethwe",
        },
        capture_output=True,
        text=True,
        timeout=TIME_OUT,
        check=False,
    )


def test_the_driver_gets_the_interface_that_reaches_the_leader_and_its_host_its_name(
    installed: Path,
) -> None:
    done = called(
        installed, "mpi_driver.py", "mpirun", "-mca", "btl_tcp_if_include", "ethwe", "hostname"
    )
    assert "['-mca', 'btl_tcp_if_include', 'lo', 'hostname'] algo-2 " in done.stdout
    assert f"{installed}/libhostname.so" in done.stdout
    assert (
        "trainworks: the network interface 'ethwe' does not exist on this host; mpirun gets 'lo'"
        in done.stderr
    )


@pytest.mark.parametrize("program", ["mpirun", "sshd"])
def test_anybody_else_gets_the_real_program_with_his_words(installed: Path, program: str) -> None:
    done = called(
        installed, "somebody_else.py", program, "-mca", "btl_tcp_if_include", "ethwe", "a b", ""
    )
    assert done.stdout == "['-mca', 'btl_tcp_if_include', 'ethwe', 'a b', ''] None None\n"
    assert done.stderr == ""


def test_on_one_host_the_driver_needs_no_key_and_is_left_alone(installed: Path) -> None:
    done = called(installed, "mpi_driver.py", "sshd", "-D", hosts=1)
    assert (done.returncode, done.stdout) == (0, "['-D'] None None\n")


def test_a_program_that_the_image_lacks_is_named(installed: Path) -> None:
    (installed / "image.json").write_text(json.dumps({"schema": 1}), encoding="utf-8")
    done = called(installed, "somebody_else.py", "mpirun", "--version")
    assert done.returncode == 127
    assert done.stderr == "trainworks: this image has no mpirun\n"


OPERATORS = {
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "8",
    "OMPI_MCA_pml": "ob1",
    "PATH": "/usr/bin",
}
"""As kubeflow/mpi-operator (mpi_job_controller.go, ompiEnvVars) gives them, with one of a user."""


def test_open_mpi_5_gets_the_operators_parameters_by_its_own_names() -> None:
    assert own_names(OPERATORS, dialect_of("5.0.11")) == {
        "PRTE_MCA_prte_keep_fqdn_hostnames": "true",
        "PRTE_MCA_prte_default_hostfile": "/etc/mpi/hostfile",
        "PRTE_MCA_plm_ssh_args": "-o ConnectionAttempts=10",
        "PRTE_MCA_prte_set_default_slots": "8",
    }


def test_open_mpi_4_reads_them_itself_and_a_users_own_value_stays() -> None:
    assert own_names(OPERATORS, dialect_of("4.1.7")) == {}
    mine = {**OPERATORS, "PRTE_MCA_plm_ssh_args": "-v"}
    assert "PRTE_MCA_plm_ssh_args" not in own_names(mine, dialect_of("5.0.11"))


@pytest.mark.parametrize(
    "sshd_words",
    [
        ("-De", "-h", "/key"),
        ("-D", "-f", "/etc/mine"),
        ("-t",),
        ("-D", "-oHostKey=/key"),
        ("-D", "-o", "hostkey /key"),
        ("-V",),
    ],
)
def test_an_sshd_whose_keys_are_chosen_already_gets_none(
    installed: Path, sshd_words: tuple[str, ...]
) -> None:
    done = called(installed, "somebody_else.py", "sshd", *sshd_words)
    assert (done.stdout, done.stderr) == (f"{[*sshd_words]} None None\n", "")
