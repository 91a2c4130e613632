"""The command lines of the major versions of Open MPI: names of parameters, and every option with
its number of values. Data.

Open MPI 5 renamed the parameters of its run-time (ORTE, now PRRTE) and removed some options. Users
often have words of the other version than the image's, so names are converted to the installed one.

Sources: ``mpirun --help full`` and ``ompi_info --all`` of 4.1; of 5.0 ``ompi_info --all``,
``prte_info --all`` (they list the synonyms) and the option table of its command line. An engine
test tries every option with both programs.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple


class Dialect(NamedTuple):
    """One major version of Open MPI.

    Attributes:
        major: 4 or 5.
        runtime_option: Option for parameters of the run-time.
        runtime_prefixes: Prefixes of those parameters.
        options: Option without its dashes -> the number of words that follow.
        optional: Options with an optional value, which is written after ``=``.
        renamed: Old name of a parameter -> the name in this version.
        gone: Parameter without a successor -> the reason for which it may be dropped.
        socket: This version's word for a processor package.
        own_classes: Whether parameters of the run-time, of PMIx and of MPI have options of their
            own.
        renamed_prefixes: Old prefix of parameters -> the prefix in this version.
    """

    major: int
    runtime_option: str
    runtime_prefixes: tuple[str, ...]
    options: Mapping[str, int]
    optional: frozenset[str]
    renamed: Mapping[str, str]
    gone: Mapping[str, str]
    socket: str
    own_classes: bool
    renamed_prefixes: tuple[tuple[str, str], ...] = ()

    def canonical(self, name: str) -> str:
        """Return the name of an MCA parameter in this version.

        A name that was never another one stays, also one that no version knows.
        """
        if name in self.renamed:
            return self.renamed[name]
        for old, new in self.renamed_prefixes:
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def option(self, name: str) -> str:
        """Return the option for a (canonical) parameter."""
        if name.startswith(self.runtime_prefixes):
            return self.runtime_option
        return "--mca"


def _counted(none: str, one: str, two: str) -> Mapping[str, int]:
    """Return option -> number of words that follow. Arguments: options with none, one and two."""
    counts: dict[str, int] = {}
    for count, names in enumerate((none, one, two)):
        counts.update(dict.fromkeys(names.split(), count))
    return MappingProxyType(counts)


_BOTH_NONE = """
    allow-run-as-root bind-to-core bycore bynode byslot continuous debug debug-daemons
    debug-daemons-file disable-recovery display-allocation display-devel-map display-map
    do-not-launch enable-recovery get-stack-traces leave-session-attached merge-stderr-to-stdout
    nolocal nooversubscribe noprefix output-proctable oversubscribe pernode preload-binary
    report-bindings report-child-jobs-separately report-state-on-timeout show-progress s tag-output
    timestamp-output use-hwthread-cpus v verbose V version xml
"""
_BOTH_ONE = """
    N am app bind-to c cpu-list cpu-set cpus-per-proc cpus-per-rank default-hostfile host hostfile
    launch-agent machinefile map-by max-restarts max-vm-size n np npernode npersocket
    output-filename path personality ppr prefix preload-files rank-by rankfile report-pid
    report-uri stdin timeout tune wd wdir x xterm
"""
_SINGLE_COPY = "in Open MPI 5 the single-copy mechanism is a separate component (smsc)"
_MCA_CLASSES = frozenset(("mca", "gmca", "omca", "gomca", "prtemca", "pmixmca"))

OPEN_MPI_4 = Dialect(
    major=4,
    runtime_option="--mca",
    runtime_prefixes=(),
    options=_counted(
        none=_BOTH_NONE
        + """
            bind-to-socket d debug-devel display-devel-allocation display-diffable-map
            display-topo do-not-resolve dvm enable-instant-on-support fwd-mpirun-port
            index-argv-by-rank novm q quiet set-cwd-to-session-dir tv use-regexp
        """,
        one=_BOTH_ONE + "H cartofile cf debugger h help hnp ompi-server report-events rf xml-file",
        two="mca gmca",
    ),
    optional=frozenset(),
    renamed=MappingProxyType(
        {
            "prte_if_include": "oob_tcp_if_include",
            "prte_if_exclude": "oob_tcp_if_exclude",
            "rmaps_default_mapping_policy": "rmaps_base_mapping_policy",
            "rmaps_default_ranking_policy": "rmaps_base_ranking_policy",
            "hwloc_default_binding_policy": "hwloc_base_binding_policy",
        }
    ),
    gone=MappingProxyType({}),
    socket="socket",
    own_classes=False,
    renamed_prefixes=(("plm_ssh_", "plm_rsh_"), ("btl_sm_single_copy", "btl_vader_single_copy")),
)
OPEN_MPI_5 = Dialect(
    major=5,
    runtime_option="--prtemca",
    runtime_prefixes=(
        *("plm_", "prte_", "oob_", "rmaps_", "ras_", "grpcomm_", "odls_", "routed_"),
        "hwloc_default_",  # hwloc_base_ has parameters of MPI too
    ),
    options=_counted(
        none=_BOTH_NONE
        + """
            display-comm display-comm-finalize fwd-environment h help hetero-nodes
            no-aggregate-help no-app-prefix parsable parseable soft stop-in-app stop-in-init
            stop-on-exec
        """,
        one=_BOTH_ONE
        + """
            H amca app-pmix-prefix append-env arch bindto display display-topo dvm file
            forward-signals gpu-support initial-errhandler mapby memory-alloc-kinds output
            output-directory prepend-env pset rankby rtos spawn-timeout stream-buffering tmpdir
            unset-env with-ft
        """,
        two=" ".join(sorted(_MCA_CLASSES)),
    ),
    optional=frozenset(("fwd-environment", "help", "output-proctable")),
    renamed=MappingProxyType(
        {
            "oob_tcp_if_include": "prte_if_include",
            "oob_tcp_include": "prte_if_include",
            "oob_tcp_if_exclude": "prte_if_exclude",
            "oob_tcp_exclude": "prte_if_exclude",
            "rmaps_base_mapping_policy": "rmaps_default_mapping_policy",
            "rmaps_base_ranking_policy": "rmaps_default_ranking_policy",
            "hwloc_base_binding_policy": "hwloc_default_binding_policy",
        }
    ),
    gone=MappingProxyType(
        {
            "orte_abort_on_non_zero_status": (
                "Open MPI 5 always ends a job on the first non-zero status"
            ),
            "btl_vader_single_copy_mechanism": _SINGLE_COPY,
            "btl_sm_single_copy_mechanism": _SINGLE_COPY,
        }
    ),
    socket="package",
    own_classes=True,
    renamed_prefixes=(("plm_rsh_", "plm_ssh_"), ("btl_vader_", "btl_sm_"), ("orte_", "prte_")),
)


def dialect_of(version: str) -> Dialect:
    """Return the dialect of an installed version such as "5.0.8"; the older one if unknown."""
    major = version.split(".", 1)[0]
    if major.isdecimal() and int(major) >= OPEN_MPI_5.major:
        return OPEN_MPI_5
    return OPEN_MPI_4


MCA_OPTIONS = _MCA_CLASSES
"""Options for a parameter: a name and a value.

