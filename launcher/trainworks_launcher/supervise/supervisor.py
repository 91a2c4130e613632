"""Runs one host's plan with real processes, and ends it truthfully.

One thread waits for everything at once: signals, children, the control channel, deadlines. The order of a job is
prepare (unpack, install) on every host at once, then all start together, then all end together with one outcome.

PID 1 duties: orphans are reaped, stop signals are handed on. A stop signal goes to the ranks themselves, which have
the grace of ``Limits.stop_grace``, and KILL after it. What we start is in a session of its own and is ended with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Mapping, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.masking import Masker
from trainworks_launcher.contract.stop_signals import STOP_SIGNALS
from trainworks_launcher.contract.values import Json
from trainworks_launcher.given import places
from trainworks_launcher.given.environment import Environment, look_again, report_directory
from trainworks_launcher.job.job import make_job
from trainworks_launcher.plan.modes import plan_host
from trainworks_launcher.plan.plan import Auxiliary, NodePlan
from trainworks_launcher.supervise import control, hooks
from trainworks_launcher.supervise.children import output, processes
from trainworks_launcher.supervise.children.auxiliary import Auxiliaries
from trainworks_launcher.supervise.children.processes import Child
from trainworks_launcher.supervise.children.runtime import NoRuntime, Runtime
from trainworks_launcher.supervise.hang import lookout
from trainworks_launcher.supervise.hang.lookout import Lookout
from trainworks_launcher.supervise.loop import READ, Loop
from trainworks_launcher.supervise.outcome.outcome import (
    FAILED,
    STOPPED,
    SUCCEEDED,
    Outcome,
    Suspect,
    describe_status,
    shorten,
)
from trainworks_launcher.supervise.preparation import steps as preparation
from trainworks_launcher.supervise.verdict import outcome_files
from trainworks_launcher.supervise.verdict.verdict import (
    OTHER_HOST_SECONDS,
    OWN_STARTER_SECONDS,
    Verdict,
    last_words,
    name_of_program,
)

if TYPE_CHECKING:
    from trainworks_launcher.supervise.children.ranks import Rank, Ranks
    from trainworks_launcher.supervise.ssh.ssh import Server

_STARTERS = ("mpirun", "torchrun")  # each rank through rank.py
_DRAIN_SECONDS = 0.7
_LOG_SECONDS = 0.05  # between looks into the log of torchrun


def run_plan(
    plan: NodePlan, environment: Environment, refusal: Outcome | None = None, stopped: Sequence[int] = ()
) -> int:
    """Run the plan to the job's end. Writes output/failure or output/success, and log lines.

    Args:
        plan: What this host does.
        environment: What was read on this host.
        refusal: Set if this host cannot take part. It then joins the other hosts only to tell them.
        stopped: Stop signals that came before; read once this run has its own handlers.

    Returns:
        The exit status.
    """
    runtime: Runtime | NoRuntime = NoRuntime()
    made: tuple[str, ...] = ()
    try:
        inherited = {name: value for name, value in environment.variables.items() if name not in plan.left_out}
        runtime = Runtime(inherited, {**plan.env, **hooks.variables(plan, environment)})
        made = () if refusal is not None else places.make(environment.places, environment.home)
    except RefusalError as refused:
        runtime.remove()
        output.log(str(refused))
        runtime = NoRuntime()
        refusal = refusal or Outcome(FAILED, refused.status, plan.host, str(refused))
        limits = plan.limits._replace(join=min(plan.limits.join, names.REFUSAL_LIMIT_SECONDS))
        plan = plan._replace(argv=(), ranks_by="", auxiliaries=(), shell=None, limits=limits)
    return _Supervisor(plan, environment, refusal, runtime, made).run(stopped)


class _Supervisor:
    """The state of one run. Every method runs in the loop's thread."""

    def __init__(
        self,
        plan: NodePlan,
        environment: Environment,
        refusal: Outcome | None,
        runtime: Runtime | NoRuntime,
        made: Sequence[str] = (),
    ) -> None:
        """made: directories of the job that were made for it, and go again if nothing is started."""
        self._plan = plan
        self._refusal = refusal
        self._welcomed = False
        self._environment = environment
        self._base = environment.results
        self._made = made
        # A refusal leaves nothing behind where nobody looks for its report.
        self._reports = (
            self._base if refusal is None else report_directory(environment.base_directory, environment.variables)
        )
        self._launcher = (environment.launcher_python, "-I")
        self._launcher_directory = environment.launcher_directory
        self._loop = Loop()
        self._runtime = runtime
        self._family = processes.Family()
        self._output = output.Output()
        self._masker = Masker(environment.variables, plan.env, environment.hyperparameters)
        several = plan.control is not None or plan.processes > 1
        prefixed = several and environment.variables.get(names.LOG_PREFIX_VARIABLE, "").strip() != "off"
        self._prefix = f"[{plan.host} rank %d] " if prefixed else ""
        self._ranks: Ranks | None = None
        self._verdict = Verdict(plan, self._base, self._masker)
        self._failed: tuple[int, output.Tail] | None = None
        self._command: Child | None = None
        self._when_ended: Callable[[int], None] = lambda _: None
        self._steps: list[preparation.Step] = []
        self._auxiliaries = Auxiliaries(plan.auxiliaries, self._start_auxiliary)
        self._secret = environment.job_secret
        self._lookout = Lookout(self._loop, plan, environment, self._report, self._log, self._masker.text)
        self._heard: dict[str, Callable[[str, Mapping[str, Json]], None]] = {lookout.MESSAGE: self._lookout.told}
        self._role: control.Role | None = None
        self._ssh_server: Server | None = None
        self._leader_key = ""
        self._leader_address = ""
        self._local_address = ""
        self._went = False
        self._stop_signal = 0
        self._stopped_by_other_host = False
        self._outcome: Outcome | None = None
        self._leaving = False

    # ------------------------------------------------------------------------------------------------- the run itself
    def run(self, stopped: Sequence[int]) -> int:
        """Everything, in order, and cleaned up whatever happens."""
        outcome_files.clear(self._base)
        receiver, sender = os.pipe()
        os.set_blocking(receiver, False)
        os.set_blocking(sender, False)
        kept_handlers = {number: signal.signal(number, _ignore) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
        kept_descriptor = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        try:
            self._loop.watch(receiver, READ, lambda _: self._signals(receiver))
            self._stop_signal = next(iter(stopped), 0)  # then nothing is started
            self._guard(self._begin)
            if self._stop_signal:
                self._stop_from_platform(self._stop_signal)
            self._loop.run()
        except Exception:  # noqa: BLE001  (the outermost frame: a defect of ours must not end a job without a word)
            import traceback  # only a defect of ours needs it

            self._broken(traceback.format_exc())
        finally:
            self._clean_up()
            signal.set_wakeup_fd(kept_descriptor)
            for number, handler in kept_handlers.items():
                signal.signal(number, handler)
            os.close(receiver)
            os.close(sender)
        return self._outcome.status if self._outcome is not None else names.EXIT_LAUNCHER

    def _log(self, message: str) -> None:
        """One line of ours, without secrets; never blocks."""
        self._output.log(self._masker.text(message))

    def _broken(self, trace: str) -> None:
        """A defect of the launcher: an outcome of its own kind, with the traceback for the report."""
        self._log(trace)
        text = f"{trace.splitlines()[-1]}\nthe launcher itself failed; please report this\n{trace}"
        self._outcome = Outcome(FAILED, names.EXIT_LAUNCHER, self._plan.host, shorten(text))
        outcome_files.write(self._reports, self._outcome, self._masker, self._plan.mode)

    def _guard(self, action: Callable[[], None]) -> None:
        """Do something that may be refused; a refusal is this host's failure, and with it the job's."""
        try:
            action()
        except RefusalError as refusal:
            self._report(Outcome(FAILED, refusal.status, self._plan.host, str(refusal)))

    def _begin(self) -> None:
        for name in self._runtime.by_file:
            self._log(f"{name} is too long for the kernel: {name}{names.FILE_SUFFIX} names a file with its value")
        if self._plan.ranks_by in _STARTERS:
            self._runtime.write_rank_environment(self._plan.cwd, self._plan.hidden_from_ranks)
            from trainworks_launcher.supervise.children.ranks import Ranks  # its sockets cost a plain script too much

            self._ranks = Ranks(
                self._loop, self._runtime.path, self._output, self._prefix_of, self._rank_started, self._rank_ended
            )
            self._verdict.ranks = self._lookout.ranks = self._ranks
        self._role = self._make_role()
        self._role.begin()

    def _make_role(self) -> control.Role:
        plan = self._plan
        events = control.Events(
            welcome=lambda key, leader, own: self._guard(lambda: self._welcome(key, leader, own)),
            peers=lambda peers: self._guard(lambda: self._peers(peers)),
            go=self._go,
            stop=self._stop_from_other_host,
            restart=self._restart_ranks,
            suspect=self._suspect,
            judge=self._verdict.judge,
            finish=self._finish,
            left=self._loop.stop,
            told=self._told,
            log=self._log,
        )
        if plan.control is None:
            return control.Alone(events)
        from trainworks_launcher.supervise.control.identity import identity_of  # only a job of several hosts needs it

        job = identity_of(self._environment, plan.control, plan.mode)
        key = ""
        if plan.shell is not None:
            from trainworks_launcher.supervise.ssh import ssh

            file = "user_key" if plan.role == "leader" else "host_key"
            key = ssh.make_key(plan.shell.ssh_keygen, self._runtime.path / file)
        if plan.role == "leader":
            from trainworks_launcher.supervise.control.leader import Leader

            return Leader(self._loop, plan.control, plan.limits, job, key, self._secret, events)
        from trainworks_launcher.supervise.control.worker import Worker

        self._log(f"joining {plan.control.leader} on port {plan.control.port}")
        return Worker(self._loop, plan.control, plan.limits, job, plan.member or plan.host, key, self._secret, events)

    def _told(self, host: str, kind: str, message: Mapping[str, Json]) -> None:
        """Another host told something that is not about the start and the end: to the part that knows the kind."""
        hear = self._heard.get(kind)
        if hear is not None:
            hear(host, message)

    # ---------------------------------------------------------------------------------------------------- preparation
    def _welcome(self, leader_key: str, leader_address: str, local_address: str) -> None:
        """The control channel stands: prepare this host, while the others prepare theirs."""
        again, self._welcomed = self._welcomed, True
        if self._refusal is not None:
            self._report(self._refusal)
            return
        self._leader_key, self._leader_address, self._local_address = leader_key, leader_address, local_address
        if not self._check():
            return
        if again:
            # The leader started anew, with a new key; what is prepared here, or is being prepared, stays.
            if self._ssh_server is not None:
                self._ssh_server.admit(leader_key, leader_address)
            return
        self._steps = list(preparation.steps(self._plan, self._launcher, self._launcher_directory))
        self._next_step()

    def _check(self) -> bool:
        """Look at this host, and compare its clock with the leader's; False if it cannot take part.

        What may take longer is a step of the preparation.
        """
        asked = self._plan.checks
        if asked is None:
            return True
        if self._plan.control is not None and self._role is not None:
            from trainworks_launcher.supervise.control.clocks import KIND, Clocks

            clocks = Clocks(self._role, self._plan.host, self._plan.role == "leader", self._log)
            self._heard[KIND] = clocks.heard
            clocks.ask()
        if asked.needs_process:
            return True
        from trainworks_launcher.checks import FAILED as CHECK_FAILED
        from trainworks_launcher.checks.run import line_of, run

        found = run(asked, self._log)
        for finding in found:
            self._log(line_of(finding))
        failed = [str(finding) for finding in found if finding.severity == CHECK_FAILED]
        self._check_failed(failed)
        return not failed

    def _check_ended(self, code: int) -> None:
        """The process that checks this host has found something; a defect of its own does not end a job."""
        from trainworks_launcher.checks.run import failures_in

        failed = failures_in(self._command.tail.read() if self._command is not None else b"")
        self._check_failed(failed)
        if not failed:
            self._log(f"warning: the checks of this host broke off ({describe_status(code)}); please report this")
            self._next_step()

    def _check_failed(self, failed: Sequence[str]) -> None:
        if failed:
            text = "\n".join((f"a check of host {self._plan.host} failed: {failed[0]}", *failed[1:]))
            self._report(Outcome(FAILED, names.EXIT_CHECK, self._plan.host, shorten(text)))

    def _next_step(self) -> None:
        if self._outcome is not None or self._stop_signal:
            return
        if not self._steps:
            self._guard(self._prepared)
            return
        step = self._steps.pop(0)
        self._log(step.what)
        directory = self._plan.cwd if Path(self._plan.cwd).is_dir() else self._base
        self._start(step.argv, directory, lambda code: self._step_ended(step, code), step.status)

    def _step_ended(self, step: preparation.Step, code: int) -> None:
        if code == 0 and not self._stop_signal:
            self._next_step()
            return
        if step.status == names.EXIT_CHECK and not self._stop_signal:
            self._check_ended(code)
            return
        from trainworks_launcher.supervise.preparation.installing import reason_of  # only a failure needs it

        kind = STOPPED if self._stop_signal else FAILED
        status = 128 + self._stop_signal if self._stop_signal else step.status
        what = step.what
        tail = self._command.tail if self._command is not None else output.Tail()
        outcome = self._verdict.of_command(what, code, tail, self._stop_signal)
        reason = "" if self._stop_signal else self._masker.text(reason_of(tail.read(), preparation.kept(self._plan)))
        if reason:
            # A text that begins otherwise begins with the end of a traceback, of a build that pip started.
            rest = outcome.text if outcome.text.startswith(what) else outcome.text.partition("\n")[2]
            outcome = outcome._replace(text=shorten(f"{reason}\n{rest}"), cause=reason)
        self._report(outcome._replace(kind=kind, status=status))

    def _prepared(self) -> None:
        """The code is on this host. If it was fetched, plan again with what it is: what refuses a local archive at the
        start refuses now, and only now is it known what is to be installed."""
        if self._plan.code.fetch:
            self._plan = plan_host(make_job(look_again(self._environment), self._plan.host))
            self._steps = list(preparation.installation(self._plan))
            if self._steps:
                self._next_step()
                return
        self._serve_ssh()

    def _serve_ssh(self) -> None:
        """Prepared: start sshd where the mode needs it, and say so."""
        port = 0
        if self._plan.shell is not None and self._plan.role == "worker":
            from trainworks_launcher.supervise.ssh import ssh

            server = ssh.Server(
                self._plan.shell.sshd,
                self._runtime.path,
                self._local_address,
                self._leader_key,
                self._leader_address,
                self._runtime.env,
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
        if self._plan.shell is not None and self._plan.shell.mounted:
            self._use_mounted_keys(self._plan.shell.ssh)
        elif self._plan.shell is not None:
            from trainworks_launcher.supervise.ssh import ssh

            # Hosts that take no part in the distribution serve no ssh.
            ssh.write_client_files(self._runtime.path, self._plan.shell.ssh, [peer for peer in peers if peer.ssh_port])

    def _use_mounted_keys(self, program: str) -> None:
        """Write down how the hosts are reached that only serve ssh; they may come up later than this one."""
        from trainworks_launcher.supervise.ssh import mounted_keys

        connect = (*self._launcher, f"{self._launcher_directory}/programs/connect.py", f"{self._plan.limits.join:g}")
        mounted_keys.write_client_files(self._runtime.path, program, mounted_keys.required(), connect)

    # -------------------------------------------------------------------------------------------------------- running
    def _go(self) -> None:
        """Start the command; a host without one has nothing to fail, and waits for the job's outcome."""
        if self._outcome is not None or self._stop_signal:
            return
        self._went = True
        self._verdict.started_at = time.time()
        if self._role is not None:
            self._lookout.begin(self._role)
        if not self._plan.argv:
            self._report(Outcome(SUCCEEDED, 0, self._plan.host))
            return
        try:
            self._auxiliaries.start()
        except OSError as error:
            text = f"cannot start the process beside the program: {error}"
            self._report(Outcome(FAILED, names.EXIT_PREPARATION, self._plan.host, text))
            return
        self._start(self._plan.argv, self._plan.cwd, self._command_ended, names.EXIT_PREPARATION)

    def _start(self, argv: Sequence[str], cwd: str, when_ended: Callable[[int], None], status: int) -> None:
        self._when_ended = when_ended
        try:
            raw = (self._ranks is None and not self._plan.auxiliaries) or argv != self._plan.argv
            prefix = None if raw else b""
            if self._plan.rank >= 0 and argv == self._plan.argv:
                prefix = self._prefix_of(self._plan.rank)
            self._command = Child(argv, self._environment_of(argv), cwd, self._output, prefix)
            self._lookout.command = self._command
        except OSError as error:
            text = f"cannot start {argv[0]} in {cwd}: {processes.why_not_started(argv[0], cwd, error)}"
            self._report(Outcome(FAILED, status, self._plan.host, text))

    def _start_auxiliary(self, row: Auxiliary) -> Child:
        self._log(f"starting the {row.name}")
        prefix = f"[{row.name}] ".encode()
        return Child(row.argv, {**self._runtime.env, **row.env}, self._plan.cwd, self._output, prefix)

    def _auxiliary_failed(self, row: Auxiliary, child: Child) -> None:
        """The programs that it served would wait for it for ever."""
        self._report(self._verdict.of_command(f"the {row.name}", child.returncode, child.tail))

    def _environment_of(self, argv: Sequence[str]) -> Mapping[str, str]:
        """Return the environment of a command.

        mpirun's own files go to the runtime directory and are removed with it. What a killed job leaves in /tmp makes
        the next one fail if process ids repeat, as they do in containers. The ranks keep the user's TMPDIR (rank.py).
        """
        if argv != self._plan.argv:
            return self._runtime.env
        hidden = self._plan.hidden
        seen = {name: value for name, value in self._runtime.env.items() if not name.startswith(hidden)}
        return {**seen, "TMPDIR": str(self._runtime.path)} if self._plan.ranks_by == "mpirun" else seen

    def _command_ended(self, code: int) -> None:
        lost = "" if self._stop_signal or self._command is None else self._verdict.lost_daemon(self._command.tail)
        if code == 0 and not lost:
            kind = STOPPED if self._stop_signal else SUCCEEDED
            text = "stopped by a signal; the program ended with status 0" if self._stop_signal else ""
            self._report(Outcome(kind, 0, self._plan.host, text))
            if self._outcome is None:
                self._log("this host has finished; it waits for the others")
            return
        tail = self._command.tail if self._command is not None else output.Tail()
        report = self._verdict.reported(tail)
        outcome = self._verdict.of_command(name_of_program(self._plan), code, tail, self._stop_signal)
        if self._stop_signal:
            self._report(outcome)
        elif self._ranks is not None and report.rank >= 0 and not self._verdict.knows(report.rank):
            # mpirun has told the leader before the rank's own host did.
            self._failed = (code, tail)
            self._loop.after(OTHER_HOST_SECONDS, lambda: self._report_failure(code, tail))
        elif self._verdict.another_host_knows(outcome):
            # The host of the rank that broke the connection tells why; if that host is lost, nobody does.
            # A torchrun that the user's script started takes seconds to end after it has seen a failure.
            own = self._ranks is None and report.rank >= 0
            seconds = OWN_STARTER_SECONDS if own else OTHER_HOST_SECONDS
            self._loop.after(seconds, lambda: self._report_failure(code, tail))
        else:
            self._report(outcome)

    def _report_failure(self, code: int, tail: output.Tail) -> None:
        self._failed = None
        if self._outcome is None:
            name = name_of_program(self._plan)
            self._report(self._verdict.of_command(name, code, tail, self._stop_signal))

    # ---------------------------------------------------------------------------------------------------------- ranks
    def _prefix_of(self, rank: int) -> bytes:
        """Return what the lines of a rank start with."""
        return (self._prefix % rank).encode() if self._prefix else b""

    def _rank_started(self, rank: Rank) -> None:
        """A rank that comes after a stop signal or the job's end: torchrun tries again, or mpirun was still starting.
        Both are told to give up."""
        if self._ranks is not None and self._ranks.begin_again(rank):
            self._verdict.forget()
        if self._stop_signal or self._outcome is not None:
            processes.send(rank.pid, signal.SIGTERM)
            if self._command is not None:
                self._command.signal(signal.SIGTERM)

    def _rank_ended(self, rank: Rank) -> None:
        """The end of a rank was seen, mostly before the command that started it says anything: tell the leader."""
        if self._stop_signal or self._outcome is not None or self._ranks is None or self._role is None:
            return
        self._ranks.take()
        suspect = self._verdict.of_rank(rank)
        if suspect is not None:
            self._role.suspect(suspect)
        if rank.status is None and self._plan.ranks_by == "torchrun" and self._command is not None:
            self._ask_torchrun(rank, self._command.tail)

    def _ask_torchrun(self, rank: Rank, tail: output.Tail) -> None:
        """Torchrun took the status of a rank before this launcher saw it: it logs it, long before it ends itself."""
        from trainworks_launcher.supervise.outcome.starters import torchrun_status  # only a failure needs it

        rank.status = torchrun_status(tail.read(), rank.pid)
        if rank.status is not None:
            self._rank_ended(rank)
        elif self._outcome is None and time.monotonic() < rank.ended_at + OTHER_HOST_SECONDS:
            self._loop.after(_LOG_SECONDS, lambda: self._ask_torchrun(rank, tail))

    def _suspect(self, suspect: Suspect) -> None:
        """Some host says that a rank of it has ended."""
        self._verdict.add(suspect)
        if self._failed is not None:
            code, tail = self._failed
            if self._verdict.knows(self._verdict.reported(tail).rank):
                self._report_failure(code, tail)

    def _report(self, outcome: Outcome) -> None:
        """This host's end, to the role that decides the job's."""
        if self._role is not None:
            self._role.ended(outcome)
        else:
            self._finish(outcome)

    # -------------------------------------------------------------------------------------------------------- signals
    def _signals(self, receiver: int) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(receiver, 4096)
            if signal.SIGCHLD in numbers:
                self._reap()
            for number in STOP_SIGNALS:
                if number in numbers:
                    self._stop_from_platform(number)

    def _reap(self) -> None:
        """Note our own child's end; as PID 1, also take the status of every orphan that became ours."""
        command = self._command
        ended = command is not None and command.has_just_ended()
        for row, child in self._auxiliaries.failures():
            self._auxiliary_failed(row, child)
        if self._ssh_server is not None and self._ssh_server.has_just_ended():
            self._log("the job's sshd has ended; what it has started goes on")
        own = [child.pid for child in (command, self._ssh_server) if child is not None]
        self._family.reap((*own, *self._auxiliaries.pids))
        if command is not None and ended:
            command.drain()
            if self._ranks is not None:
                self._ranks.drain(_DRAIN_SECONDS)
            self._guard(lambda: self._when_ended(command.returncode))
            if self._outcome is not None:
                self._maybe_leave()

    def _stop(self, number: int) -> None:
        """A stop signal, ours or another host's: hand it on, and bound what follows."""
        if self._outcome is not None:
            return
        self._lookout.end()
        first = not self._stop_signal
        self._stop_signal = self._stop_signal or number
        if first:
            grace = self._plan.limits.stop_grace
            self._log(f"{signal.Signals(number).name}: passed on; KILL follows in {grace:g} s")
            self._loop.after(grace, self._kill)
        self._signal_processes(number)
        if not self._went and (self._command is None or not self._command.running):
            text = f"stopped by {signal.Signals(self._stop_signal).name} before the program was started"
            self._report(Outcome(STOPPED, 128 + self._stop_signal, self._plan.host, text))

    def _stop_from_platform(self, number: int) -> None:
        """A stop signal to this container. Every container gets one: if another host's came first, the ranks have had
        theirs. A further one is passed on, because it is meant."""
        passed_on = self._stopped_by_other_host
        self._stopped_by_other_host = False
        if not passed_on:
            self._stop(number)
        if self._role is not None:
            self._role.stopping()

    def _stop_from_other_host(self) -> None:
        """Another host was stopped. Once only: a second signal would cut short what the first one started."""
        if not self._stop_signal:
            self._stopped_by_other_host = True
            self._stop(signal.SIGTERM)

    def _signal_processes(self, number: int) -> None:
        """Send a signal to those who are meant to get it."""
        ranks = self._running_ranks()
        for pid in ranks:
            processes.send(pid, number)
        if not ranks and self._command is not None and self._command.running:
            self._command.signal_group(number)

    def _restart_ranks(self) -> None:
        """Another host is lost and the job goes on: end the ranks of this host.

        They may wait for the lost ones until their own time-outs. torchrun starts new ones, in a group without that
        host.
        """
        if self._outcome is None and not self._stop_signal:
            for pid in self._running_ranks():
                processes.send(pid, signal.SIGKILL)

    def _kill(self) -> None:
        """The grace is over."""
        command = self._command
        if command is not None and command.running:
            self._log("the grace period is over: KILL")
            self._verdict.killed = True
            if self._plan.ranks_by and self._outcome is None:
                # It is told first, so that mpirun's daemons on the other hosts end too. With an outcome it was told.
                command.signal(signal.SIGTERM)
                self._loop.after(names.FAILURE_GRACE_SECONDS, lambda: command.signal_group(signal.SIGKILL))
            else:
                command.signal_group(signal.SIGKILL)
        self._kill_ranks()
        self._loop.after(names.KILL_LIMIT_SECONDS, self._abandon)

    def _kill_ranks(self) -> None:
        for pid in self._running_ranks():
            processes.send(pid, signal.SIGKILL)

    def _running_ranks(self) -> tuple[int, ...]:
        if self._ranks is not None:
            return self._ranks.running()
        command = self._command
        if self._plan.ranks_by and command is not None and command.running:
            return processes.children_of(command.pid)
        return ()

    def _abandon(self) -> None:
        """KILL did not end the command: it hangs inside the kernel. The job ends without it."""
        command = self._command
        if command is not None and command.running:
            self._log(f"process {command.pid} does not end after KILL; leaving without it")
            self._command = None
            text = f"{name_of_program(self._plan)} did not end {names.KILL_LIMIT_SECONDS:g} s after KILL"
            self._report(Outcome(FAILED, 128 + signal.SIGKILL, self._plan.host, text))
            if self._outcome is not None:
                self._maybe_leave()

    # -------------------------------------------------------------------------------------------------------- the end
    def _finish(self, outcome: Outcome) -> None:
        """The job's outcome is known: end what still runs, then leave together with the others."""
        if self._outcome is not None:
            return
        # A host that refuses, and reaches no other host, still has its own reason.
        self._outcome = self._refusal if self._refusal is not None and not self._welcomed else outcome
        self._lookout.end()
        command = self._command
        if command is not None and command.running:
            self._signal_processes(signal.SIGTERM)
            if self._plan.ranks_by:
                command.signal(signal.SIGTERM)
            self._loop.after(names.FAILURE_GRACE_SECONDS, self._kill)
        self._maybe_leave()

    def _maybe_leave(self) -> None:
        if self._leaving or (self._command is not None and self._command.running):
            return
        self._leaving = True
        self._auxiliaries.end()
        if self._outcome is not None:
            outcome_files.write(self._reports, self._outcome, self._masker, self._plan.mode)
        if self._role is not None:
            self._role.leave()
        else:
            self._loop.stop()

    def _clean_up(self) -> None:
        """End every process and remove every file that the run made."""
        command = self._command
        if command is not None and command.running:
            command.kill()
        self._auxiliaries.end()
        self._kill_ranks()
        if self._ssh_server is not None:
            self._ssh_server.close()
        if self._role is not None:
            self._role.close()
        # A process that left our sessions still has the name of our directory in its environment.
        for pid in processes.belonging_to(names.RUNTIME_DIRECTORY_VARIABLE, str(self._runtime.path)):
            processes.send(pid, signal.SIGKILL)
        self._family.end()
        if self._ranks is not None:
            self._ranks.close()
        self._loop.close()
        self._runtime.remove()
        if not self._went:
            places.take_back(self._made)
        outcome = self._outcome or Outcome(FAILED, names.EXIT_LAUNCHER, self._plan.host, "no outcome is known")
        self._log(last_words(outcome))
        self._output.close()


def _ignore(number: int, frame: object) -> None:
    """A handler that does nothing: the wake-up descriptor carries the signal into the loop."""
