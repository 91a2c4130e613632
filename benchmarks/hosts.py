#!/usr/bin/env python3
"""Measures how jobs of two hosts end: ours beside the `train` of sagemaker-training, under the same mpirun.

Two hosts are two network namespaces, each with a PID, UTS and mount namespace of its own. Both launchers start the same
script with the same Python and the mpirun of this machine's distribution. The peer also needs sshd on port 22, a key
that all hosts share and a PAM without pam_loginuid; that is bind-mounted inside its namespaces, as its images have it.

A job that does nothing, and a job whose rank on the second host raises: seconds until each host has ended, its exit
status, and which of the files success and failure it has. The peer needs a minute for the first and three for the
second. Needs root, iproute2, Open MPI, openssh-server, and the peer (`make peers`, or --peer PREFIX).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from measure import ROOT, Figure, Section, describe, load, machine, table, write
from start import SYSTEM_PYTHON, install_ours
from trainworks.engine.scratch import private_folder

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "launcher"))

from launcher_network import Network, network_of

LIMIT = 600.0
"""Seconds after which a host that has not ended is killed."""

NOTHING = "import time\nprint(f'moment {time.monotonic()}', flush=True)\n"
RAISES = (
    "import os, time\nrank = os.environ['OMPI_COMM_WORLD_RANK']\nif rank == '1':\n"
    "    print(f'moment {time.monotonic()}', flush=True)\n    raise ValueError('the cause')\ntime.sleep(600)\n"
)
SCENARIOS = {"a job that does nothing": NOTHING, "a rank on the second host raises": RAISES}

SSHD = """\
Port 22
HostKey {home}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
StrictModes no
UsePAM yes
PidFile none
PermitRootLogin yes
"""
SSH = "Host *\n  IdentityFile {home}/.ssh/id_rsa\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
PAM = "auth required pam_permit.so\naccount required pam_permit.so\nsession required pam_env.so\n"


@dataclass
class Ended:
    """How a host ended: seconds of the machine's clock, status, files, and what it printed."""

    moment: float
    status: int
    files: str
    output: str


