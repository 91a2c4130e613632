"""Runs one host's plan with real processes, and ends it truthfully.

One thread waits for everything at once: signals, children, the control channel, deadlines. The order of a job is
prepare (unpack, install) on every host at once, then all start together, then all end together with one outcome.

PID 1 duties: orphans are reaped, stop signals are handed on. A stop signal goes to the ranks themselves, which have
the grace of ``Limits.stop_grace``, and KILL after it. What we start is in a session of its own and is ended with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import traceback
from pathlib import Path
from typing import Callable, Mapping, Sequence

from trainworks_launcher import control, names, output, preparation, processes
from trainworks_launcher.environment import Environment
from trainworks_launcher.errors import RefusalError
from trainworks_launcher.loop import READ, Loop
from trainworks_launcher.outcome import (
    FAILED,
    STOPPED,
    SUCCEEDED,
    Outcome,
    describe_status,
    exit_status,
    failure_text,
    shorten,
    torchrun_report,
)
from trainworks_launcher.plan import NodePlan
from trainworks_launcher.processes import Child

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_plan(plan: NodePlan, environment: Environment) -> int:
    """Run the plan to the job's end; the exit status. Writes output/failure or output/success, and log lines."""
    return _Supervisor(plan, environment).run()


class _Supervisor:
    """The state of one run. Every method runs in the loop's thread."""

    def __init__(self, plan: NodePlan, environment: Environment) -> None:
        self._plan = plan
        self._base = environment.base_directory
        self._launcher = (environment.launcher_python, "-I")
        self._launcher_directory = environment.launcher_directory
        self._loop = Loop()
        self._directory = Path(tempfile.mkdtemp(prefix="trainworks-"))
        self._env: Mapping[str, str] = {
            **environment.variables,
            **plan.env,
            names.RUNTIME_DIRECTORY_VARIABLE: str(self._directory),
        }
        self._command: Child | None = None
        self._when_ended: Callable[[int], None] = lambda _: None
        self._steps: list[preparation.Step] = []
        self._role: control.Alone | control.Leader | control.Worker | None = None
        self._ssh_server: object | None = None
        self._leader_key = ""
        self._leader_address = ""
        self._local_address = ""
        self._went = False
        self._stop_signal = 0
        self._outcome: Outcome | None = None
        self._leaving = False

    # ------------------------------------------------------------------------------------------------- the run itself
    def run(self) -> int:
        """Everything, in order, and cleaned up whatever happens."""
        output.clear_outcome_files(self._base)
        receiver, sender = socket.socketpair()
        receiver.setblocking(False)
        sender.setblocking(False)
        kept_handlers = {number: signal.signal(number, _ignore) for number in (*_STOP_SIGNALS, signal.SIGCHLD)}
        kept_descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            self._loop.watch(receiver, READ, lambda _: self._signals(receiver))
            self._guard(self._begin)
            self._loop.run()
        except Exception:  # noqa: BLE001  (the outermost frame: a defect of ours must not end a job without a word)
            self._broken(traceback.format_exc())
        finally:
            self._clean_up()
            signal.set_wakeup_fd(kept_descriptor)
            for number, handler in kept_handlers.items():
                signal.signal(number, handler)
            receiver.close()
            sender.close()
        outcome = self._outcome or Outcome(
            FAILED, names.EXIT_LAUNCHER, self._plan.host, "the launcher lost its outcome"
        )
        output.log(_last_words(outcome))
        return outcome.status

    def _broken(self, trace: str) -> None:
        """A defect of the launcher: an outcome of its own kind, with the traceback for the report."""
        output.log(trace)
        text = f"{trace.splitlines()[-1]}\nthe launcher itself failed; please report this\n{trace}"
        self._outcome = Outcome(FAILED, names.EXIT_LAUNCHER, self._plan.host, shorten(text))
        output.write_outcome_files(self._base, self._outcome)

    def _guard(self, action: Callable[[], None]) -> None:
        """Do something that may be refused; a refusal is this host's failure, and with it the job's."""
        try:
            action()
        except RefusalError as refusal:
            self._report(Outcome(FAILED, refusal.status, self._plan.host, str(refusal)))

    def _begin(self) -> None:
        self._directory.joinpath("ranks").mkdir()
        document = json.dumps({"cwd": self._plan.cwd, "env": dict(self._env)})
        _write_private(self._directory / "environment.json", document)
        self._role = self._make_role()
        self._role.begin()

    def _make_role(self) -> control.Alone | control.Leader | control.Worker:
        plan = self._plan
        events = control.Events(
            welcome=lambda key, leader, own: self._guard(lambda: self._welcome(key, leader, own)),
            peers=lambda peers: self._guard(lambda: self._peers(peers)),
            go=self._go,
            stop=self._stop_from_other_host,
            finish=self._finish,
            left=self._loop.stop,
            log=output.log,
        )
        if plan.control is None:
            return control.Alone(events)
        key = ""
        if plan.shell is not None:
            from trainworks_launcher import ssh

            file = "user_key" if plan.role == "leader" else "host_key"
            key = ssh.make_key(plan.shell.ssh_keygen, self._directory / file)
        if plan.role == "leader":
            return control.Leader(self._loop, plan.control, plan.limits, plan.mode, key, events)
        output.log(f"joining {plan.control.leader} on port {plan.control.port}")
        return control.Worker(self._loop, plan.control, plan.limits, plan.mode, plan.host, key, events)

    # ---------------------------------------------------------------------------------------------------- preparation
    def _welcome(self, leader_key: str, leader_address: str, local_address: str) -> None:
        """The control channel stands: prepare this host, while the others prepare theirs."""
        self._leader_key, self._leader_address, self._local_address = leader_key, leader_address, local_address
        self._steps = list(preparation.steps(self._plan, self._launcher, self._launcher_directory))
        self._next_step()

    def _next_step(self) -> None:
        if self._outcome is not None or self._stop_signal:
            return
        if not self._steps:
            self._guard(self._serve_ssh)
            return
        step = self._steps.pop(0)
        output.log(step.what)
        directory = self._plan.cwd if Path(self._plan.cwd).is_dir() else self._base
        self._start(step.argv, directory, lambda code: self._step_ended(step.what, code), names.EXIT_PREPARATION)

    def _step_ended(self, what: str, code: int) -> None:
        if code == 0 and not self._stop_signal:
            self._next_step()
            return
        kind = STOPPED if self._stop_signal else FAILED
        status = 128 + self._stop_signal if self._stop_signal else names.EXIT_PREPARATION
        self._report(Outcome(kind, status, self._plan.host, self._text(what, code)))

    def _serve_ssh(self) -> None:
        """Prepared: start sshd where the mode needs it, and say so."""
        port = 0
        if self._plan.shell is not None and self._plan.role == "worker":
            from trainworks_launcher import ssh

            server = ssh.Server(
                self._plan.shell.sshd,
                self._directory,
                self._local_address,
                self._leader_key,
                self._leader_address,
                self._env,
            )
            self._ssh_server = server
            self._loop.watch(server.fileno(), READ, lambda _: self._read_ssh_log(server.fileno()))
            port = server.port
        if self._role is not None:
            self._role.ready(port)

    def _read_ssh_log(self, descriptor: int) -> None:
        """sshd's log is read and dropped: a full pipe would stop it."""
        try:
            chunk = os.read(descriptor, 65536)
        except BlockingIOError:
            return
        if not chunk:
            self._loop.unwatch(descriptor)

    def _peers(self, peers: Sequence[control.Peer]) -> None:
        """All hosts are ready: on the leader of an ssh job, write down where they are."""
        if self._plan.shell is not None:
            from trainworks_launcher import ssh

            # Hosts that take no part in the distribution serve no ssh.
            ssh.write_client_files(self._directory, self._plan.shell.ssh, [peer for peer in peers if peer.ssh_port])

    # -------------------------------------------------------------------------------------------------------- running
    def _go(self) -> None:
        """Start the command; a host without one has nothing to fail, and waits for the job's outcome."""
        if self._outcome is not None or self._stop_signal:
            return
        self._went = True
        if not self._plan.argv:
            self._report(Outcome(SUCCEEDED, 0, self._plan.host))
            return
        self._start(self._plan.argv, self._plan.cwd, self._command_ended, names.EXIT_PREPARATION)

    def _start(self, argv: Sequence[str], cwd: str, when_ended: Callable[[int], None], status: int) -> None:
        self._when_ended = when_ended
        try:
            self._command = Child(argv, self._environment_of(argv), cwd)
        except OSError as error:
            hint = ""
            if error.errno == 7:  # E2BIG, errno(3)
                hint = "; one argument or variable is longer than the kernel's 128 KiB, or all together are too long"
            text = f"cannot start {argv[0]} in {cwd}: {error.strerror or error}{hint}"
            self._report(Outcome(FAILED, status, self._plan.host, text))

    def _environment_of(self, argv: Sequence[str]) -> Mapping[str, str]:
        """The environment of a command. mpirun's own files go to the runtime directory and are removed with it: what a
        killed job leaves in /tmp makes the next one fail if process ids repeat, as they do in containers. The ranks
        keep the user's TMPDIR (rank.py)."""
        if self._plan.signals == "ranks" and argv == self._plan.argv:
            return {**self._env, "TMPDIR": str(self._directory)}
        return self._env

    def _command_ended(self, code: int) -> None:
        command = self._command
        if code == 0:
            kind = STOPPED if self._stop_signal else SUCCEEDED
            text = "stopped by a signal; the program ended with status 0" if self._stop_signal else ""
            self._report(Outcome(kind, 0, self._plan.host, text))
            if self._outcome is None:
                output.log("this host is done, waiting for the others")
            return
        first_rank = ""
        if self._plan.status_from == "torchrun" and command is not None:
            first_rank, reported = torchrun_report(command.tail.read())
            code = reported or code
        text = output.users_own_failure(self._base) or self._text(_name_of_program(self._plan), code, first_rank)
        kind = STOPPED if self._stop_signal else FAILED
        if self._stop_signal:
            text = f"stopped by {signal.Signals(self._stop_signal).name}\n{text}"
        self._report(Outcome(kind, exit_status(code), self._plan.host, text))

    def _text(self, what: str, code: int, first_rank: str = "") -> str:
        tail = self._command.tail.read() if self._command is not None else b""
        plan = self._plan
        return failure_text(
            what=what,
            host=plan.host,
            mode=plan.mode,
            returncode=code,
            tail=tail,
            processes=plan.processes,
            first_rank=first_rank,
        )

    def _report(self, outcome: Outcome) -> None:
        """This host's end, to whoever decides the job's."""
        if self._role is not None:
            self._role.ended(outcome)
        else:
            self._finish(outcome)

    # -------------------------------------------------------------------------------------------------------- signals
    def _signals(self, receiver: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = receiver.recv(4096)
            if signal.SIGCHLD in numbers:
                self._reap()
            for number in _STOP_SIGNALS:
                if number in numbers:
                    self._stop(number)
                    if self._role is not None:
                        self._role.stopping()

    def _reap(self) -> None:
        """Note our own child's end; as PID 1, also take the status of every orphan that became ours."""
        command = self._command
        if os.getpid() == 1:
            processes.reap_orphans((command.pid if command is not None else 0, getattr(self._ssh_server, "pid", 0)))
        if command is not None and command.has_just_ended():
            command.drain()
            self._guard(lambda: self._when_ended(command.returncode))
            if self._outcome is not None:
                self._maybe_leave()

    def _stop(self, number: int) -> None:
        """A stop signal, ours or another host's: hand it on, and bound what follows."""
        if self._outcome is not None:
            return
        first = not self._stop_signal
        self._stop_signal = self._stop_signal or number
        if first:
            grace = self._plan.limits.stop_grace
            output.log(f"{signal.Signals(number).name}: passed on; KILL follows in {grace:g} s")
            self._loop.after(grace, self._kill)
        self._signal_processes(number)
        if not self._went and (self._command is None or not self._command.running):
            text = f"stopped by {signal.Signals(self._stop_signal).name} before the program was started"
            self._report(Outcome(STOPPED, 128 + self._stop_signal, self._plan.host, text))

    def _stop_from_other_host(self) -> None:
        """Another host was stopped. Once only: a second signal would cut short what the first one started."""
        if not self._stop_signal:
            self._stop(signal.SIGTERM)

    def _signal_processes(self, number: int) -> None:
        """Send a signal to those who are meant to get it."""
        command = self._command
        ranks = processes.noted_ranks(self._directory)
        for pid in ranks:
            processes.send(pid, number)
        if command is None or not command.running:
            return
        if self._plan.signals == "ranks" and ranks:
            return
        children = processes.children_of(command.pid) if self._plan.signals == "children" else ()
        for pid in children:
            processes.send(pid, number)
        if not children:
            command.signal_group(number)

    def _kill(self) -> None:
        """The grace is over."""
        command = self._command
        if command is not None and command.running:
            output.log("the grace is over: KILL")
            if self._plan.signals == "ranks":
                # mpirun is told first, so that its daemons on the other hosts end too.
                command.signal(signal.SIGTERM)
                self._loop.after(names.FAILURE_GRACE_SECONDS, lambda: command.signal_group(signal.SIGKILL))
            else:
                for pid in processes.children_of(command.pid):
                    processes.send(pid, signal.SIGKILL)
                command.signal_group(signal.SIGKILL)
        for pid in processes.noted_ranks(self._directory):
            processes.send(pid, signal.SIGKILL)
        self._loop.after(names.KILL_LIMIT_SECONDS, self._abandon)

    def _abandon(self) -> None:
        """KILL did not end the command: it hangs inside the kernel. The job ends without it."""
        command = self._command
        if command is not None and command.running:
            output.log(f"process {command.pid} does not end after KILL; leaving without it")
            self._command = None
            text = f"{_name_of_program(self._plan)} did not end {names.KILL_LIMIT_SECONDS:g} s after KILL"
            self._report(Outcome(FAILED, 128 + signal.SIGKILL, self._plan.host, text))
            if self._outcome is not None:
                self._maybe_leave()

    # -------------------------------------------------------------------------------------------------------- the end
    def _finish(self, outcome: Outcome) -> None:
        """The job's outcome is known: end what still runs, then leave together with the others."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        command = self._command
        if command is not None and command.running:
            self._signal_processes(signal.SIGTERM)
            if self._plan.signals != "group":
                command.signal(signal.SIGTERM)
            self._loop.after(names.FAILURE_GRACE_SECONDS, self._kill)
        self._maybe_leave()

    def _maybe_leave(self) -> None:
        if self._leaving or (self._command is not None and self._command.running):
            return
        self._leaving = True
        if self._outcome is not None:
            output.write_outcome_files(self._base, self._outcome)
        if self._role is not None:
            self._role.leave()
        else:
            self._loop.stop()

    def _clean_up(self) -> None:
        """End every process and remove every file that the run made."""
        command = self._command
        if command is not None and command.running:
            command.kill()
        for pid in processes.noted_ranks(self._directory):
            processes.send(pid, signal.SIGKILL)
        server = self._ssh_server
        if server is not None:
            close: Callable[[], None] = server.close  # type: ignore[attr-defined]
            close()
        if self._role is not None:
            self._role.close()
        self._loop.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _ignore(number: int, frame: object) -> None:
    """A handler that does nothing: the wake-up descriptor carries the signal into the loop."""


def _write_private(path: Path, text: str) -> None:
    """Write a file that nobody else can read: it holds the whole environment."""
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)


def _name_of_program(plan: NodePlan) -> str:
    """The user's program for a sentence."""
    return plan.env.get("SM_USER_ENTRY_POINT") or (plan.argv[0] if plan.argv else "the program")


def _last_words(outcome: Outcome) -> str:
    """The log line that ends a job."""
    if outcome.kind == SUCCEEDED:
        return "job succeeded on every host"
    first = outcome.text.splitlines()[0] if outcome.text else describe_status(outcome.status)
    return f"job {outcome.kind} (exit status {outcome.status}, host {outcome.host}): {first}"
