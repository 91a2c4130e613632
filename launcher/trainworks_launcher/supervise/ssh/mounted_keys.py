"""Use ssh with the key pair that an operator mounts into every host of a job: MPIJob, and TrainJob
with an MPI runtime.

The pair is ``~/.ssh`` of the launcher and of the workers: id_rsa, id_rsa.pub, and authorized_keys
with the same public key. Source: kubeflow/mpi-operator, mpi_job_controller.go, setupSSHOnPod;
kubeflow/trainer, plugins/mpi/mpi.go. Every host of the job has the private key, and no other host
has it. So a worker shows it as its host key, and the launcher accepts only this key: the image has
no host key, and ssh accepts no key at first sight.
"""

from __future__ import annotations

import getopt
import os
import pwd
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError

PRIVATE_KEY = "id_rsa"
"""Name of the file, for any kind of key."""

_PUBLIC_KEY = re.compile(r"(ssh-[a-z0-9-]+|ecdsa-sha2-[a-z0-9-]+) [A-Za-z0-9+/=]+")
_HOST_KEY_DIRECTORY = "/etc/ssh"
_KEY_SECONDS = 30.0
"""Time limit of ssh-keygen."""

_SSHD_OPTIONS = "C:E:b:c:f:g:h:k:o:p:u:46DGQRTVdeiqrt"
"""sshd's short options: sshd(8)."""

_OPTIONS_OF_CHOSEN_KEYS = frozenset(("-f", "-h", "-G", "-Q", "-T", "-V", "-t"))
"""Options with which sshd's caller has chosen the keys, or starts no server."""


class Keys(NamedTuple):
    """A mounted pair.

    Attributes:
        private: File of the private key.
        public: The public key, for example ``ssh-ed25519 AAAAC3...``.
    """

    private: Path
    public: str


def find() -> Keys | None:
    """Return the mounted pair of this process's user.

    None if there is none, if it cannot be read, if id_rsa.pub holds no public key, or if
    authorized_keys does not have that key.
    """
    try:
        # The home of sshd and ssh, which do not read HOME.
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None
    folder = Path(home, ".ssh")
    try:
        # The kind and the key; a comment follows them.
        public = " ".join((folder / f"{PRIVATE_KEY}.pub").read_text(encoding="utf-8").split()[:2])
        allowed = (folder / "authorized_keys").read_text(encoding="utf-8")
        private = folder / PRIVATE_KEY
        readable = os.access(private, os.R_OK)
    except (OSError, UnicodeDecodeError):
        return None
    if not readable or not _PUBLIC_KEY.fullmatch(public) or public not in allowed:
        return None
    return Keys(private, public)


def required() -> Keys:
    """Return the mounted pair, as ``find``. Raises RefusalError if there is none."""
    keys = find()
    if keys is None:
        advice = (
            "let sshAuthMountPath be the .ssh folder in the home directory of the container's user"
        )
        problem = (
            f"{PRIVATE_KEY}, {PRIVATE_KEY}.pub and"
            " authorized_keys of the operator are not in ~/.ssh"
        )
        raise RefusalError([Problem(problem, "the keys of the MPI job", advice)])
    return keys


