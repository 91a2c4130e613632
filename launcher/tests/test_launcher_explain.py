"""``train explain`` and ``train --plan``: complete, redacted, readable; the job's first lines."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
from launcher_support import LAUNCHER, TIME_OUT, Launcher, environment, plan, write_inputs
from test_launcher_plan import EIGHT_GPUS, SCENARIOS, TORCH, TWO_GROUPS

from trainworks_launcher.command.explain import explain, to_json, to_table
from trainworks_launcher.command.options import COMMANDS, UsageError, parse
from trainworks_launcher.command.rank_map import rank_map
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.modes import SWITCHES
from trainworks_launcher.contract.origins import Origin
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.environment import Devices, Environment
from trainworks_launcher.job.job import make_job
from trainworks_launcher.plan.modes import plan_host
from trainworks_launcher.plan.plan import first_lines

TWO = ("algo-1", "algo-2")
MPI = {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": "2"}
SECRET = "hunter2-hunter2"


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_word_and_every_variable_is_accounted_for(name: str) -> None:
    node_plan = SCENARIOS[name]()
    inherited = {"PATH": "/usr/bin:/bin", "SM_NUM_CPUS": node_plan.env["SM_NUM_CPUS"]}
    rows = explain(node_plan, inherited)
    origins = [origin.word for origin in Origin]
    unexplained = [row.name for row in rows if not row.why or row.origin not in origins]
    assert unexplained == [], "give the variable a Reason in its mode, or a row in explain.py"
    variables = {row.name: row.value for row in rows if row.kind == "variable"}
    assert variables == dict(node_plan.env)
    words = [
        word
        for row in rows
        if row.kind == "flag"
        for word in shlex.split(f"{row.name} {row.value}")
    ]
    for word in node_plan.argv:
        assert any(part in words for part in (word, word.partition("=")[2])), f"{word} is in no row"


def test_a_place_that_the_user_has_set_is_the_users(tmp_path: Path) -> None:
    write_inputs(tmp_path, "", {}, {})
    places = {
        "SM_MODEL_DIR": str(tmp_path / "kept"),
        "TRAINWORKS_CHECKPOINT_DIRECTORY": str(tmp_path / "checkpoints"),
    }
    with Launcher(tmp_path, "explain", "--format", "json", variables=places) as launcher:
        assert launcher.wait() == 0, launcher.text
    rows = {row["name"]: row for row in json.loads(launcher.text)["rows"]}
    for name, place in places.items():
        assert (rows[name]["value"], rows[name]["origin"]) == (place, "user")


def test_what_stands_for_what_the_host_lacks_is_accounted_for() -> None:
    locale = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    node_plan = plan(environment()._replace(home="/tmp/home", temporary="/var/tmp", locale=locale))
    rows = {row.name: row.why for row in explain(node_plan, {}) if row.kind == "variable"}
    assert all(rows[name] for name in ("HOME", "TMPDIR", *locale))


def test_what_runs_before_and_beside_the_command_has_rows_too() -> None:
    before = explain(SCENARIOS["shell-with-requirements"](), {})
    (row,) = [row for row in before if row.kind == "process"]
    assert (row.name, "install.py" in row.value) == ("requirements", True)
    beside = explain(SCENARIOS["parameter-server-tensorflow-leader"](), {})
    assert (
        next(row.name for row in beside if row.kind == "process") == "TensorFlow parameter server"
    )


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_the_table_fits_its_terminal_and_loses_no_reason(width: int) -> None:
    node_plan = SCENARIOS["mpi-user-options"]()
    rows = explain(node_plan, {})
    table = to_table(node_plan, rows, width)
    assert all(len(line) <= max(width, 60) or len(line.split()) == 1 for line in table.splitlines())
    joined = "".join(table.split())
    for row in rows:
        assert all(word in joined for word in row.why.split() if len(word) < 12), row
    assert "userfromthejob'scustom_mpi_options" in joined.replace("VERSION", "")


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_table_breaks_no_word_so_that_all_can_be_copied(name: str) -> None:
    node_plan = SCENARIOS[name]()
    for width in (60, 100):
        words = to_table(node_plan, explain(node_plan, {}), width).split()
        for row in explain(node_plan, {}):
            assert set(row.name.split()) <= set(words)
            is_shortened = row.kind == "variable" and len(row.value) > 160
            assert is_shortened or set(row.value.split()) <= set(words), row


def test_a_command_line_is_shown_whole() -> None:
    node_plan = SCENARIOS["shell-with-requirements"]()
    long = node_plan._replace(
        requirements=(*node_plan.requirements, *(f"word-{number}" for number in range(99)))
    )
    assert "word-0 word-1" in " ".join(to_table(long, explain(long, {}), 80).split())
    assert "word-98" in to_table(long, explain(long, {}), 80)


def test_all_arguments_of_the_script_are_shown() -> None:
    parameters = {f"parameter-{number}": f"value-{number}" for number in range(40)}
    node_plan = plan(environment(parameters))
    words = to_table(node_plan, explain(node_plan, {}), 80).split()
    assert [word for word in words if word.startswith("--parameter-")] == sorted(
        f"--{name}" for name in parameters
    )
    assert set(parameters.values()) <= set(words)


MAPS: dict[str, tuple[Environment, str]] = {
    "gpus": (
        environment(TORCH, hosts=TWO, instance_type="ml.fast.xlarge", devices=EIGHT_GPUS),
        """\
