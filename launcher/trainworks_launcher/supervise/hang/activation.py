"""When a host is watched for a hang, and with what. The rest of the room is loaded only then.

Most jobs print something before, and a short one never needs the code.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.supervise.control import Role
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.outcome.outcome import Outcome
from trainworks_launcher.supervise.processes.command import Running

if TYPE_CHECKING:
    from trainworks_launcher.supervise.hang.detector import Watch
    from trainworks_launcher.supervise.hang.start import Start

MESSAGE = "hang"
"""The kind of this room's messages on the control channel; ``watch`` has the table of them."""


def needs_stacks(plan: NodePlan, environment: Environment) -> bool:
    """Return whether every Python of the job has to answer with its stacks:
    where no py-spy can read them.
    """
    return bool(plan.limits.hang) and not _py_spy_of(environment)


class Lookout:
    """Waits until a look may be needed. Every method runs in the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        plan: NodePlan,
        environment: Environment,
        running: Running,
        told: Mapping[str, str],
        report: Callable[[Outcome], None],
        log: Callable[[str], None],
        mask: Callable[[str], str],
    ) -> None:
        """Nothing happens before ``begin``.

        Args:
            loop: The loop of the attempt.
            plan: The plan of the host.
            environment: What was read on the host.
            running: The command and the ranks of the host.
            told: Variables of the job's processes.
            report: Ends the job.
            log: Prints a line.
            mask: Hides secrets in a text.
        """
        self._running = running
        self._loop = loop
        self._plan = plan
        self._environment = environment
        self._told = told
        self._report = report
        self._log = log
        self._mask = mask
        self._role: Role | None = None
        self._started = 0.0
        self._watch: Watch | None = None
        self._start: Start | None = None

    def begin(self, role: Role) -> None:
        """The job starts now: also on a host whose ranks another host starts."""
        self._started = time.monotonic()
        self._role = role
        self._loop.after(self._plan.limits.hang * names.HANG_FIRST_LOOK, self._look_now)
        several = self._plan.processes > 1 or self._plan.control is not None
        if several and self._plan.role != "worker":
            self._loop.after(names.START_LOOK_SECONDS, self._look_at_start)

    def end(self) -> None:
        """The job ends, or is being stopped: look no more."""
        self._role = None
        if self._watch is not None:
            self._watch.end()
        if self._start is not None:
            self._start.end()

    @property
    def of_start(self) -> str:
        """Where the leader saw ranks last that had not found each other.

        ``""``: they have, or it has not looked.
        """
        return self._start.last_words if self._start is not None else ""

    @property
    def idle(self) -> float:
        """Seconds between two looks that showed no sign of progress, in all."""
        return self._watch.idle if self._watch is not None else 0.0

    def told(self, host: str, message: Mapping[str, Json]) -> None:
        """Another host says something about a hang; its limit may be shorter than ours."""
        self._look_now()
        if self._start is not None:
            self._start.told(host, message)
        if self._watch is not None:
            self._watch.told(host, message)

    def _look_at_start(self) -> None:
        """Ask every host whether its ranks have found each other.

        A job that ended before needs none of this.
        """
        self._look_now()
        if self._start is not None and self._role is not None:
            self._start.ask()

    def _look_now(self) -> None:
        role = self._role
        if self._watch is not None or role is None:
            return
        from trainworks_launcher.supervise.hang.detector import Surroundings, Watch
        from trainworks_launcher.supervise.hang.sampling import Eyes, Root
        from trainworks_launcher.supervise.hang.start import Start

        given = self._environment.variables
        around = Surroundings(
            host=self._plan.host,
            member=self._plan.member or self._plan.host,
            leader=self._plan.role != "worker",
            limit=self._plan.limits.hang,
            fails=given.get(names.HANG_VARIABLE, "").strip() == "fail",
            output=Path(self._environment.output, names.HANG_DIRECTORY),
            roots=lambda: [Root(*pair) for pair in self._what_runs()],
            printed=self._printed,
            others=role.others,
            tell=lambda fields: role.tell(MESSAGE, "", **fields),
            end=self._report,
            log=self._log,
            mask=self._mask,
            searching=lambda: self._start is not None and self._start.searching,
        )
        heartbeat = given.get(names.HEARTBEAT_FILE_VARIABLE, "").strip()
        file = str(Path(self._plan.cwd, heartbeat)) if heartbeat else ""
        told, name = (
            self._told,
            next((name for name in names.RECORDER_FILES if name in self._told), ""),
        )
        recorder = (
            told.get(names.RECORDER_PIPE, ""),
            str(Path(self._plan.cwd, told[name])) if name else "",
            told.get("NCCL_RAS_ADDR", ""),
        )
        # Once more: a requirement of the job may have brought it.
        eyes = Eyes(_py_spy_of(self._environment), file, *recorder)
        self._watch = Watch(self._loop, eyes, around)
        self._start = Start(self._loop, eyes, around, self._started)
        self._watch.begin(self._started)

    def _what_runs(self) -> list[tuple[int, int]]:
        """Return (rank, process id) of the ranks of this host, or of its only program."""
        ranks = self._running.ranks.all if self._running.ranks is not None else ()
        running = [(rank.number, rank.pid) for rank in ranks if rank.is_running()]
        if not running and self._running.is_active:
            return [(self._plan.rank, self._running.pid)]
        return running

    def _printed(self) -> float:
        ranks = self._running.ranks.all if self._running.ranks is not None else ()
        tails = [rank.tail for rank in ranks]
        tails.append(self._running.tail)
        return max(tail.added_at for tail in tails)


def _py_spy_of(environment: Environment) -> str:
    """Return the path of py-spy, of the job's PATH or beside its Python; "" if it is not there."""
    beside = os.path.dirname(environment.programs.get("python", ""))  # noqa: PTH120
    path = os.pathsep.join(filter(None, (environment.variables.get("PATH", ""), beside)))
    return shutil.which("py-spy", path=path) or ""
