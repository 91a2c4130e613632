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
    """Run the command, and return the exit status.

    A program that is not a command of the launcher replaces this process.

    Args:
        arguments: The command line without the program's name; default: the process's own.
    """
    _open_streams()
    words: list[str] = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] == "train":
        words = words[1:]
    elif words and not words[0].startswith("-") and words[0] not in _OWN_WORDS:
        return _execute(words)
    # The words before ``--`` are the launcher's, the others the program and its arguments.
    end = words.index("--") if "--" in words else len(words)
    words, program = words[:end], words[end:]
    if words[:1] == ["preflight"]:
        sys.stderr.write(_PREFLIGHT)
        return names.EXIT_NOT_STARTED
    if words and not {"--help", "-h"}.isdisjoint((words[0], words[-1])):
        sys.stdout.write(_make_help(every=words[-1] == "all"))
        return 0
    if words == ["--version"]:
        sys.stdout.write(f"trainworks-launcher {__version__}\n")
        return 0
    if not words and not program:
        return _train()
    # Imported late, because most starts have no option.
    from trainworks_launcher.command import options

    try:
        command, parsed, invocation = options.read(words, program)
    except options.UsageError as error:
        sys.stderr.write(f"trainworks: {error} (see: train --help)\n")
        return names.EXIT_NOT_STARTED
    if command.name == "check":
        return _check("bandwidth" in parsed)
    if command is options.TRAIN:
        return _train(invocation)
    return _show(command.name, parsed, invocation)


_STANDARD_ERROR = 2
"""Number of the last of the three standard streams."""


def _open_streams() -> None:
    """Open /dev/null for each standard stream that is closed.

    Else the next file or pipe would get the number of the stream, and the log would go there. Also
    sets ``sys.stdout`` and ``sys.stderr``, which Python leaves None for a closed stream.
    """
    while True:
        # The kernel gives the lowest free number.
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > _STANDARD_ERROR:
            os.close(descriptor)
            break
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _read_columns() -> int:
    """Return the columns of the terminal; ``_DEFAULT_SIZE`` without one."""
    import shutil

    return shutil.get_terminal_size(_DEFAULT_SIZE).columns


_DEFAULT_SIZE = (100, 24)
"""Columns and lines."""

_HELP_COLUMNS = 118