Ranks, 2 hosts x 8 (* is this host):
  GPU        0  1  2  3  4  5  6  7
  algo-1 *   0  1  2  3  4  5  6  7
  algo-2     8  9 10 11 12 13 14 15""",
    ),
    "no gpus": (
        environment(MPI, hosts=TWO),
        """\
Ranks, 2 hosts x 2 (* is this host):
  local      0  1
  algo-1 *   0  1
  algo-2     2  3""",
    ),
    "idle gpus": (
        environment(MPI, devices=Devices(gpus=3, cpus=4)),
        """\
Ranks, 1 host x 2 (* is this host, 1 GPU of each idle):
  GPU        0  1  2
  algo-1 *   0  1  -""",
    ),
    "many hosts": (
        environment(
            {**MPI, "sagemaker_mpi_num_of_processes_per_host": "64"},
            hosts=[f"algo-{n}" for n in range(1, 42)],
        ),
        "Ranks, 41 hosts x 64 (* is this host):\n  algo-1 *  0-63\n"
        + "".join(f"  algo-{n:<4} {64 * n - 64}-{64 * n - 1}\n" for n in range(2, 12))
        + "  and 29 more hosts, up to\n  algo-41   2560-2623",
    ),
    "a group": (
        environment(
            {**MPI, "sagemaker_distribution_instance_groups": '["train"]'},
            resource_config=MappingProxyType(TWO_GROUPS),
        ),
        """\
