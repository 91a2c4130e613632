"""The command ``train``, and the entry point of the image.

``train``                       run this host's part of the job
``train [OPTIONS] -- PROGRAM``  the same, with the program and its arguments instead of the
                                platform's files
``train --plan [--host NAME]``  print the plan of this host (or another one) as JSON and run nothing
``train explain``               the same as a table: each flag and variable, its value, its origin,
                                its reason
``train check``                 check this host as a job does before it starts, and run nothing
``train --version``, ``--help``
anything else                   executed as given: ``docker run IMAGE bash``
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NamedTuple, Sequence

from trainworks_launcher import __version__
from trainworks_launcher.contract import names

if TYPE_CHECKING:
    from trainworks_launcher.command.options import Parsed
    from trainworks_launcher.contract.errors import RefusalError
    from trainworks_launcher.environment.command_line import Invocation
    from trainworks_launcher.environment.environment import Environment
    from trainworks_launcher.job.job import Job
    from trainworks_launcher.plan.plan import NodePlan
    from trainworks_launcher.supervise.outcome.outcome import Outcome

_HELP = """\
usage: train                        run this host's part of the training job
       train [--mode MODE] -- train.py --epochs 3
                                    the same, with the program and its arguments;
                                    no file of a platform is needed
       train --plan                 print what would be run, as JSON; run nothing
       train explain                print every flag and variable, its origin and reason;
                                    run nothing
       train check                  check this host's driver, GPUs, disk and network; run nothing
       train --version | --help | --help all
       PROGRAM [ARGUMENT...]        anything else is executed as given, for example: bash

The hosts of the job come from the platform that starts the command (docs/platforms):
{platforms}
On plain hosts: TRAINWORKS_HOSTS=a,b on all of them, and TRAINWORKS_HOST=a on the host called a.

