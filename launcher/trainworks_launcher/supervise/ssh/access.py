"""This host's part in the ssh of a job: its key, its sshd, and what it writes down of the other hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Mapping, Sequence

from trainworks_launcher.plan.plan import Shell
from trainworks_launcher.supervise.control import Peer
from trainworks_launcher.supervise.loop import READ, Loop
from trainworks_launcher.supervise.ssh import ssh


class Access:
    """The ssh of one host. Every method runs in the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        shell: Shell,
        directory: Path,
        env: Mapping[str, str],
        connect: Sequence[str],
        *,
        leads: bool,
    ) -> None:
        """Nothing is made or started yet.

        Args:
            loop: The loop of the run.
            shell: The programs of ssh.
            directory: The private directory of the job on this host.
            env: Environment of sshd.
            connect: Words that start ``connect.py``, with its limit.
            leads: This host is the leader: it reaches the others, and serves none.
        """
        self.server: ssh.Server | None = None
        self._loop = loop
        self._shell = shell
        self._directory = directory
        self._env = env
        self._connect = connect
        self._leads = leads
        self._leader_key = ""
        self._leader_address = ""
        self._local_address = ""

    def make_key(self) -> str:
        """Make this host's key; its public part. Raises RefusalError if that fails."""
        return ssh.make_key(self._shell.ssh_keygen, self._directory / ("user_key" if self._leads else "host_key"))

    def admit(self, leader_key: str, leader_address: str, local_address: str) -> None:
        """Let this leader in, and no other; once more with another key if the leader starts anew."""
        self._leader_key, self._leader_address, self._local_address = leader_key, leader_address, local_address
        if self.server is not None:
            self.server.admit(leader_key, leader_address)

    def serve(self) -> int:
        """Start sshd on a host that has one, and return its port; 0 for none. Raises RefusalError if that fails."""
        if self._leads:
            return 0
        server = ssh.Server(
            self._shell.sshd, self._directory, self._local_address, self._leader_key, self._leader_address, self._env
        )
        self.server = server
        self._loop.watch(server.fileno(), READ, lambda _: self._read_log(server.fileno()))
        return server.port

    def _read_log(self, descriptor: int) -> None:
        """sshd's log is read and dropped: a full pipe would stop it."""
        try:
            chunk = os.read(descriptor, 65536)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.unwatch(descriptor)

    def write_peers(self, peers: Sequence[Peer]) -> None:
        """Write down how the other hosts are reached. Those that only serve ssh may come up later than this one."""
        if self._shell.mounted:
            from trainworks_launcher.supervise.ssh import mounted_keys

            keys = mounted_keys.required()
            mounted_keys.write_client_files(self._directory, self._shell.ssh, keys, self._connect)
        else:
            # Hosts that take no part in the distribution serve no ssh.
            ssh.write_client_files(self._directory, self._shell.ssh, [peer for peer in peers if peer.ssh_port])

    def close(self) -> None:
        """End sshd."""
        if self.server is not None:
            self.server.close()
