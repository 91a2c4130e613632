"""Pods as network namespaces: a host with the name, the variables and the
mounted files that a platform gives it.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher_network import PREFIX, Host, Network, as_host
from launcher_support import LAUNCHER, TIME_OUT, TRAIN


def start_pod(
    network: Network,
    host: str,
    base: Path,
    *words: str,
    hostname: str,
    variables: Mapping[str, str],
    mounts: Mapping[str, Path] | None = None,
    program: Sequence[str] = TRAIN,
) -> Host:
    """Start a process as process 1 of a pod.

    Args:
        network: The network that the host is in.
        host: Its name there.
        base: Folder of its files.
        words: Arguments of the program.
        hostname: The pod's name for itself.
        variables: The platform's.
        mounts: Path in the pod -> file or folder that is put there.
        program: The words that start the program.
    """
    base.mkdir(parents=True, exist_ok=True)
    binds = [
        f"mount --bind {shlex.quote(str(source))} {target}"
        for target, source in (mounts or {}).items()
    ]
    script = " && ".join([*binds, 'exec "$@"'])
    own = (*as_host(hostname, base), "sh", "-c", script, "sh")
    return Host(
        base, *words, prefix=network.inside(host, *own), variables=variables, program=program
    )


def write_stand_ins(folder: Path, manifest: Path) -> Mapping[str, str]:
    """Install the links that stand in front of mpirun and sshd, as an image has them.

    Variables that they need.
    """
    library = folder / "lib"
    library.mkdir()
    (library / "trainworks_launcher").symlink_to(LAUNCHER / "trainworks_launcher")
    entry = (LAUNCHER / "entrypoint" / "stand-in").read_text(encoding="utf-8")
    (library / "stand-in").write_text(
        entry.replace("/usr/bin/python3", sys.executable), encoding="utf-8"
    )
    (library / "stand-in").chmod(0o755)
    for name in ("mpirun", "sshd"):
        (folder / name).symlink_to(library / "stand-in")
    return {"TRAINWORKS_IMAGE_MANIFEST": str(manifest)}


def write_job_keys(folder: Path) -> Mapping[str, Path]:
    """Write the key pair of an MPIJob as kubelet mounts a secret, and an account whose home has it.

    The mounts.

    Source: kubeflow/mpi-operator, mpi_job_controller.go, newSSHAuthSecret (ECDSA, P-521) and
    setupSSHOnPod; Kubernetes' secret volumes are folders of mode 0777 with links into ``..data``.
    """
    content = folder / "home/.ssh/..2026_11_22"
    content.mkdir(parents=True)
    keygen = ("ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "", "-f")
    subprocess.run((*keygen, str(content / "id_rsa")), check=True, timeout=TIME_OUT)
    shutil.copy(content / "id_rsa.pub", content / "authorized_keys")
    (content.parent / "..data").symlink_to(content.name)
    for name in ("id_rsa", "id_rsa.pub", "authorized_keys"):
        (content.parent / name).symlink_to(f"..data/{name}")
    content.parent.chmod(0o777)
    account = folder / "passwd"
    account.write_text(
        f"root:x:0:0:root:{folder}/home:/bin/bash\n"
        "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        encoding="ascii",
    )
    return {"/etc/passwd": account}


def write_ssh_folder(folder: Path) -> Mapping[str, Path]:
    """Write /etc/ssh as an image has it: no host key, sessions with the image's PATH.

    The mounts.
    """
    ssh_folder = folder / "ssh"
    ssh_folder.mkdir()
    path = f"{PREFIX}/bin:/usr/bin:/bin"
    (ssh_folder / "sshd_config").write_text(f'UsePAM yes\nSetEnv "PATH={path}"\n', encoding="ascii")
    return {"/etc/ssh": ssh_folder}