def lay_out(base: Path, host: str, network: Network, script: str) -> None:
    """Write the files that a platform mounts, and make the directories that its images have."""
    for name in ("code", "model", "input/config", "input/data", "output/data"):
        (base / name).mkdir(parents=True)
    asked = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": str(base / "code"),
        "sagemaker_mpi_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": "1",
    }
    documents = {
        "hyperparameters": asked,
        "resourceconfig": {"current_host": host, "hosts": network.hosts, "network_interface_name": "eth0"},
        "inputdataconfig": {},
    }
    (base / "code" / "train.py").write_text(script, encoding="utf-8")
    for name, content in documents.items():
        (base / "input" / "config" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def write_manifest(folder: Path, python: Path) -> Path:
    """Write the manifest of a made-up image whose programs are this machine's."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    programs = {name: shutil.which(name, path=path) or "" for name in ("mpirun", "ssh", "sshd", "ssh-keygen")}
    said = subprocess.run((programs["mpirun"], "--version"), capture_output=True, text=True, check=True).stdout
    version = re.search(r"(\d+\.\d+\.\d+)", said)
    document = {
        "schema": 1,
        "name": "benchmark",
        "components": {"open-mpi": {"version": version[1] if version else ""}},
        "missing": [],
        "instances": {},
        "programs": {**programs, "python": str(python)},
    }
    manifest = folder / "image.json"
    manifest.write_text(json.dumps(document), encoding="utf-8")
    return manifest


def find_mpi4py(prefix: Path) -> Path:
    """Return where mpi4py lies below the prefix of a virtual environment."""
    found = sorted(prefix.absolute().glob("lib/python3*/site-packages/mpi4py"))
    if not found:
        raise SystemExit(f"there is no mpi4py below {prefix}; make peers")
    return found[0]


def write_home(home: Path) -> Mapping[Path, str]:
    """Make what the peer's images have baked in; (file, where it is to lie)."""
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    for key, kind in ((home / ".ssh" / "id_rsa", "rsa"), (home / "host_key", "ed25519")):
        subprocess.run(("ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(key)), check=True)
    shutil.copy(home / ".ssh" / "id_rsa.pub", home / ".ssh" / "authorized_keys")
    texts = {
        "/etc/ssh/sshd_config": SSHD.format(home=home),
        "/etc/ssh/ssh_config": SSH.format(home=home),
        "/etc/pam.d/sshd": PAM,
        "/etc/environment": "",
    }
    made = {}
    for number, (target, text) in enumerate(texts.items()):
        file = home / f"file-{number}"
        file.write_text(text, encoding="utf-8")
        made[file] = target
    return made


def run_job(
    network: Network, folder: Path, script: str, train: tuple[str, ...], environment: Mapping[str, str], *, peer: bool
) -> tuple[list[Ended], float, float]:
    """Run a job on both hosts to its end: how each ended, when the job was started, and the script's moment."""
    processes = []
    baked_in = write_home(folder / "home")
    started = time.monotonic()
    for host in network.hosts:
        base = folder / host
        lay_out(base / "ml", host, network, script)
        mounts = "".join(f"mount --bind {file} {to}; " for file, to in baked_in.items()) if peer else ""
        setup = f'set -e; hostname {host}; mount -t tmpfs tmpfs /tmp; {mounts}mkdir -p /run/sshd; exec "$@"'
        own = (
            "unshare",
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "sh",
            "-c",
            setup,
            "sh",
        )
        variables = {**environment, "SAGEMAKER_BASE_DIR": str(base / "ml"), "HOME": str(folder / "home")}
        with (base / "log").open("wb") as log:
            command = network.inside(host, *own, *train)
            processes.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True))
    ends = [0.0 for _ in processes]

    def wait(number: int) -> None:
        try:
            processes[number].wait(LIMIT)
        except subprocess.TimeoutExpired:
            processes[number].kill()
            processes[number].wait()
        ends[number] = time.monotonic()

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(len(processes))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for process in processes:
            process.kill()
    found = []
    for host, process, moment in zip(network.hosts, processes, ends, strict=True):
        output = folder / host / "ml" / "output"
        files = " ".join(name for name in ("success", "failure") if (output / name).exists())
        log_text = (folder / host / "log").read_text(encoding="utf-8", errors="replace")
        found.append(Ended(moment, process.returncode, files or "none", log_text))
    moments = [float(number) for end in found for number in re.findall(r"moment (\d+\.\d+)", end.output)]
    if not moments:
        raise SystemExit("the script never ran:\n" + "\n".join(end.output[-4000:] for end in found))
    return found, started, max(moments)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, default=ROOT / ".cache/peers/sagemaker-training", metavar="PREFIX")
    parser.add_argument("--mpi4py", type=Path, default=ROOT / ".cache/peers/programs", metavar="PREFIX")
    parser.add_argument("--write", action="store_true", help="record in benchmarks/results.json and results.md")
    options = parser.parse_args()
    facts = machine()
    peer = options.peer.absolute()
    figures, rows = [], [("", "launcher", "host", "ended after", "exit status", "files")]
    # Not below /tmp, which every host has for itself: the peer leaves marks there.
    with private_folder(str(ROOT / ".cache")) as folder, network_of(2) as network:
        train = install_ours(folder / "ours")
        # The peer starts every script with mpi4py and says nothing of needing it.
        (folder / "modules").mkdir()
        (folder / "modules" / "mpi4py").symlink_to(find_mpi4py(options.mpi4py))
        path = f"{peer}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {"PATH": path, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(folder / "modules")}
        ours = (SYSTEM_PYTHON if Path(SYSTEM_PYTHON).exists() else sys.executable, "-I", str(train))
        manifest = {"TRAINWORKS_IMAGE_MANIFEST": str(write_manifest(folder, peer / "bin" / "python"))}
        launchers = {
            "ours": (ours, {**variables, **manifest}),
            "peer": ((str(peer / "bin" / "python"), str(peer / "bin" / "train")), variables),
        }
        for scenario, script in SCENARIOS.items():
            seconds = {}
            for name, (command, environment) in launchers.items():
                at = folder / f"{scenario} {name}".replace(" ", "-")
                is_peer = name == "peer"
                found, started, moment = run_job(network, at, script, command, environment, peer=is_peer)
                begun = started if script == NOTHING else moment
                seconds[name] = max(end.moment for end in found) - begun
                for host, end in zip(network.hosts, found, strict=True):
                    rows.append((scenario, name, host, f"{end.moment - begun:.1f} s", str(end.status), end.files))
            since = "from the start" if script == NOTHING else "since it raised"
            figures.append(
                Figure(
                    name=f"{scenario}: until both hosts have ended",
                    unit="s",
                    ours=(seconds["ours"],),
                    peer=(seconds["peer"],),
                    promise=5,
                    note=f"{since}; measured once",
                )
            )
    section = Section(
        title="Jobs of two hosts",
        machine={**facts, "load at the end": load()},
        figures=tuple(figures),
        peer="`train` of sagemaker-training 5.1.4 under the same mpirun, with the same Python and the same script; "
        "two hosts are two network namespaces.",
        details=(table(rows),),
    )
    sys.stdout.write(describe(section))
    if options.write:
        write("hosts", section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