Ranks, 2 hosts x 2 (* is this host):
  local    0  1
  algo-2   0  1
  algo-3   2  3""",
    ),
    "no ranks": (environment({"epochs": "3"}, hosts=TWO), ""),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_map_says_which_rank_is_where(name: str) -> None:
    job_environment, shown = MAPS[name]
    assert (
        "\n".join(rank_map(make_job(job_environment).placement, job_environment.devices)) == shown
    )


def test_the_table_as_json_says_the_same() -> None:
    node_plan = SCENARIOS["torch-two-hosts-efa"]()
    rows = json.loads(to_json(node_plan, explain(node_plan, {})))["rows"]
    assert {
        "kind": "flag",
        "name": "--node-rank",
        "value": "1",
        "origin": "platform",
    }.items() <= next(row for row in rows if row["name"] == "--node-rank").items()
    assert next(row["origin"] for row in rows if row["name"] == "FI_PROVIDER") == "fabric"


def test_the_first_lines_say_mode_hosts_processes_network_and_warnings() -> None:
    job = make_job(environment(MPI, hosts=TWO, instance_type="ml.fabric.xlarge"))
    lines = first_lines(plan_host(job), job)
    assert (
        lines[0] == "mode mpi, host algo-1 (1 of 2), 2 processes on this host, 4 in all, train.py"
    )
    assert lines[1].startswith("between hosts: TCP")
    assert any(line.startswith("warning: ") for line in lines[2:])
    alone = make_job(environment())
    assert first_lines(plan_host(alone), alone) == (
        "mode none, host algo-1 (1 of 1), 1 process on this host, train.py",
    )


def test_a_job_that_goes_on_says_from_where(tmp_path: Path) -> None:
    job = make_job(environment()._replace(resume_from=str(tmp_path / "checkpoint-16")))
    assert f"continues from the checkpoint {tmp_path / 'checkpoint-16'}" in first_lines(
        plan_host(job), job
    )


def write_secret_inputs(base: Path) -> dict[str, str]:
    config: dict[str, Json] = {"current_host": "algo-1", "hosts": ["algo-1"]}
    write_inputs(base, "print('trained')", {"api_token": SECRET, "epochs": "3"}, config)
    return {"WANDB_API_KEY": SECRET + "-key"}


@pytest.mark.parametrize(
    "command", [("--plan",), ("explain",), ("explain", "--format=json"), ("train", "explain")]
)
def test_secrets_are_masked_unless_asked_for(tmp_path: Path, command: tuple[str, ...]) -> None:
    variables = write_secret_inputs(tmp_path)
    with Launcher(tmp_path, *command, variables=variables) as hidden:
        assert hidden.wait() == 0
    with Launcher(tmp_path, *command, "--show-secrets", variables=variables) as shown:
        assert shown.wait() == 0
    assert SECRET not in hidden.text
    assert "--api_token" in hidden.text
    assert SECRET in shown.text


@pytest.mark.parametrize("command", [("--plan",), ()])
def test_a_refusal_is_masked_too(tmp_path: Path, command: tuple[str, ...]) -> None:
    wrong: dict[str, Json] = {
        "token": SECRET,
        "sagemaker_submit_directory": f"ftp://me:{SECRET}@host/code",
    }
    write_inputs(tmp_path, "", {**wrong, "sagemaker_mpi_num_of_processes_per_host": SECRET}, {})
    with Launcher(tmp_path, *command) as launcher:
        assert launcher.wait() == 64
    assert "is not a count" in launcher.text
    assert SECRET not in launcher.text + launcher.failure


def test_the_whole_table_in_the_jobs_log_where_asked_for(tmp_path: Path) -> None:
    variables = write_secret_inputs(tmp_path)
    with Launcher(tmp_path, variables={**variables, "TRAINWORKS_EXPLAIN": "1"}) as launcher:
        assert launcher.wait() == 0
    assert "trainworks:   SM_HP_EPOCHS" in launcher.text
    assert (
        launcher.text.index("mode none, host algo-1")
        < launcher.text.index("SM_HP_EPOCHS")
        < launcher.text.index("\ntrained")
    )
    assert SECRET not in launcher.text
    with Launcher(tmp_path, variables={**variables, "TRAINWORKS_EXPLAIN": "0"}) as quiet:
        assert quiet.wait() == 0
    assert "SM_HP_EPOCHS" not in quiet.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--plam",), "did you mean '--plan'?"),
        (("--procs", "2"), "did you mean '--processes-per-host'?"),
        (("--nproc_per_node=2",), "did you mean '--processes-per-host'?"),
        (("--mode", "torchrun"), "did you mean 'torch_distributed'?"),
        (
            ("--mode", "tasks"),
            "--mode cannot choose 'tasks': the platform selects it where it starts every rank",
        ),
        (("--mode", "torch"), "did you mean 'torch_distributed'?"),
        (("--mode", "deepspeed"), "did you mean 'torch_distributed'?"),
        (("--mode", "smddp"), "did you mean 'smdistributed.dataparallel'?"),
        (("--mode", "foo"), "'smdistributed.dataparallel', 'torch_distributed' (see"),
        (
            ("--mode=smdistributed.modelparallel",),
            """N, and set SM_HP_MP_PARAMETERS='{"pipeline_parallel_degree": 2}' in the job's""",
        ),
        (("--mode", "smp"), "cannot choose 'smdistributed.modelparallel': mode mpi with"),
        (
            ("train", "torchrun", "--nproc_per_node", "2", "x.py", "--lr", "1"),
            "write: train --mode torch_distributed --processes-per-host 2 -- x.py --lr 1",
        ),
        (
            ("explain", "python", "-m", "torch.distributed.run", "x.py"),
            "write: train explain --mode torch_distributed -- x.py",
        ),
        (
            ("--mode", "none", "mpirun", "-np", "2", "python", "x.py"),
            "mode mpi does what mpirun does, write: train --mode mpi -- x.py",
        ),
        (
            ("--nnodes", "2", "x.py"),
            "train has no option '--nnodes'; leave it out: the hosts come from the platform, or",
        ),
        (("--rdzv_endpoint=a:29400",), "the hosts come from the platform"),
        (("train", "explian"), "did you mean 'explain'?"),
        (("explain", "--hosst", "a"), "explain has no option '--hosst'; did you mean '--host'?"),
        (("explain", "--format", "jsn"), "--format 'jsn' is not known; did you mean 'json'?"),
        (("--plan", "--host"), "--host needs a value: --host NAME"),
        (
            ("--plan", "algo-1"),
            "'algo-1' is not understood; to start a program, write: train --plan -- algo-1",
        ),
        (("train", "t.py", "--lr", "3"), "to start a program, write: train -- t.py --lr 3"),
        (
            ("--mode", "mpi", "t.py", "--lr=3"),
            "to start a program, write: train --mode mpi -- t.py --lr=3",
        ),
        (
            ("--mode=mpi", "explain", "x"),
            "to start a program, write: train explain --mode=mpi -- x",
        ),
        (("--plan", "--show-secrets=yes"), "--show-secrets takes no value"),
        (("--plan", "--host", "a", "--host", "b"), "--host is given twice"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest_right_one(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    with Launcher(tmp_path, *words) as launcher:
        assert launcher.wait() == 64
    assert message in launcher.text
    assert "Traceback" not in launcher.text


def test_a_script_without_a_word_before_it_is_answered_with_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    words = (
        sys.executable,
        "-IS",
        str(LAUNCHER / "trainworks_launcher/__main__.py"),
        "t.py",
        "--lr",
        "3",
    )
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=TIME_OUT)
    assert result.returncode == 127
    assert "to train with it, write: train -- t.py --lr 3" in result.stderr


@pytest.mark.parametrize(
    "words", [("--plan", "--mode", "none"), ("--mode", "none", "--plan"), ("--mode=none", "--plan")]
)
def test_options_and_commands_go_together_in_any_order(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    write_inputs(tmp_path, "", {}, {})
    with Launcher(tmp_path, *words) as launcher:
        assert launcher.wait() == 0
    assert json.loads(launcher.text)["mode"] == "none"


def test_arguments_of_the_command_line_are_not_called_hyperparameters() -> None:
    node_plan = plan(environment(invocation=Invocation(("train.py", "--lr", "1"))))
    (why,) = [reason.why for reason in node_plan.why if reason.subject == "arguments"]
    assert why == "as on the command line"


@pytest.mark.parametrize("words", [("--help",), ("train", "-h"), ("explain", "-h")])
def test_the_help_has_every_command_option_and_mode(tmp_path: Path, words: tuple[str, ...]) -> None:
    with Launcher(tmp_path, *words) as launcher:
        assert launcher.wait() == 0
    assert [switch for switch in SWITCHES if switch not in launcher.text] == []
    for command in COMMANDS:
        assert f"train {command.name}" in launcher.text
        shown = {
            option.name: launcher.text.count(f"\n  {option.name} ") for option in command.options
        }
        assert shown == dict.fromkeys(shown, 1)


GROUPS: Json = [
    {
        "instance_group_name": "trainers",
        "instance_type": "ml.fast.xlarge",
        "hosts": ["algo-1", "algo-3"],
    },
    {"instance_group_name": "loaders", "instance_type": "ml.plain.xlarge", "hosts": ["algo-2"]},
]
HERE = Devices(gpus=2, cpus=96, efa=("rdmap16s27",), interfaces=("eth0", "lo"))


def of_group(current: str, name: str, kind: str) -> dict[str, Json]:
    return {
        "current_host": current,
        "hosts": ["algo-1", "algo-2", "algo-3"],
        "current_group_name": name,
        "current_instance_type": kind,
        "instance_groups": GROUPS,
    }


def test_another_hosts_plan_has_that_hosts_names_group_type_and_devices() -> None:
    config = of_group("algo-1", "trainers", "ml.fast.xlarge")
    job_environment = environment(
        {"sagemaker_mpi_enabled": "true"}, resource_config=config, devices=HERE
    )
    third, second = plan(job_environment, "algo-3").env, plan(job_environment, "algo-2").env
    assert (third["SM_NUM_GPUS"], second["SM_NUM_GPUS"]) == ("2", "0"), (
        "own type: as seen here; other type: the table"
    )
    assert (third.get("FI_PROVIDER"), second.get("FI_PROVIDER")) == ("efa", None)
    assert second["SM_CURRENT_INSTANCE_GROUP"] == "loaders"
    assert json.loads(second["SM_RESOURCE_CONFIG"]) == of_group(
        "algo-2", "loaders", "ml.plain.xlarge"
    )
    assert "LD_PRELOAD" not in second, "this platform's hostnames are the job's"
    elsewhere = environment({}, resource_config=config, devices=HERE, hostname="aws")
    assert plan(elsewhere, "algo-2").env["TRAINWORKS_HOSTNAME"] == "algo-2"


@pytest.mark.parametrize(
    "mode", ["sagemaker_mpi_enabled", "sagemaker_torch_distributed_enabled", "epochs"]
)
def test_a_hosts_plan_is_the_same_from_wherever_it_is_asked_for(mode: str) -> None:
    config = of_group("algo-1", "trainers", "ml.fast.xlarge")
    table = Devices(gpus=8, cpus=96, efa=None)
    own_environment = environment({mode: "true"}, resource_config=config, devices=table)
    other_environment = environment(
        {mode: "true"},
        resource_config=of_group("algo-2", "loaders", "ml.plain.xlarge"),
        devices=Devices(gpus=0, cpus=96, efa=None),
        hostname="algo-2",
    )
    assert plan(own_environment, "algo-2") == plan(other_environment)
    assert plan(other_environment, "algo-1") == plan(own_environment)


def test_options_are_words_with_or_without_an_equals_sign() -> None:
    command = next(command for command in COMMANDS if command.name == "explain")
    assert parse(command, ["--host", "a", "--format=json"]) == {
        "--host": ("a",),
        "--format": ("json",),
    }
    with pytest.raises(UsageError):
        parse(command, ["--host"])
