"""Define the names that the launcher shares with users: variables, hyperparameters, paths, limits.

Each name is one constant, with its unit, default and source. "as sagemaker-training" marks
behaviour of that package on which scripts rely. Only names with the prefix ``TRAINWORKS_`` are this
launcher's own.
"""

from __future__ import annotations

# --- paths below the base -------------------------------------------------------------------------
BASE_DIRECTORY = "/opt/ml"
"""Root of the platform's directories.

Moved by SAGEMAKER_BASE_DIR. Source: the platform's training contract.
"""

HYPERPARAMETERS_FILE = "input/config/hyperparameters.json"
"""Object of hyperparameters; the platform delivers every value as a string."""

RESOURCE_CONFIG_FILE = "input/config/resourceconfig.json"
"""Object with ``current_host``, ``hosts``, ``network_interface_name``, instance
types and groups.
"""

INPUT_DATA_CONFIG_FILE = "input/config/inputdataconfig.json"
"""Object: channel name -> settings of that channel.

Only the names are used (as sagemaker-training).
"""

SOURCE_CODE_FILE = "input/data/sm_drivers/sourcecode.json"
"""Object: the fields of ModelTrainer's SourceCode. Source: SDK, model_trainer.py."""

DISTRIBUTED_FILE = "input/data/sm_drivers/distributed.json"
"""Object: the fields of ModelTrainer's Torchrun or MPI; empty for a plain script.

Source: SDK, model_trainer.py.
"""

SOURCE_CHANNEL = "input/data/code"
"""ModelTrainer's code: its source_dir, or the archive that source_dir names."""

CODE_DIRECTORY = "code"
"""The user's code if the job does not give another place."""

CHECKPOINT_CONFIG_FILE = "input/config/checkpointconfig.json"
"""Object with ``LocalPath``, the directory that the platform copies to S3 and back.

Source: sagemaker-debugger, smdebug/core/config_constants.py.
"""

CHECKPOINTS = "checkpoints"
"""The platform's default of that directory. Source: API reference, CheckpointConfig, LocalPath."""

FAILURE_FILE = "failure"
"""Text of the failure; the platform shows its first FAILURE_TEXT_LIMIT characters.

This file, and those below, are in the directory of the job's output.
"""

FAILURE_JSON = "failure.json"
"""The failure for programs: ``schema`` FAILURE_SCHEMA, ``kind`` ("failed", "stopped"), ``status``,
``mode``, ``host`` and ``rank`` of the beginning (rank null if not known), ``cause`` (one line),
``text`` (as in FAILURE_FILE), ``retry`` (whether the platform may start the job again),
``restarts`` (of all hosts), ``lost_steps`` (steps that were done twice; null if not known),
``earlier`` (the cause of each earlier attempt's end), ``versions`` of ``launcher`` and
``smdistributed`` (null if the image has none).
"""

TERMINATION_LOG = "/dev/termination-log"
"""Text that Kubernetes shows of a container's end. Source: Kubernetes, terminationMessagePath."""

FAILURE_SCHEMA = 1
"""Version of the form of FAILURE_JSON; grows when a field is removed or changes its meaning."""

HANG_DIRECTORY = "data"
"""Directory for the stacks of ranks that hang and for torch's own records.

The platform uploads this directory.
"""

SUCCESS_FILE = "success"
"""Empty file, written when every host ended with status 0 (as sagemaker-training)."""

FAILURE_TEXT_LIMIT = 1024
"""Characters of the failure file that the platform shows.

Source: AWS guide, your-algorithms-training-algo-output.
"""

# --- variables that are read ----------------------------------------------------------------------
BASE_DIRECTORY_VARIABLE = "SAGEMAKER_BASE_DIR"
"""Path that replaces /opt/ml (as sagemaker-training)."""

PROGRAM_VARIABLE = "SAGEMAKER_PROGRAM"
"""Entry point; wins over the hyperparameter ``sagemaker_program`` (as sagemaker-training)."""

SUBMIT_DIRECTORY_VARIABLE = "SAGEMAKER_SUBMIT_DIRECTORY"
"""Directory, or local tar.gz, of the user's code, which sagemaker-training reads and then ignores.

The hyperparameter ``sagemaker_submit_directory`` wins over this variable; the default is BASE/code.
"""

TRAINING_MODULE_VARIABLE = "SAGEMAKER_TRAINING_MODULE"
"""``module:function`` of a framework entry; only passed on as SM_FRAMEWORK_MODULE."""

REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION", "SAGEMAKER_REGION")
"""Region, first one set wins: the platform sets AWS_REGION, boto3 reads AWS_DEFAULT_REGION."""

LOG_LEVEL_VARIABLE = "SAGEMAKER_CONTAINER_LOG_LEVEL"
"""Log level, which sagemaker-training reads and then ignores. The hyperparameter LOG_LEVEL wins."""

JOB_NAME_VARIABLE = "TRAINING_JOB_NAME"
"""Name of the job, set by the platform."""

ARGUMENT_STYLE_VARIABLE = "TRAINWORKS_ARGUMENT_STYLE"
"""Style of the script's arguments, one of arguments.STYLES; the hyperparameter ARGUMENT_STYLE wins.
"""

ARGUMENT_ORDER_VARIABLE = "TRAINWORKS_ARGUMENT_ORDER"
"""Order of the script's arguments, one of arguments.ORDERS; the hyperparameter ARGUMENT_ORDER wins.
"""

STRICT_VARIABLE = "TRAINWORKS_STRICT_REQUIREMENTS"
"""``on``: refuse requirements that the image cannot fulfil exactly as written; default off."""

REPOSITORY_VARIABLE = "CA_REPOSITORY_ARN"
"""ARN of the CodeArtifact repository from which pip installs (as sagemaker-training)."""

S3_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "S3_ENDPOINT_URL")
"""Endpoint of S3, if not the region's own, first one set wins: the two of AWS's SDKs, then that of
sagemaker-training.
"""

IMAGE_MANIFEST_VARIABLE = "TRAINWORKS_IMAGE_MANIFEST"
"""Path of the image manifest; default IMAGE_MANIFEST."""

CONTROL_PORT_VARIABLE = "TRAINWORKS_CONTROL_PORT"
"""TCP port on which the leader listens for the other hosts; default CONTROL_PORT."""

MASTER_PORT_VARIABLE = "MASTER_PORT"
"""TCP port of rank 0's store; default MASTER_PORT. Read, and exported to the script."""

STOP_GRACE_VARIABLE = "TRAINWORKS_STOP_GRACE_SECONDS"
"""Seconds between a stop signal and KILL. Default: none where the platform or the container's
engine sends KILL itself; else STOP_SECONDS.
"""

CHECK_VARIABLE = "TRAINWORKS_CHECK"
"""``quick`` (default) or ``off``: checks of the hosts before the program starts (CHECK_LEVELS)."""

CHECK_LEVELS = ("quick", "off")
"""Values of CHECK_VARIABLE, the default first."""

CHECKPOINT_DIRECTORY_VARIABLE = "TRAINWORKS_CHECKPOINT_DIRECTORY"
"""Directory of the script's checkpoints.

Default: LocalPath in CHECKPOINT_CONFIG_FILE, else BASE/checkpoints if that exists. Read, and
exported to the script.
"""

JOIN_LIMIT_VARIABLE = "TRAINWORKS_JOIN_LIMIT_SECONDS"
"""Seconds within which every host has to join the leader; default JOIN_LIMIT_SECONDS."""

PREPARE_LIMIT_VARIABLE = "TRAINWORKS_PREPARE_LIMIT_SECONDS"
"""Limit for a host to fetch code and install requirements; default PREPARE_LIMIT_SECONDS."""

HEARTBEAT_LIMIT_VARIABLE = "TRAINWORKS_HEARTBEAT_LIMIT_SECONDS"
"""Seconds of silence after which a host counts as lost; default HEARTBEAT_LIMIT_SECONDS."""

OWN_PREFIX = "TRAINWORKS_"
"""Prefix of every variable that this launcher introduces."""

HANG_VARIABLE = "TRAINWORKS_HANG"
"""The action when no rank makes progress, one of HANG_ACTIONS; the leader's value counts."""

HANG_ACTIONS = ("warn", "fail", "off")
"""``warn``, the default: log the places of the ranks, and write their stacks to files.

``fail``: also end the job. ``off``: do not watch the job.
"""

HANG_LIMIT_VARIABLE = "TRAINWORKS_HANG_LIMIT_SECONDS"
"""Seconds without progress of any rank; default HANG_LIMIT_SECONDS."""

HEARTBEAT_FILE_VARIABLE = "TRAINWORKS_HEARTBEAT_FILE"
"""Path of a file that the script touches to show progress; default: none."""

RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Path of torch's flight recorder's files, which end with the rank: the newer
name and the older one.
"""

RECORDER_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Path of FIFOs: a byte in RECORDER_PIPE, RANK and ``.pipe`` makes torch's rank write its file."""

EMULATION_VARIABLE = "SMP_CPU_EMULATION"
"""``1``: smp and smddp run a script that asks for CUDA on CPUs.

Read by this project's smdistributed.
"""

CLEAN_EXIT_VARIABLE = "TRAINWORKS_CLEAN_EXIT"
"""``on`` or ``off``: whether every Python of the job ends only when gloo's threads are idle.

Default on.
"""

NUMA_VARIABLE = "TRAINWORKS_NUMA_BINDING"
"""torchrun's ``--numa-binding``, one of NUMA_BINDINGS: the CPUs of a rank, by its GPU."""

NUMA_BINDINGS = ("auto", "off", "node", "socket", "exclusive", "core-complex")
"""``auto``, the default: the CPUs of the GPU's node, if they are known.

``off``: all. The others are torchrun's.
"""

RAY_OPTIONS_VARIABLE = "TRAINWORKS_RAY_OPTIONS"
"""More options for ``ray start`` on every host, split as by a shell.

An option of the launcher is replaced.
"""

SUMMARY_VARIABLE = "TRAINWORKS_SUMMARY"
"""``on`` or ``off``: whether the log ends with a summary of the job; default on."""

GIVE_UP_VARIABLE = "TRAINWORKS_GIVE_UP"
"""``on`` or ``off``: whether FRUITLESS_RESTARTS restarts in a row without progress end a job.

Default on.
"""

LOG_PREFIX_VARIABLE = "TRAINWORKS_LOG_PREFIX"
"""``on`` or ``off``: whether lines of ranks start with ``[HOST rank N] `` in jobs of several
processes; default on."""

JOB_SECRET_VARIABLE = "TRAINWORKS_JOB_SECRET"
"""A secret of at least JOB_SECRET_MINIMUM characters, the same on every host.

A host that joins the leader proves with the secret that it belongs to the job. No child process
gets the variable. Default: the content of JOB_SECRET_FILE.
"""

JOB_SECRET_FILE_VARIABLE = "TRAINWORKS_JOB_SECRET_FILE"
"""Path of a file with the secret, if JOB_SECRET_VARIABLE is not set.

Default JOB_SECRET_FILE, if that exists.
"""

JOB_SECRET_FILE = "/run/secrets/trainworks-job-secret"
"""Mount point of a secret of that name in Docker and Podman, and a place for a Kubernetes Secret.
Without this file and the variables, hosts join without a proof.
"""

MAX_RESTARTS_VARIABLE = "TRAINWORKS_MAX_RESTARTS"
"""Limit of restarts of failed ranks, by torchrun or on all hosts.

Also the hyperparameter MAX_RESTARTS. Default 0, and ELASTIC_RESTARTS if MIN_HOSTS is less than all
hosts.
"""

MIN_HOSTS_VARIABLE = "TRAINWORKS_MIN_HOSTS"
"""Number of hosts with which a torchrun job continues after the loss of others.

Also the hyperparameter MIN_HOSTS. Default: all hosts.
"""

MPI_HOSTFILE_VARIABLE = "OMPI_MCA_orte_default_hostfile"
"""Path of the hostfile that a Kubernetes operator gives the launcher of an MPI job: ``HOST
slots=N``, one a line. Source: kubeflow/mpi-operator, mpi_job_controller.go, ompiEnvVars;
kubeflow/trainer, pkg/constants/constants.go.
"""

HOSTS_VARIABLE = "TRAINWORKS_HOSTS"
"""Names of the job's hosts, separated by commas, the leader first; the same on every host.

For plain hosts, and for schedulers without a file in ``platforms``.
"""

HOST_VARIABLE = "TRAINWORKS_HOST"
"""This host's name in HOSTS_VARIABLE; default: the kernel's hostname, if HOSTS_VARIABLE has it."""

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Index of a pod in its Indexed Job; Kubernetes sets the variable in each container of the pod."""

EXPLAIN_VARIABLE = "TRAINWORKS_EXPLAIN"
"""``1``: the job's log begins with the table of ``train explain``; default off."""

# --- variables that are handed on -----------------------------------------------------------------
HYPERPARAMETERS_VARIABLE = "SM_HPS"
"""All hyperparameters of the user as one JSON object (as sagemaker-training)."""

FILE_SUFFIX = "_FILE"
"""Suffix of the variable that names a file with a value, if that value is too long for the kernel.
"""

