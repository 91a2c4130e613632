"""The settings by which a person changes what the launcher does, for ``train --help``. Pure."""

from __future__ import annotations

from typing import NamedTuple

from trainworks_launcher.contract import names


class Setting(NamedTuple):
    """A variable that is a setting.

    Attributes:
        name: Its name.
        default: Its default, for people.
        text: Its meaning, in a line.
        common: Whether most people need it.
    """

    name: str
    default: str
    text: str
    common: bool = False


SETTINGS = (
    Setting(
        names.HOSTS_VARIABLE,
        "none",
        "the job's hosts on plain hosts, the leader first: a,b or n[0-3]",
        True,
    ),
    Setting(names.HOST_VARIABLE, "host name", "this host's name among them", True),
    Setting(
        names.BASE_DIRECTORY_VARIABLE,
        names.BASE_DIRECTORY,
        "where code, input, model and output are",
        True,
    ),
    Setting(
        names.CHECKPOINT_DIRECTORY_VARIABLE,
        f"{names.BASE_DIRECTORY}/{names.CHECKPOINTS}",
        "where the script keeps its checkpoints",
        True,
    ),
    Setting(
        names.STOP_GRACE_VARIABLE,
        "platform's",
        "seconds from a stop signal to the launcher's own KILL",
        True,
    ),
    Setting(
        names.MAX_RESTARTS_VARIABLE,
        "0",
        "how often the ranks are started again after a failure",
        True,
    ),
    Setting(
        names.HANG_VARIABLE,
        "warn",
        "when no rank makes progress: warn, fail (status 68), off",
        True,
    ),
    Setting(
        names.HANG_LIMIT_VARIABLE,
        f"{names.HANG_LIMIT_SECONDS:g}",
        "seconds without progress until then",
        True,
    ),
    Setting(
        names.JOIN_LIMIT_VARIABLE,
        f"{names.JOIN_LIMIT_SECONDS:g}",
        "seconds for all hosts to come",
        True,
    ),
    Setting(
        names.CHECK_VARIABLE, "quick", "checks of the hosts before the start: quick, off", True
    ),
    Setting(
        names.MIN_HOSTS_VARIABLE,
        "all",
        "hosts with which a torchrun job continues when others are lost",
    ),
    Setting(names.GIVE_UP_VARIABLE, "on", "end a job that torchrun restarts without progress"),
    Setting(names.NUMA_VARIABLE, "auto", "torchrun's --numa-binding"),
    Setting(names.HEARTBEAT_FILE_VARIABLE, "none", "file that the script touches to show progress"),
    Setting(
        names.HEARTBEAT_LIMIT_VARIABLE,
        f"{names.HEARTBEAT_LIMIT_SECONDS:g}",
        "seconds until a silent host is lost",
    ),
    Setting(
        names.PREPARE_LIMIT_VARIABLE,
        f"{names.PREPARE_LIMIT_SECONDS:g}",
        "seconds for each of several hosts to install requirements",
    ),
    Setting(
        names.CONTROL_PORT_VARIABLE, f"{names.CONTROL_PORT}", "port of the leader's control channel"
    ),
    Setting(names.MASTER_PORT_VARIABLE, f"{names.MASTER_PORT}", "port of rank 0's store"),
    Setting(
        names.JOB_SECRET_VARIABLE,
        "none",
        "secret that the hosts prove to each other, the same on all",
    ),
    Setting(
        names.JOB_SECRET_FILE_VARIABLE,
        "mounted",
        f"file with it; {names.JOB_SECRET_FILE}, if there",
    ),
    Setting(
        names.ARGUMENT_STYLE_VARIABLE,
        "value",
        "how hyperparameters become arguments: value, flag, json, ...",
    ),
    Setting(
        names.ARGUMENT_ORDER_VARIABLE, "name", "the order of those arguments: by name, or as given"
    ),
    Setting(
        names.STRICT_VARIABLE, "off", "refuse requirements that the image cannot fulfil as written"
    ),
    Setting(names.LOG_PREFIX_VARIABLE, "on", "[HOST rank N] before the lines of ranks"),
    Setting(names.RAY_OPTIONS_VARIABLE, "none", "more options for ray start, as --NAME=VALUE"),
    Setting(names.SUMMARY_VARIABLE, "on", "a line of the log about what the job took"),
    Setting(
        names.CLEAN_EXIT_VARIABLE, "on", "wait for gloo's threads when a Python of the job ends"
    ),
    Setting(names.EXPLAIN_VARIABLE, "off", "1: the log begins with the table of train explain"),
    Setting(names.IMAGE_MANIFEST_VARIABLE, "the image's", "path of the image manifest"),
)
"""The common ones first."""


def help_of(*, every: bool) -> str:
    """Return the help of the settings, a line for each.

    Args:
        every: Whether those that few people need are shown, too.
    """
    lines = []
    for row in SETTINGS:
        if row.common or every:
            lines.append(f"  {row.name:<35} {row.default:<12} {row.text}")
    return "\n".join(lines)
