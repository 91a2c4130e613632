"""Decide when this host is watched for a hang, and with which options. The other modules are loaded
only then.

Most jobs print something before, and a short job never needs the code.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.supervise.control import Role
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.outcome.outcome import Outcome
from trainworks_launcher.supervise.processes.command import HostCommand

if TYPE_CHECKING:
    from trainworks_launcher.supervise.hang.detector import HangDetector
    from trainworks_launcher.supervise.hang.rendezvous_monitor import RendezvousMonitor

MESSAGE = "hang"
"""The kind of this room's messages on the control channel; ``detector`` has a table of them."""


def needs_stacks(plan: NodePlan, environment: Environment) -> bool:
    """Return whether every Python of the job has to write its own stacks (faulthandler).

    True if hangs are looked for and the image has no py-spy.
    """
    return bool(plan.limits.hang) and not _find_py_spy(environment)


class Handlers(NamedTuple):
    """The supervisor's handlers for what the detector finds.

    Attributes:
        report: Ends the job with an outcome.
        log: Prints a line.
        redact: Hides secrets in a text.
    """

    report: Callable[[Outcome], None]
    log: Callable[[str], None]
    redact: Callable[[str], str]


class HangActivation:
    """Starts the detector when it may be needed. Every method runs in the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        plan: NodePlan,
        environment: Environment,
        running: HostCommand,
        handlers: Handlers,
    ) -> None:
        """Do nothing before ``begin``.

        Args:
            loop: Runs the detector.
            plan: The plan of this host.
            environment: The environment of the launcher.
            running: The command and the ranks of this host.
            handlers: The supervisor's handlers.
        """
        self._running = running
        self._loop = loop
        self._plan = plan
        self._environment = environment
        self._job_variables: Mapping[str, str] = {}
        self._handlers = handlers
        self._role: Role | None = None
        self._started = 0.0  # monotonic clock
        self._detector: HangDetector | None = None
        self._rendezvous: RendezvousMonitor | None = None

    def begin(self, role: Role, job_variables: Mapping[str, str]) -> None:
        """Begin with the job, also on a host for which another host starts the ranks.

        The detector starts after a part of the limit. In a job of several ranks the leader asks
        all hosts after ``names.START_LOOK_SECONDS`` whether their ranks have found each other.

        Args:
            role: This host's side of the control connection.
            job_variables: Variables of the job's processes.
        """
        self._job_variables = job_variables
        self._started = time.monotonic()
        self._role = role
        self._loop.after(self._plan.limits.hang * names.HANG_FIRST_LOOK, self._activate)
        several = self._plan.processes > 1 or self._plan.control is not None
        if several and self._plan.role != "worker":
            self._loop.after(names.START_LOOK_SECONDS, self._check_rendezvous)

    def end(self) -> None:
        """Stop: the job ends, or is being stopped."""
        self._role = None
        if self._detector is not None:
            self._detector.end()
        if self._rendezvous is not None:
            self._rendezvous.end()

    @property
    def rendezvous_state(self) -> str:
        """The sentence about ranks that had not found each other, as of the last look; leader only.

        For example ``60 s after the start the ranks had not found each other: ...``, with the host
        and the line of code of each rank. ``""`` if they had, or if no look has come yet.
        """
        if self._rendezvous is None:
            return ""
        return self._rendezvous.last_words

    @property
    def idle(self) -> float:
        """Seconds between two samples without progress, in all."""
        if self._detector is None:
            return 0.0
        return self._detector.idle

    def receive(self, host: str, message: Mapping[str, Json]) -> None:
        """Handle a message about a hang from another host; this starts the detector.

        Args:
            host: The sender.
            message: See ``detector`` and ``rendezvous_monitor``.
        """
        # Perhaps before the detector's time: the other host may have a shorter limit.
        self._activate()
        if self._rendezvous is not None:
            self._rendezvous.receive(host, message)
        if self._detector is not None:
            self._detector.receive(host, message)

    def _check_rendezvous(self) -> None:
        """Start the detector, and ask every host whether its ranks have found each other."""
        self._activate()
        if self._rendezvous is not None and self._role is not None:
            self._rendezvous.ask()

    def _activate(self) -> None:
        """Start the detector and the monitor of the rendezvous, once, unless the job has ended."""
        role = self._role
        if self._detector is not None or role is None:
            return
        # Imported late, because a short job never needs them.
        from trainworks_launcher.supervise.hang.detector import DetectorContext, HangDetector
        from trainworks_launcher.supervise.hang.rendezvous_monitor import RendezvousMonitor
        from trainworks_launcher.supervise.hang.sampling import Root, Sampler

        variables = self._environment.variables
        heartbeat = variables.get(names.HEARTBEAT_FILE_VARIABLE, "").strip()
        if heartbeat:
            heartbeat = str(Path(self._plan.cwd, heartbeat))
        sampler = Sampler(
            # Looked for again, because a requirement of the job may have installed py-spy.
            _find_py_spy(self._environment),
            heartbeat,
            pipe=self._job_variables.get(names.RECORDER_PIPE, ""),
            file=self._recorder_file(),
            ras=self._job_variables.get("NCCL_RAS_ADDR", ""),
        )
        roots = self._running_roots
        context = DetectorContext(
            host=self._plan.host,
            member=self._plan.member or self._plan.host,
            leader=self._plan.role != "worker",
            limit=self._plan.limits.hang,
            fails=variables.get(names.HANG_VARIABLE, "").strip() == "fail",
            output=Path(self._environment.output, names.HANG_DIRECTORY),
            roots=lambda: [Root(rank, pid) for rank, pid in roots()],
            printed=self._printed,
            others=role.others,
            tell=lambda fields: role.tell(MESSAGE, "", **fields),
            end=self._handlers.report,
            log=self._handlers.log,
            redact=self._handlers.redact,
            searching=lambda: self._rendezvous is not None and self._rendezvous.searching,
        )
        self._detector = HangDetector(self._loop, sampler, context)
        self._rendezvous = RendezvousMonitor(self._loop, sampler, context, self._started)
        self._detector.begin(self._started)

    def _recorder_file(self) -> str:
        """Return the path of the flight recorder's file, without the rank; "" for none."""
        for name in names.RECORDER_FILES:
            if name in self._job_variables:
                return str(Path(self._plan.cwd, self._job_variables[name]))
        return ""

    def _running_roots(self) -> list[tuple[int, int]]:
        """Return (rank, process id) of each running rank of this host.

        Without one: of the only program, while it runs.
        """
        ranks = self._running.ranks.all if self._running.ranks is not None else ()
        running = [(rank.number, rank.pid) for rank in ranks if rank.is_running()]
        if not running and self._running.is_active:
            return [(self._plan.rank, self._running.pid)]
        return running

    def _printed(self) -> float:
        """Return the time of the last output of this host (monotonic clock); 0.0 for none."""
        ranks = self._running.ranks.all if self._running.ranks is not None else ()
        tails = [rank.tail for rank in ranks]
        tails.append(self._running.tail)
        return max(tail.added_at for tail in tails)


def _find_py_spy(environment: Environment) -> str:
    """Return the path of py-spy, on the job's PATH or beside its Python; ``""`` for none."""
    beside_python = os.path.dirname(environment.programs.get("python", ""))  # noqa: PTH120
    directories = [environment.variables.get("PATH", ""), beside_python]
    path = os.pathsep.join(filter(None, directories))
    return shutil.which("py-spy", path=path) or ""