RESUME_VARIABLE = "TRAINWORKS_RESUME_FROM"
"""Path of the newest complete checkpoint at the (re)start of the ranks; not set without one."""

RESTARTS_VARIABLE = "TRAINWORKS_RESTART_COUNT"
"""Number of restarts of the job, by the platform (as far as known) and by torchrun."""

HOSTNAME_VARIABLE = "TRAINWORKS_HOSTNAME"
"""The result of gethostname() with the hostname shim."""

PYTHON_HOOKS_VARIABLE = "TRAINWORKS_PYTHON_HOOKS"
"""Hooks of programs/python that are active in every Python of the job: words of ``stacks``,
``exit``, ``end``, ``ray``, ``world``.
"""

PLACE_VARIABLE = "TRAINWORKS_RANK"
"""``RANK of WORLD_SIZE``: the rank of a process in the plan, if the launcher's starter started it.
"""

RUNTIME_DIRECTORY_VARIABLE = "TRAINWORKS_RUNTIME_DIRECTORY"
"""The host's private directory for the life of the job: the ranks' environment and socket.
Set by the supervisor (its name is random), read by rank.py and agent.py."""

# --- the image's files ----------------------------------------------------------------------------
IMAGE_MANIFEST = "/opt/trainworks/image.json"
"""The image's own plan; written by the builder."""

IMAGE_MANIFEST_SCHEMA = 1
"""The manifest schema that this launcher reads."""

OPEN_MPI = "open-mpi"
"""The manifest's name of Open MPI; its version decides the spelling of mpirun's options."""

NCCL_PLUGIN = "aws-ofi-nccl"
"""The manifest's name of the component with which NCCL uses libfabric, and so EFA."""

WITHOUT_NCCL_PLUGIN = "NCCL talks TCP between hosts, even where EFA devices are present"
"""Effect of an image without that component."""

# --- limits and defaults --------------------------------------------------------------------------
FETCHED_ARCHIVE = "code.tar.gz"
"""Name, in the runtime directory, of an archive of code that was fetched."""

ARGUMENT_LIMIT_BYTES = 131_072
"""The kernel's limit of one argument, with its final zero byte: MAX_ARG_STRLEN, execve(2)."""

CONTROL_PORT = 7780
"""Default TCP port of the control channel.

Beside MASTER_PORT, outside the kernel's ephemeral range.
"""

MASTER_PORT = 7777
"""Default of MASTER_PORT, as in the framework toolkits (as sagemaker-training)."""

STOP_SECONDS = 30.0
"""Seconds from a stop signal to KILL on a host without a container and without a scheduler.

A container engine and a scheduler send KILL themselves.
"""

JOIN_LIMIT_SECONDS = 600.0
"""Default seconds within which all hosts have to join the leader.

Hosts of one job start minutes apart with a large image. sagemaker-training waits 15 minutes for the
name of a host to resolve.
"""

PREPARE_LIMIT_SECONDS = 1800.0
"""Default seconds for code and requirements; pip may have to compile packages."""

HEARTBEAT_SECONDS = 1.0
"""Longest interval between two heartbeats on the control channel."""

HEARTBEAT_LIMIT_SECONDS = 12.0
"""Default seconds without a heartbeat after which a host counts as lost.

Every host must have ended within 15 s of a host's death.
"""

HANG_LIMIT_SECONDS = 600.0
"""Default seconds without progress of any rank after which a job counts as hanging.

torch's watchdog of NCCL ends a job after the same time, without a cause. Source:
torch/distributed/constants.py.
"""

START_LOOK_SECONDS = 60.0
"""From the start of the program to the first sample of ranks that have not found each other.

Ranks that import for longer have not reached their rendezvous, and are not reported.
"""

HANG_FIRST_LOOK = 0.25
"""Share of HANG_LIMIT_SECONDS without output before the ranks are sampled.

A rank that prints more often is never sampled.
"""

FAILURE_GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and KILL for the processes of a job that has already failed on another
host. Short because every host has to end within 5 s of the first failure, and no result is left to
save.
"""

KILL_LIMIT_SECONDS = 10.0
"""Seconds after KILL in which a process has to end.

A process that hangs in the kernel (a dead network file system, a stuck device) is left behind.
"""

REFUSAL_LIMIT_SECONDS = 30.0
"""Seconds in which a host that refuses the job, or a leader with a job that is over before all have
joined, tries to send the outcome to the others, which would wait until the join time-out. The limit
is short because there may be no other host.
"""

LEAVE_LIMIT_SECONDS = 5.0
"""Seconds for which the leader waits, at the end, for goodbyes of the other hosts."""

LOG_LEVEL_DEFAULT = 20
"""Python's logging.INFO (as sagemaker-training)."""