Without -- PROGRAM files below /opt/ml (moved by SAGEMAKER_BASE_DIR) describe the job:
  input/config/hyperparameters.json   {{"sagemaker_program": "train.py", "epochs": "3"}};
                                      --epochs 3 reaches the script
  input/config/resourceconfig.json    {{"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}};
                                      may be absent
  code/                               the script, and requirements.txt to install before it
A distribution is switched on by --mode, or by a hyperparameter, which the SDK makes of its
`distribution` argument:
{modes}
  {per_host} sets the processes of each host; the default is one per GPU

Try it:  mkdir -p ml/code && echo 'print("hello")' > ml/code/train.py
         SAGEMAKER_PROGRAM=train.py SAGEMAKER_BASE_DIR=$PWD/ml train
         SAGEMAKER_PROGRAM=train.py SAGEMAKER_BASE_DIR=$PWD/ml train explain
To check a job on a laptop, before you pay for a cluster, use trainworks-preflight (docs/jobs.md).

{options}
Exit status: the script's own; 128 + N after signal N. The launcher's own refusals:
  {not_started}  the job's inputs were refused, nothing was started
  {preparation}  code or requirements could not be prepared, or the program could not be started
  {hosts}  a host never came, or was lost
  {check}  a check of a host failed before the program was started
  {hang}  no rank made progress, and TRAINWORKS_HANG is fail
  {launcher}  the launcher itself failed
Settings, by variables (default, meaning){more}:
{settings}
"""


_OWN_WORDS = frozenset(("explain", "check", "preflight"))
"""Words that are commands of the launcher, not programs to execute; ``options`` has their rows."""

_PREFLIGHT = """\
trainworks: preflight is not part of the image: it checks a job on a laptop or in CI.
In a checkout of trainworks:
    pip install ./launcher && trainworks-preflight --help
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status. ``arguments`` defaults to the process's own."""
    _open_streams()
    words: list[str] = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] == "train":
        words = words[1:]
    elif words and not words[0].startswith("-") and words[0] not in _OWN_WORDS:
        return _execute(words)
    end = words.index("--") if "--" in words else len(words)
    words, program = words[:end], words[end:]
    if words[:1] == ["preflight"]:
        sys.stderr.write(_PREFLIGHT)
        return names.EXIT_NOT_STARTED
    if words and not {"--help", "-h"}.isdisjoint((words[0], words[-1])):
        sys.stdout.write(_help(every=words[-1] == "all"))
        return 0
    if words == ["--version"]:
        sys.stdout.write(f"trainworks-launcher {__version__}\n")
        return 0
    if not words and not program:
        return _train()
    from trainworks_launcher.command import options

    try:
        command, parsed, asked = options.read(words, program)
    except options.UsageError as error:
        sys.stderr.write(f"trainworks: {error} (see: train --help)\n")
        return names.EXIT_NOT_STARTED
    if command.name == "check":
        return _check("bandwidth" in parsed)
    return _train(asked) if command is options.TRAIN else _show(command.name, parsed, asked)


_STANDARD_ERROR = 2


def _open_streams() -> None:
    """Open /dev/null for each standard stream that is closed, or the next file
    or pipe would get its number.
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number
        if descriptor > _STANDARD_ERROR:
            os.close(descriptor)
            break
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _columns() -> int:
    """Columns of the terminal; 100 where there is none."""
    import shutil

    return shutil.get_terminal_size((100, 24)).columns


def _help(*, every: bool) -> str:
    import textwrap

    from trainworks_launcher.command import variables
    from trainworks_launcher.command.options import options_help
    from trainworks_launcher.contract.modes import MODES
    from trainworks_launcher.environment.platforms import PLATFORMS

    return _HELP.format(
        modes="\n".join(f"  {row.switch:<50}{row.name}" for row in MODES.values() if row.switch),
        platforms="\n".join(
            textwrap.wrap(", ".join(PLATFORMS), 118, initial_indent="  ", subsequent_indent="  ")
        ),
        per_host=names.PROCESSES_PER_HOST,
        not_started=names.EXIT_NOT_STARTED,
        preparation=names.EXIT_PREPARATION,
        hosts=names.EXIT_HOSTS,
        check=names.EXIT_CHECK,
        hang=names.EXIT_HANG,
        launcher=names.EXIT_LAUNCHER,
        settings=variables.help_of(every=every),
        more="" if every else "; train --help all has the others",
        options=options_help(),
    )


def _execute(words: Sequence[str]) -> int:
    """Become another program; returns only if that fails."""
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        script = os.path.isfile(words[0])  # noqa: PTH113
        hint = (
            "; to train, give no argument or: train" if isinstance(error, FileNotFoundError) else ""
        )
        hint = f"; to train with it, write: train -- {' '.join(words)}" if script else hint
        sys.stderr.write(
            f"trainworks: cannot execute {words[0]!r}: {error.strerror or error}{hint}\n"
        )
        return (
            names.EXIT_NOT_FOUND
            if isinstance(error, FileNotFoundError)
            else names.EXIT_NOT_EXECUTABLE
        )


def _check(measures: bool) -> int:
    """Check this host; the script and the rest of the job need not be there.

    Args:
        measures: Whether an all-reduce is timed, too: a job of its own, which
            begins with the same checks.
    """
    if measures:
        import shutil

        from trainworks_launcher.plan import bandwidth

        if shutil.which(bandwidth.PROGRAM):
            return _train(bandwidth.INVOCATION, measures)
        print(f"warning: {bandwidth.MISSING}")
    from trainworks_launcher.checks import FAILED, OFF, QUICK
    from trainworks_launcher.checks.run import line_of, run_checks
    from trainworks_launcher.environment.environment import read_environment
    from trainworks_launcher.environment.secret import take_variables
    from trainworks_launcher.job.network import read_network
    from trainworks_launcher.job.placement import read_placement
    from trainworks_launcher.plan.host_checks import checks_of

    environment = read_environment(take_variables())
    placement, _ = read_placement(environment, "")
    network, _ = read_network(environment, placement)
    level = QUICK if environment.variables.get(names.CHECK_VARIABLE) == OFF else ""
    checks = checks_of(environment, placement, network, level)
    findings = run_checks(checks) if checks is not None else ()
    for finding in findings:
        print(line_of(finding))
    if not findings:
        print("nothing is wrong with this host")
    if len(placement.hosts) > 1:
        if environment.job_secret:
            secret = f"with {names.JOB_SECRET_VARIABLE}: only who knows it may join or lead"
        else:
            secret = (
                f"without {names.JOB_SECRET_VARIABLE}:"
                " who comes first may join, or lead and start programs"
            )
        place = f"port {network.control_port} of {placement.leader}"
        print(f"the launchers of this job talk on {place}, {secret}")
    failed = any(finding.severity == FAILED for finding in findings)
    return names.EXIT_CHECK if failed else 0


def _show(what: str, parsed: Parsed, asked: Invocation) -> int:
    """Print the plan of a host (``--plan``) or the reasons for it (``explain``)."""
    from trainworks_launcher.command import explain
    from trainworks_launcher.command.options import value_of
    from trainworks_launcher.command.rank_map import rank_map
    from trainworks_launcher.contract.errors import RefusalError
    from trainworks_launcher.contract.redaction import Redactor
    from trainworks_launcher.environment.environment import read_environment
    from trainworks_launcher.environment.secret import take_variables
    from trainworks_launcher.job.job import make_job
    from trainworks_launcher.plan.modes import plan_host

    environment = read_environment(take_variables(), asked)
    redactor = Redactor(environment.variables, environment.hyperparameters)
    secrets = "--show-secrets" in parsed
    try:
        job = make_job(environment, value_of(parsed, "--host"))
        plan = plan_host(job)
    except RefusalError as refusal:
        sys.stderr.write(f"trainworks: {refusal if secrets else redactor.text(str(refusal))}\n")
        return refusal.status
    plan = plan if secrets else plan.redacted(redactor)
    if what == "--plan":
        sys.stdout.write(plan.to_json())
        return 0
    rows = explain.explain(plan, environment.variables)
    if value_of(parsed, "--format", "table") == "json":
        sys.stdout.write(explain.to_json(plan, rows))
    else:
        sys.stdout.write(
            explain.to_table(plan, rows, _columns(), rank_map(job.placement, environment.devices))
        )
    return 0


def _train(asked: Invocation | None = None, measures: bool = False) -> int:
    """Run this host's part.

    The handlers come first: a stop signal during all that follows is not lost.

    Args:
        asked: What the command line asks for; None: nothing.
        measures: Whether that is ``plan.bandwidth``'s all-reduce.
    """
    from trainworks_launcher.contract.stop_signals import EarlyStops, StoppedError

    with EarlyStops() as stops:
        try:
            from trainworks_launcher.supervise.supervisor import run_plan

            start = _plan_start(asked, measures)
            if isinstance(start, int):
                return start
            stops.hold()
        except StoppedError as stopped:
            stops.hold()
            return _stopped(stopped.number, asked)
        return run_plan(start.plan, start.environment, start.refusal, stops.numbers)


def _stopped(number: int, asked: Invocation | None) -> int:
    """End a job that a stop signal met while it was read."""
    import signal

    from trainworks_launcher.contract.redaction import Redactor
    from trainworks_launcher.environment.environment import report_directory
    from trainworks_launcher.supervise.attribution import outcome_files
    from trainworks_launcher.supervise.attribution.failure import last_words
    from trainworks_launcher.supervise.outcome.outcome import STOPPED, Outcome
    from trainworks_launcher.supervise.processes.output import log

    text = f"stopped by {signal.Signals(number).name} before the program was started"
    outcome = Outcome(STOPPED, 128 + number, os.uname().nodename, text)
    reports = report_directory(os.environ, asked is not None and bool(asked.program))
    outcome_files.clear(reports)
    outcome_files.write(reports, outcome, Redactor(os.environ))
    log(last_words(outcome))
    return outcome.status


class _Start(NamedTuple):
    """What is run on this host. refusal: why it cannot take part; None if it can."""

    plan: NodePlan
    environment: Environment
    refusal: Outcome | None = None


def _plan_start(asked: Invocation | None, measures: bool) -> _Start | int:
    """Read the job and plan this host's part.

    Returns the exit status of a job that is refused, where no other host has to be told.
    """
    from trainworks_launcher.contract.errors import RefusalError
    from trainworks_launcher.contract.redaction import Redactor
    from trainworks_launcher.environment.command_line import NOTHING_ASKED
    from trainworks_launcher.environment.patience import read_patiently
    from trainworks_launcher.environment.secret import take_variables
    from trainworks_launcher.job.job import make_job
    from trainworks_launcher.plan.modes import plan_host
    from trainworks_launcher.plan.plan import first_lines
    from trainworks_launcher.supervise.processes import output

    try:
        environment = read_patiently(take_variables(), asked or NOTHING_ASKED, output.log)
    except RefusalError as refusal:
        # A file system that does not answer: there is no place for a report, either.
        output.log(str(refusal))
        return refusal.status
    redactor = Redactor(environment.variables, environment.hyperparameters)
    known: Job | None = None
    try:
        known = job = make_job(environment)
        plan = plan_host(job)
    except RefusalError as refusal:
        return _start_of_refusal(refusal, environment, known)
    if measures:
        from trainworks_launcher.plan.bandwidth import measured

        plan = measured(plan, job)
    for line in first_lines(plan, job):
        output.log(redactor.text(line))
    if environment.variables.get(names.EXPLAIN_VARIABLE) not in (None, "", "0"):
        from trainworks_launcher.command import explain
        from trainworks_launcher.command.rank_map import rank_map

        shown = plan.redacted(redactor)
        rows = explain.explain(shown, environment.variables)
        ranks = rank_map(job.placement, environment.devices)
        for line in explain.to_table(shown, rows, _columns(), ranks).splitlines():
            output.log(line)
    return _Start(plan, environment)


def _start_of_refusal(
    refusal: RefusalError, environment: Environment, job: Job | None
) -> _Start | int:
    """Return a start that only tells the other hosts of a refusal.

    Returns the exit status where there are none. Then the report is written here.

    Args:
        refusal: Why the job is refused.
        environment: What was read on this host.
        job: The job; None if it was refused before it was known.
    """
    from trainworks_launcher.contract.redaction import Redactor
    from trainworks_launcher.job.job import JobRefusedError
    from trainworks_launcher.plan.plan import plan_of_refusal
    from trainworks_launcher.supervise.attribution import outcome_files
    from trainworks_launcher.supervise.outcome.outcome import FAILED, Outcome
    from trainworks_launcher.supervise.processes import output

    redactor = Redactor(environment.variables, environment.hyperparameters)
    text = redactor.text(str(refusal))
    output.log(text)
    known = refusal if isinstance(refusal, JobRefusedError) else job
    host, plan = environment.hostname, None
    if known is not None:
        host = known.placement.host
        plan = plan_of_refusal(known.placement, known.network, environment.base_directory)
    outcome = Outcome(FAILED, refusal.status, host, text)
    if plan is not None:
        return _Start(plan, environment, outcome)
    outcome_files.clear(environment.output)
    outcome_files.write(environment.refusals, outcome, redactor, manifest=environment.manifest)
    return refusal.status