def private_copy(keys: Keys, path: Path) -> None:
    """Copy the private key to a new file that only this user can read.

    ssh and sshd refuse a key that a group can read. Raises OSError, also if the file exists.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(keys.private.read_bytes())


def server_options(words: Sequence[str], keygen: str) -> tuple[list[str], str]:
    """Make a host key for an sshd that has none: a copy of the job's key, or a new one.

    The key is in a new private directory. For root, /run/sshd is made, which sshd needs.

    Args:
        words: sshd's words.
        keygen: Path of ssh-keygen.

    Returns:
        Options for sshd, and a line for the log. Both are empty if sshd's caller has chosen the
        keys, or if the host has some.

    Raises:
        OSError: A file cannot be written.
        RefusalError: The key cannot be made.
    """
    if _has_chosen_keys(words):
        return [], ""
    keys = find()
    if keys is None and list(Path(_HOST_KEY_DIRECTORY).glob("ssh_host_*_key")):
        return [], ""
    file = Path(tempfile.mkdtemp(prefix="trainworks-sshd-"), "host_key")
    options = ["-h", str(file)]
    if keys is not None:
        private_copy(keys, file)
        # ~/.ssh is a volume that every user of the container may write to, and its files are links.
        options += ["-o", "StrictModes=no"]
        note = f"sshd's host key is the job's own key, {keys.private}"
    else:
        _make_key(keygen, file)
        note = "sshd's host key was made now; images have none"
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)
    else:
        # Only root may use PAM, and write to /run.
        options += ["-o", "UsePAM=no", "-o", "PidFile=none"]
    return options, note


def _make_key(ssh_keygen: str, path: Path) -> None:
    """Make a key pair without a passphrase, by ssh-keygen: the path, and the path with ``.pub``.

    Raises RefusalError (EXIT_HOSTS) if ssh-keygen cannot be started, fails, or takes too long.
    """
    argv = (ssh_keygen, "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path))
    try:
        done = subprocess.run(
            argv, capture_output=True, timeout=_KEY_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
        reason = done.stderr.decode("utf-8", "replace").strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason or not path.is_file():
        raise RefusalError(
            [Problem(f"cannot make an ssh key: {reason}", ssh_keygen, "")], names.EXIT_HOSTS
        )


def _has_chosen_keys(words: Sequence[str]) -> bool:
    """Return whether sshd's words name a key, or start no server.

    True also for wrong words, which sshd itself reports.
    """
    try:
        pairs, _ = getopt.getopt(list(words), _SSHD_OPTIONS)
    except getopt.GetoptError:
        return True
    for option, value in pairs:
        if option in _OPTIONS_OF_CHOSEN_KEYS:
            return True
        # For example -o "HostKey /etc/key", or -o HostKey=/etc/key.
        if option == "-o" and re.split(r"[\s=]", value.lstrip())[0].lower() == "hostkey":
            return True
    return False


def write_client_files(directory: Path, program: str, keys: Keys, connect: Sequence[str]) -> None:
    """Write the files with which agent.py starts ssh on the workers.

    These are user_key, known_hosts, ssh_config and ssh_program (one line, the path of ssh). The one
    pair has two uses: its private key is this user's key, and its public key is the host key that
    every worker shows. user_key must not exist yet; the other files are replaced.

    Args:
        directory: The runtime directory, or another private one.
        program: Path of ssh.
        keys: The pair that the operator mounts into every host of the job.
        connect: Words of a command line that starts connect.py. connect.py connects ssh to a
            worker, and tries again until a limit of seconds, which is one of the words: hosts start
            at different times.

    Raises:
        OSError: A file cannot be written, or user_key exists.
    """
    private_copy(keys, directory / "user_key")
    # "*": every host has this host key, and ssh accepts no other.
    (directory / "known_hosts").write_text(f"* {keys.public}\n", encoding="ascii")
    # ssh runs this command to connect: %h is the host and %p the port. The command hands the open
    # connection to ssh (ProxyUseFdpass) and ends.
    proxy = " ".join(f'"{word}"' for word in connect)
    block = f"Host *\n  ProxyCommand {proxy} %h %p\n  ProxyUseFdpass yes\n"
    settings = (
        f"  IdentityFile {directory}/user_key\n"
        f"  UserKnownHostsFile {directory}/known_hosts\n"
        "  GlobalKnownHostsFile /dev/null\n"
        "  IdentitiesOnly yes\n"
        "  IdentityAgent none\n"
        "  BatchMode yes\n"
        "  StrictHostKeyChecking yes\n"
        "  PreferredAuthentications publickey\n"
        "  ConnectTimeout 30\n"
        "  ServerAliveInterval 15\n"
        "  LogLevel ERROR\n"
    )
    (directory / "ssh_config").write_text(block + settings, encoding="utf-8")
    (directory / "ssh_program").write_text(program, encoding="utf-8")