def _make_help(*, every: bool) -> str:
    """Return the help.

    Args:
        every: Whether it has all settings, also those that few people need.
    """
    import textwrap

    from trainworks_launcher.command import variables
    from trainworks_launcher.command.options import options_help
    from trainworks_launcher.contract.modes import MODES
    from trainworks_launcher.environment.platforms import PLATFORMS

    modes = [f"  {row.switch:<50}{row.name}" for row in MODES.values() if row.switch]
    modes.append(f"  {'none of these':<50}none: the program runs once on each host")
    platforms = textwrap.wrap(
        ", ".join(PLATFORMS), _HELP_COLUMNS, initial_indent="  ", subsequent_indent="  "
    )
    return _HELP.format(
        modes="\n".join(modes),
        platforms="\n".join(platforms),
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
    """Become another program.

    Returns only if that fails, with a line on standard error: 127 if the program does not exist,
    126 if it cannot be executed, as a shell.

    Args:
        words: The program and its arguments.
    """
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        hint = ""
        if os.path.isfile(words[0]):  # noqa: PTH113
            # A script without execute permission or without ``#!``.
            hint = f"; to train with it, write: train -- {' '.join(words)}"
        elif is_missing:
            hint = "; to train, give no argument or: train"
        sys.stderr.write(
            f"trainworks: cannot execute {words[0]!r}: {error.strerror or error}{hint}\n"
        )
        if is_missing:
            return names.EXIT_NOT_FOUND
        return names.EXIT_NOT_EXECUTABLE


def _check(measures: bool) -> int:
    """Check this host, and print the findings and the warnings of its devices and network.

    The script and the rest of the job need not exist.

    Args:
        measures: Whether an all-reduce is timed, too: a job of its own, which begins with the same
            checks. Without the program for it the check fails.

    Returns:
        0, or ``names.EXIT_CHECK`` if a check failed; with an all-reduce the status of that job.
    """
    from trainworks_launcher.checks import FAILED, OFF, QUICK, Finding
    from trainworks_launcher.plan import bandwidth

    findings: list[Finding] = []
    if measures:
        import shutil

        if shutil.which(bandwidth.PROGRAM):
            return _train(bandwidth.INVOCATION, measures)
        findings.append(bandwidth.MISSING)
    from trainworks_launcher.checks.run import line_of, run_checks
    from trainworks_launcher.environment.environment import read_environment
    from trainworks_launcher.environment.secret import take_variables
    from trainworks_launcher.job import idle
    from trainworks_launcher.job.network import read_network
    from trainworks_launcher.job.placement import read_placement
    from trainworks_launcher.plan.host_checks import checks_of

    environment = read_environment(take_variables())
    placement, _ = read_placement(environment, "")
    network, _ = read_network(environment, placement)
    # A person who asks for checks gets them, also if jobs have none.
    level = QUICK if environment.variables.get(names.CHECK_VARIABLE) == OFF else ""
    checks = checks_of(environment, placement, network, level)
    if checks is not None:
        findings.extend(run_checks(checks))
    for finding in findings:
        print(line_of(finding))
    # The lines about devices and interfaces that the start of a job prints.
    warnings = [*network.warnings, idle.warn_without_gpu(environment, placement)]
    for warning in filter(None, warnings):
        print(f"warning: {warning}")
    if not findings and not any(warnings):
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
    if any(finding.severity == FAILED for finding in findings):
        return names.EXIT_CHECK
    return 0


def _show(command: str, parsed: Parsed, invocation: Invocation) -> int:
    """Print the plan of a host, or the reasons for it, and start nothing.

    Args:
        command: ``--plan`` or ``explain``.
        parsed: The options of the command.
        invocation: Settings and program of the command line.

    Returns:
        0; the status of a refusal, with the refusal on standard error.
    """
    from trainworks_launcher.command import explain
    from trainworks_launcher.command.options import value_of
    from trainworks_launcher.command.rank_map import rank_map
    from trainworks_launcher.contract.errors import RefusalError
    from trainworks_launcher.contract.redaction import Redactor
    from trainworks_launcher.environment.environment import read_environment
    from trainworks_launcher.environment.secret import take_variables
    from trainworks_launcher.job.job import make_job
    from trainworks_launcher.plan.modes import plan_host

    environment = read_environment(take_variables(), invocation)
    redactor = Redactor(environment.variables, environment.hyperparameters)
    shows_secrets = "--show-secrets" in parsed
    try:
        job = make_job(environment, value_of(parsed, "--host"))
        plan = plan_host(job)
    except RefusalError as refusal:
        text = str(refusal)
        if not shows_secrets:
            text = redactor.text(text)
        sys.stderr.write(f"trainworks: {text}\n")
        return refusal.status
    if not shows_secrets:
        plan = plan.redacted(redactor)
    if command == "--plan":
        sys.stdout.write(plan.to_json())
        return 0
    rows = explain.explain(plan, environment.variables)
    if value_of(parsed, "--format", "table") == "json":
        sys.stdout.write(explain.to_json(plan, rows))
    else:
        ranks = rank_map(job.placement, environment.devices)
        sys.stdout.write(explain.to_table(plan, rows, _read_columns(), ranks))
    return 0


def _train(invocation: Invocation | None = None, measures: bool = False) -> int:
    """Run this host's part of the job, and return the exit status.

    Blocks until the job ends. Handles the signals of this process from the beginning.

    Args:
        invocation: Settings and program of the command line; None without arguments.
        measures: Whether that is the all-reduce of ``plan.bandwidth``.
    """
    from trainworks_launcher.contract.stop_signals import EarlyStops, StoppedError

    # The handlers come first, so that a stop signal during all that follows is not lost.
    with EarlyStops() as stops:
        try:
            from trainworks_launcher.supervise.supervisor import run_plan

            start = _plan_start(invocation, measures)
            if isinstance(start, int):
                return start
            # From now on a signal is kept for the supervisor, and raises nothing.
            stops.hold()
        except StoppedError as stopped:
            stops.hold()
            return _report_stop(stopped.number, invocation)
        return run_plan(start.plan, start.environment, start.refusal, stops.numbers)


def _report_stop(number: int, invocation: Invocation | None) -> int:
    """Write and log the outcome of a job that was stopped while it was read.

    The files of an earlier outcome are removed.

    Args:
        number: The stop signal.
        invocation: As in ``_train``.

    Returns:
        The exit status: 128 and the number of the signal.
    """
    import signal

    from trainworks_launcher.contract.redaction import Redactor
    from trainworks_launcher.environment.environment import report_directory
    from trainworks_launcher.supervise.attribution import outcome_files
    from trainworks_launcher.supervise.attribution.failure import last_words
    from trainworks_launcher.supervise.outcome.outcome import STOPPED, Outcome
    from trainworks_launcher.supervise.processes.output import log

    text = f"stopped by {signal.Signals(number).name} before the program was started"
    outcome = Outcome(STOPPED, 128 + number, os.uname().nodename, text)
    has_program = invocation is not None and bool(invocation.program)
    reports = report_directory(os.environ, has_program)
    outcome_files.clear(reports)
    outcome_files.write(reports, outcome, Redactor(os.environ))
    log(last_words(outcome))
    return outcome.status


class _Start(NamedTuple):
    """The plan that is run on this host.

    Attributes:
        plan: The plan.
        environment: What was read on this host.
        refusal: Why this host cannot take part; None if it can.
    """

    plan: NodePlan
    environment: Environment
    refusal: Outcome | None = None


def _plan_start(invocation: Invocation | None, measures: bool) -> _Start | int:
    """Read the job and plan this host's part; log the first lines of the job.

    Nothing is started. Removes the job's secret from this process's environment.

    Args:
        invocation: As in ``_train``.
        measures: As in ``_train``.

    Returns:
        The start. The exit status of a refused job, if no other host has to know of that.
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
        environment = read_patiently(take_variables(), invocation or NOTHING_ASKED, output.log)
    except RefusalError as refusal:
        # A file system that does not answer: there is no place for a report, either.
        output.log(str(refusal))
        return refusal.status
    redactor = Redactor(environment.variables, environment.hyperparameters)
    # Set before the plan, whose refusal may need the job's hosts.
    known_job: Job | None = None
    try:
        known_job = job = make_job(environment)
        plan = plan_host(job)
    except RefusalError as refusal:
        return _start_of_refusal(refusal, environment, known_job)
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
        for line in explain.to_table(shown, rows, _read_columns(), ranks).splitlines():
            output.log(line)
    return _Start(plan, environment)


def _start_of_refusal(
    refusal: RefusalError, environment: Environment, job: Job | None
) -> _Start | int:
    """Log a refusal, and return a start that only reports it to the other hosts.

    Without other hosts the outcome of an earlier job is removed, and that of this one written.

    Args:
        refusal: Why the job is refused.
        environment: What was read on this host.
        job: The job; None if it was refused before its hosts were known.

    Returns:
        The start. Without other hosts the exit status: then the report is written to its file.
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
    # A refusal of a whole job has the hosts that were read before.
    source = refusal if isinstance(refusal, JobRefusedError) else job
    host, plan = environment.hostname, None
    if source is not None:
        host = source.placement.host
        plan = plan_of_refusal(source.placement, source.network, environment.base_directory)
    outcome = Outcome(FAILED, refusal.status, host, text)
    if plan is not None:
        return _Start(plan, environment, outcome)
    outcome_files.clear(environment.output)
    outcome_files.write(environment.refusals, outcome, redactor, manifest=environment.manifest)
    return refusal.status
