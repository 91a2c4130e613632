"""ssh between the hosts of one job: keys made when the job starts, gone when it ends.

Nothing of it is in the image and nothing goes to a user's ~/.ssh. Each other host makes a host key and runs its own
sshd on a free port of the address by which it reaches the leader; only the leader's fresh key is accepted, only from
the leader, without password, forwarding or terminal. The leader knows every host key from the control channel, so host
keys are checked. sshd gives a session the few variables that mpirun's daemon needs; ranks read the rest from a file.
"""

from __future__ import annotations

import os
import re
import selectors
import socket
import subprocess
import time
from pathlib import Path
from typing import Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.supervise.control import Peer

_KEY_SECONDS = 30.0
_START_SECONDS = 20.0
_TRIES = 5
_SESSION_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX")
_PER_SOURCE = "PerSourceMaxStartups"
_PUBLIC_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/=]+")


def make_key(ssh_keygen: str, path: Path) -> str:
    """Make a key pair at ``path``; the public part as ``type base64``. Raises RefusalError if that fails."""
    argv = (ssh_keygen, "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path))
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_KEY_SECONDS, check=False, stdin=subprocess.DEVNULL)
        reason = done.stderr.decode("utf-8", "replace").strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason or not path.is_file():
        raise RefusalError([Problem(f"cannot make an ssh key: {reason}", ssh_keygen, "")], names.EXIT_HOSTS)
    return " ".join(Path(f"{path}.pub").read_text(encoding="ascii").split()[:2])


def check_public_key(key: str, host: str) -> str:
    """Return the key, if it is one; it goes into a file that sshd and ssh obey. Raises RefusalError otherwise."""
    if not _PUBLIC_KEY.fullmatch(key):
        raise RefusalError([Problem(f"host {host} sent no usable ssh key", "control channel", "")], names.EXIT_HOSTS)
    return key


def write_client_files(directory: Path, ssh: str, peers: Sequence[Peer]) -> None:
    """ssh_config, known_hosts and the program for agent.py, on the leader."""
    known = [f"{peer.host} {check_public_key(peer.ssh_host_key, peer.host)}\n" for peer in peers]
    blocks = [
        f"Host {peer.host}\n  HostName {peer.address}\n  Port {peer.ssh_port}\n  HostKeyAlias {peer.host}\n"
        for peer in peers
    ]
    (directory / "known_hosts").write_text("".join(known), encoding="ascii")
    (directory / "ssh_config").write_text("".join(blocks) + client_settings(directory), encoding="utf-8")
    (directory / "ssh_program").write_text(ssh, encoding="utf-8")


def client_settings(directory: Path) -> str:
    """Return the part of ssh_config that holds for every host: the job's key, and known hosts only."""
    return (
        "Host *\n"
        f"  IdentityFile {directory}/user_key\n"
        f"  UserKnownHostsFile {directory}/known_hosts\n"
        "  GlobalKnownHostsFile /dev/null\n"
        "  IdentitiesOnly yes\n  IdentityAgent none\n  BatchMode yes\n  StrictHostKeyChecking yes\n"
        "  PreferredAuthentications publickey\n  ConnectTimeout 30\n  ServerAliveInterval 15\n  LogLevel ERROR\n"
    )


class Server:
    """This host's sshd for the life of the job."""

    def __init__(
        self, sshd: str, directory: Path, address: str, leader_key: str, leader_address: str, env: Mapping[str, str]
    ) -> None:
        """Start it and wait, bounded, until it listens. Raises RefusalError with sshd's own words if it does not.

        env: environment of the ranks; the few names that mpirun's daemon needs are given to every session.
        """
        self._directory = directory
        self.admit(leader_key, leader_address)
        # sshd started by root insists on this directory (its compiled-in place for the unprivileged half).
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)
        session = {name: env[name] for name in (*_SESSION_VARIABLES, names.HOSTNAME_VARIABLE) if name in env}
        session[names.RUNTIME_DIRECTORY_VARIABLE] = session["TMPDIR"] = str(directory)
        words = "it printed nothing"
        fair = True
        for _ in range(_TRIES):
            self.port = _free_port(address)
            config = directory / "sshd_config"
            config.write_text(_configuration(directory, address, self.port, session, fair), encoding="utf-8")
            self._process = subprocess.Popen(
                (sshd, "-D", "-e", "-f", str(config)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            )
            words = _wait_until_listening(self._process)
            if not words:
                self.pid = self._process.pid
                return
            fair = fair and _PER_SOURCE not in words
            self._process.kill()
            self._process.wait(_START_SECONDS)
            if self._process.stderr is not None:
                self._process.stderr.close()
        raise RefusalError([Problem(f"sshd did not start: {words}", sshd, "")], names.EXIT_HOSTS)

    def admit(self, leader_key: str, leader_address: str) -> None:
        """Let in the leader that has this key, and nobody else. Raises RefusalError if it is not a key."""
        check_public_key(leader_key, "leader")
        limits = f'restrict,from="{leader_address}"' if leader_address else "restrict"
        (self._directory / "authorized_keys").write_text(f"{limits} {leader_key}\n", encoding="ascii")

    def fileno(self) -> int:
        """Return the descriptor of sshd's own log, which has to be read so that it never blocks."""
        return self._process.stderr.fileno() if self._process.stderr is not None else -1

    def has_just_ended(self) -> bool:
        """Return whether it has ended since it was last looked at; its status is taken then."""
        return self._process.returncode is None and self._process.poll() is not None

    def close(self) -> None:
        """End sshd and, with it, the sessions that are its children."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_START_SECONDS)
        if self._process.stderr is not None:
            self._process.stderr.close()


def _free_port(address: str) -> int:
    """Return a port that is free on the address now; sshd cannot choose one itself."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _configuration(directory: Path, address: str, port: int, session: Mapping[str, str], fair: bool) -> str:
    """sshd's whole configuration. fair: logins that are not done are bounded per address, so that a flood from one
    keeps no other host out (OpenSSH 8.5 and later)."""
    pairs = " ".join('"{}={}"'.format(name, value.replace('"', "")) for name, value in sorted(session.items()))
    return (
        f"Port {port}\nListenAddress {address}\n"
        f"HostKey {directory}/host_key\nAuthorizedKeysFile {directory}/authorized_keys\nPidFile none\n"
        # The files lie in a directory of mode 0700 below /tmp, whose own mode StrictModes does not accept.
        "StrictModes no\n"
        "UsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPubkeyAuthentication yes\n"
        "PermitRootLogin prohibit-password\nAllowTcpForwarding no\nAllowAgentForwarding no\nX11Forwarding no\n"
        "PermitTunnel no\nPermitTTY no\nPermitUserRC no\nPermitUserEnvironment no\nPrintMotd no\n"
        "MaxStartups 128:30:512\nMaxSessions 128\nLoginGraceTime 30\nLogLevel INFO\n"
        f"SetEnv {pairs}\n" + (f"{_PER_SOURCE} 16\n" if fair else "")
    )


def _wait_until_listening(process: subprocess.Popen[bytes]) -> str:
    """Wait for sshd's line that it listens; "" then, else its last words."""
    if process.stderr is None:
        return "no log"
    deadline = time.monotonic() + _START_SECONDS
    descriptor = process.stderr.fileno()
    os.set_blocking(descriptor, False)
    words = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                break
            chunk = os.read(descriptor, 65536)
            words += chunk
            if b"Server listening on" in words:
                return ""
            if not chunk:
                return words.decode("utf-8", "replace").strip() or "it ended and printed nothing"
    return words.decode("utf-8", "replace").strip() or f"it did not listen within {_START_SECONDS:g} s"