Open MPI 5 separates the classes; 4 has ``mca`` and ``gmca``.
"""

KEYED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "allow-run-as-root": ("allow-run-as-root", ""),
        "oversubscribe": ("oversubscribe", ""),
        "map-by": ("map-by", "{}"),
        "rank-by": ("rank-by", "{}"),
        "bind-to": ("bind-to", "{}"),
        "mapby": ("map-by", "{}"),
        "rankby": ("rank-by", "{}"),
        "bindto": ("bind-to", "{}"),
        "N": ("map-by", "ppr:{}:node"),
        "npernode": ("map-by", "ppr:{}:node"),
        "pernode": ("map-by", "ppr:1:node"),
        "npersocket": ("map-by", "ppr:{}:{socket}"),
        "ppr": ("map-by", "ppr:{}"),
        "byslot": ("map-by", "slot"),
        "bynode": ("map-by", "node"),
        "bycore": ("map-by", "core"),
        "cpus-per-proc": ("map-by", "slot:PE={}"),
        "cpus-per-rank": ("map-by", "slot:PE={}"),
        "bind-to-core": ("bind-to", "core"),
        "bind-to-socket": ("bind-to", "{socket}"),
    }
)
"""Option that may be given once -> (the option, the value) that both versions accept.

"" for no value.
"""

INSTEAD: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rankfile": ("map-by", "bind-to"),
        "rf": ("map-by", "bind-to"),
        "cpu-list": ("map-by", "bind-to"),
        "cpu-set": ("map-by", "bind-to"),
        "rmaps_base_mapping_policy": ("map-by",),
        "rmaps_default_mapping_policy": ("map-by",),
        "hwloc_base_binding_policy": ("bind-to",),
        "hwloc_default_binding_policy": ("bind-to",),
    }
)
"""Option or parameter of the user -> options of the launcher that conflict with it, or mean the
same, and are left out.
"""

# Reasons and remedies of the tables below.
_COUNTED = (
    "processes are counted by sagemaker_mpi_num_of_processes_per_host and"
    " sagemaker_mpi_num_processes"
)
_LISTED = "the platform's resource config lists the hosts"
_PRINTS = "mpirun would print and start nothing, and the job would count as done"
_PLACED = "ranks start in the directory of the job's code"
_DAEMONS = "the launcher, or the Kubernetes MPI operator, decides how Open MPI's daemons start"
_PREFIXED = (
    "each line is prefixed with its host and rank already; in a job of the Kubernetes MPI operator"
    " write: --tag-output"
)
OURS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("np", "n", "c"), _COUNTED),
        **dict.fromkeys(("host", "H", "hostfile", "machinefile", "default-hostfile"), _LISTED),
        **dict.fromkeys(("help", "h", "version", "V", "do-not-launch"), _PRINTS),
        **dict.fromkeys(("wd", "wdir", "set-cwd-to-session-dir"), _PLACED),
        "app": "mpirun would start what the file says instead of the training script",
        "file": "mpirun would start what the file says instead of the training script",
        **dict.fromkeys(("preload-binary", "s"), "every host has the image's programs"),
        "dvm": "each job has its own run-time",
        "hnp": "each job has its own run-time",
    }
)
"""Option that the launcher decides -> why a user cannot."""

FOREIGN: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "genv": (2, "write: -x NAME=VALUE"),
        "env": (2, "write: -x NAME=VALUE"),
        "genvlist": (1, "write -x NAME for each name"),
        "envlist": (1, "write -x NAME for each name"),
        "genvall": (0, "every rank has the environment of its host"),
        "envall": (0, "every rank has the environment of its host"),
        "genvnone": (0, "every rank has the environment of its host"),
        "ppn": (1, _COUNTED),
        "perhost": (1, _COUNTED),
        "f": (1, _LISTED),
        "hosts": (1, _LISTED),
        "iface": (1, "write: --mca btl_tcp_if_include NAME"),
        "launcher": (1, _DAEMONS),
        "bootstrap": (1, _DAEMONS),
        "l": (0, _PREFIXED),
        "prepend-rank": (0, _PREFIXED),
    }
)
"""Option of MPICH and Intel MPI -> (number of words that follow, the remedy in this image)."""