INTERFACE = "eth0"
"""Network interface where the resource config names none (as sagemaker-training)."""

DISTRIBUTED_CONFIG_VARIABLE = "SM_DISTRIBUTED_CONFIG"
"""distributed.json as text, as ModelTrainer's own starter exports it."""

DATA_PARALLEL_PORT = 7592
"""Port of smddp's own rendezvous on the first host of the distribution (as sagemaker-training)."""

TENSORFLOW_WORKER_PORT = 2222
"""Port of each host's training process in a TensorFlow cluster with parameter servers (as
sagemaker-training).
"""

TENSORFLOW_SERVER_PORT = 2223
"""Port of each host's parameter server in a TensorFlow cluster (as sagemaker-training)."""

TENSORFLOW_MIRRORED_PORT = 8890
"""Port of each host's training process under MultiWorkerMirroredStrategy (as
sagemaker-training).
"""

MXNET_SCHEDULER_PORT = 8000
"""Port of MXNet's scheduler on the first host.

The hyperparameter ``_ps_port`` replaces it (as sagemaker-training).
"""

XLA_WORKER_PORT = 43857
"""Port of each host's XRT worker (as sagemaker-training)."""

XLA_MESH_PORT = 53957
"""Port of the XRT mesh service on the first host (as sagemaker-training)."""

JOB_SECRET_MINIMUM = 16
"""Characters of a job secret.

A program that can connect to the leader gets a proof that is made with the secret, and could guess
a short one offline.
"""

ELASTIC_RESTARTS = 3
"""Default restarts of a job that may continue with fewer hosts; it continues by a restart."""

FRUITLESS_RESTARTS = 3
"""Number of restarts in a row without progress that end a job, even if more are allowed."""

FRUITLESS_SECONDS = 600.0
"""A longer attempt of the ranks counts as progress: a script may work without output."""

HYPERPARAMETERS_LIMIT = 100
"""Limit of the platform for hyperparameters of one job.

Source: API reference, CreateTrainingJob, HyperParameters.
"""

HYPERPARAMETER_LENGTH_LIMIT = 2500
"""Limit of the platform for characters of one hyperparameter's value, as JSON.

Source: as HYPERPARAMETERS_LIMIT.
"""

LOOPBACK = "127.0.0.1"
"""Address of rank 0 in a job of one host. The platform's name of the only host may not resolve
(``docker run`` by hand with a resource config of algo-1), and no other host connects.
"""

# --- exit status, API -----------------------------------------------------------------------------
EXIT_NOT_STARTED = 64
"""The job's inputs were refused; nothing was started."""

EXIT_PREPARATION = 65
"""Code or requirements could not be prepared; the user's program was not started."""

EXIT_HOSTS = 66
"""A host never joined, or was lost, or could not be reached."""

EXIT_CHECK = 67
"""A check of a host failed; the user's program was not started."""

EXIT_HANG = 68
"""No rank made progress for the limit, and TRAINWORKS_HANG is ``fail``."""

EXIT_LAUNCHER = 70
"""The launcher itself failed (a defect of ours, please report)."""

EXIT_NOT_EXECUTABLE = 126
"""``docker run IMAGE program``: the program exists and cannot be executed (a
shell's convention).
"""

EXIT_NOT_FOUND = 127
"""``docker run IMAGE program``: the program does not exist (a shell's convention)."""

# --- reserved hyperparameters ---------------------------------------------------------------------
RESERVED_PREFIX = "sagemaker_"
"""Hyperparameters that start with this never reach the script's arguments (as
sagemaker-training).
"""

RESERVED_NAMES = frozenset(
    (
        "sagemaker_program",
        "sagemaker_submit_directory",
        "sagemaker_enable_cloudwatch_metrics",
        "sagemaker_region",
        "sagemaker_container_log_level",
        "sagemaker_job_name",
        "default_user_module_name",
        "_tuning_objective_metric",
        "sagemaker_s3_output",
    )
)
"""Reserved names that are settings of the platform; other reserved names become
SM_FRAMEWORK_PARAMS (as sagemaker-training)."""

PROGRAM = "sagemaker_program"
"""Entry point, relative to the code directory."""

SUBMIT_DIRECTORY = "sagemaker_submit_directory"
"""Place of the code: a local directory, a local tar.gz (also as file://) or a tar.gz at s3://."""

ARGUMENT_STYLE = "sagemaker_argument_style"
"""Style of the script's arguments, one of arguments.STYLES; default "value" (as
sagemaker-training).
"""

ARGUMENT_ORDER = "sagemaker_argument_order"
"""Order of the arguments, one of arguments.ORDERS; default "name" (as sagemaker-training)."""

LOG_LEVEL = "sagemaker_container_log_level"
"""Python log level, an int; exported as SM_LOG_LEVEL; default 20."""

S3_OUTPUT = "sagemaker_s3_output"
"""Address to which sagemaker-training uploads output/intermediate during a job.

This launcher uploads nothing, and warns.
"""

JOB_NAME = "sagemaker_job_name"
"""Name of the job as the SDK knows it."""

REGION = "sagemaker_region"
"""Region as the SDK knows it."""

MPI_ENABLED = "sagemaker_mpi_enabled"
"""Bool: start with mpirun. From distribution={'mpi': {'enabled': True}}."""

PROCESSES_PER_HOST = "sagemaker_mpi_num_of_processes_per_host"
"""Int: processes on each host, in every mode in spite of its name (as sagemaker-training). Default:
GPUs, else Neuron cores, else 1."""

MPI_PROCESSES = "sagemaker_mpi_num_processes"
"""Int: total of MPI processes; default hosts x processes per host."""

MPI_OPTIONS = "sagemaker_mpi_custom_mpi_options"
"""Str: the user's own mpirun options, with shell quoting."""

TORCH_DISTRIBUTED_ENABLED = "sagemaker_torch_distributed_enabled"
"""Bool: start with torchrun. From distribution={'torch_distributed': {'enabled': True}}."""

DATA_PARALLEL_ENABLED = "sagemaker_distributed_dataparallel_enabled"
"""Bool: smddp.

From distribution={'smdistributed': {'dataparallel': {'enabled': True}}}; newer SDKs send it for
``pytorchddp`` as well.
"""

DATA_PARALLEL_OPTIONS = "sagemaker_distributed_dataparallel_custom_mpi_options"
"""Str: the user's own mpirun options of a data parallel job, with shell quoting."""

PYTORCH_DDP_ENABLED = "sagemaker_pytorch_ddp_enabled"
"""Bool: DDP started by mpirun, of older SDKs.

From distribution={'pytorchddp': {'enabled': True}}.
"""

PYTORCH_XLA_ENABLED = "sagemaker_pytorch_xla_multi_worker_enabled"
"""Bool: torch_xla's own starter. From distribution={'pytorchxla': {'enabled': True}}."""

RAY_ENABLED = "sagemaker_ray_enabled"
"""Bool: Ray's head and workers beside the program.

No SDK sends this: give the hyperparameter, or ``--mode ray``.
"""

PARAMETER_SERVER_ENABLED = "sagemaker_parameter_server_enabled"
"""Bool: parameter servers beside the workers.

From distribution={'parameter_server': {'enabled': True}}.
"""

MULTI_WORKER_MIRRORED_ENABLED = "sagemaker_multi_worker_mirrored_strategy_enabled"
"""Bool: TensorFlow's strategy of that name.

From distribution={'multi_worker_mirrored_strategy': {'enabled': True}}.
"""

PLATFORM_TYPES = "ml."
"""Prefix of every instance type of the platform; others ("local") are not in its table."""

INSTANCE_TYPE = "sagemaker_instance_type"
"""Str: the instance type as the SDK knows it; else the resource config's."""

MAX_RESTARTS = "sagemaker_torch_distributed_max_restarts"
"""Int: the same as MAX_RESTARTS_VARIABLE."""

MIN_HOSTS = "sagemaker_torch_distributed_min_hosts"
"""Int: the same as MIN_HOSTS_VARIABLE."""

DISTRIBUTION_INSTANCE_GROUPS = "sagemaker_distribution_instance_groups"
"""List of the instance groups that take part in the distributed job."""

MODEL_PARALLEL_PARAMETERS = "mp_parameters"
"""Object; a non-empty one switches model parallelism on (as sagemaker-training).

The name has no reserved prefix, so that the script gets an argument as well.
"""

MODEL_PARALLEL_VARIABLE = "SM_HP_MP_PARAMETERS"
"""MODEL_PARALLEL_PARAMETERS as an environment variable (as sagemaker-training)."""
