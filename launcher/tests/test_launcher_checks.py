"""Checks before the first step: a stand-in for nvidia-smi with every fault,
real file systems, real clocks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from launcher_support import (
    LAUNCHER,
    NO_GPU,
    TIME_OUT,
    Launcher,
    environment,
    plan,
    stand_in,
    write_inputs,
    write_manifest,
)

from trainworks_launcher.checks import FAILED, GPU_SECONDS, QUICK_SECONDS, WARNING, Checks, rules
from trainworks_launcher.checks.host_state import HostState, driver_version
from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment import platforms
from trainworks_testing.clock import assert_within, start_clock
from trainworks_testing.ports import free_port

HERE = Path(__file__).parent
CHECK = LAUNCHER / "trainworks_launcher/programs/check.py"


def findings_of(checks: Checks, seen: HostState) -> list[tuple[str, str]]:
    return [(finding.severity, finding.what) for finding in rules.find_problems(checks, seen)]


# --- the meaning of figures -----------------------------------------------------------------------
OLD = "the host's NVIDIA driver 470.57.02 is older than 525.60.13, which CUDA 12.4 needs"


@pytest.mark.parametrize(
    ("checks", "seen", "expected"),
    [
        (Checks(), HostState(), []),
        # driver
        (
            Checks(gpus=1, cuda="12.4", minimum_driver="525.60.13"),
            HostState("470.57.02"),
            [(FAILED, OLD)],
        ),
        (Checks(gpus=1, cuda="12.4", minimum_driver="525.60.13"), HostState("525.60.13"), []),
        (Checks(gpus=1, minimum_driver="525.60.13"), HostState("1000.1"), []),  # numbers, not text
        (Checks(gpus=1, minimum_driver="525.60.13"), HostState(), []),  # the host does not say
        (Checks(gpus=1), HostState("470.57.02"), []),  # the image does not say
        (
            Checks(gpus=2, without_cuda=True),
            HostState(),
            [(WARNING, "2 GPUs and an image without CUDA")],
        ),
        # counts
        (
            Checks(gpus=1, row_gpus=8, instance_type="ml.x"),
            HostState(),
            [(FAILED, "ml.x has 8 GPUs, and this container has 1")],
        ),
        (
            Checks(row_gpus=1, without_cuda=True),
            HostState(),
            [(WARNING, "1 GPU and an image without CUDA")],
        ),
        (Checks(gpus=8, row_gpus=8), HostState(), []),
        (Checks(gpus=8, row_gpus=0), HostState(), []),  # the type is not known
        (
            Checks(efa=31, row_efa=32, instance_type="ml.x"),
            HostState(),
            [(WARNING, "ml.x has 32 EFA devices, and this container has 31")],
        ),
        (Checks(efa=0, row_efa=32), HostState(), []),  # said where EFA is chosen
        # /dev/shm, disk, interface
        (
            Checks(shared_memory=True),
            HostState(shared_memory=64 << 20),
            [(WARNING, "/dev/shm has 64 MiB: data loaders with workers may die of SIGBUS")],
        ),
        (Checks(shared_memory=True), HostState(shared_memory=1 << 30), []),
        (Checks(), HostState(shared_memory=64 << 20), []),
        (
            Checks(),
            HostState(free={"/a": 1 << 30, "/b": 3 << 30}),
            [(WARNING, "/a has 1.0 GiB of free disk")],
        ),
        (
            Checks(),
            HostState(free={"/a": 1 << 30, "/b": 4096}),
            [(FAILED, "/b has 0 MiB of free disk"), (WARNING, "/a has 1.0 GiB of free disk")],
        ),
        (
            Checks(interface="eth1"),
            HostState(interface_up=False),
            [(FAILED, "the network interface eth1 is down, and the other hosts are reached by it")],
        ),
        (Checks(interface="eth1"), HostState(interface_up=None), []),
    ],
)
def test_what_the_figures_of_a_host_mean(
    checks: Checks, seen: HostState, expected: list[tuple[str, str]]
) -> None:
    assert findings_of(checks, seen) == expected


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15"
                " UTC 2024\nGCC version: 12"
            ),
            "535.183.01",
        ),
        (
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build "
                " (dvs-builder@U22)"
            ),
            "580.95.05",
        ),
        ("", ""),
        ("something else 1.2", ""),
    ],
)
def test_the_drivers_version_in_the_kernels_file(text: str, version: str) -> None:
    assert driver_version(text) == version


@pytest.mark.parametrize(
    ("difference", "uncertainty", "words"),
    [
        (1.9, 0.0, ""),
        (-3.0, 0.1, "the clock of algo-2 is 3.0 s behind the leader's"),
        (400.0, 0.5, "the clock of algo-2 is 400.0 s ahead of the leader's"),
        (3.0, 1.5, ""),  # the answer came so late that it may be all right
    ],
)
def test_a_difference_between_clocks(difference: float, uncertainty: float, words: str) -> None:
    finding = rules.clock("algo-2", difference, uncertainty)
    assert (finding.what if finding else "") == words


@pytest.mark.parametrize(
    ("variables", "gpus", "checked", "in_a_process"),
    [({}, 0, True, False), ({"TRAINWORKS_CHECK": "off"}, 8, False, False), ({}, 8, True, True)],
)
def test_what_a_job_asks_for(
    variables: Mapping[str, str], gpus: int, checked: bool, in_a_process: bool
) -> None:
    node_plan = plan(
        environment(variables={"PATH": "/bin", **variables}, devices=NO_GPU._replace(gpus=gpus))
    )
    assert (
        node_plan.checks is not None,
        bool(node_plan.checks and node_plan.checks.needs_process),
    ) == (
        checked,
        in_a_process,
    )


def test_one_of_several_tasks_on_a_host_checks_it() -> None:
    tasks = [
        platforms.NONE._replace(tasks=platforms.Tasks(number, number, (2,))) for number in (0, 1)
    ]
    plans = [plan(environment(platform=platform)) for platform in tasks]
    assert [task_plan.checks is not None for task_plan in plans] == [True, False]


# --- NVIDIA's driver ------------------------------------------------------------------------------
CUDA = """#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) {
    const char *fault = getenv("NVML_FAULT");
    return fault && (!strcmp(fault, "old fabric manager") || !strcmp(fault, "fabric")) ? 802 : 0;
}
"""


@pytest.fixture(scope="module")
def smi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-ins for nvidia-smi and libcuda.so.1."""
    folder = tmp_path_factory.mktemp("smi")
    words = ("gcc", "-shared", "-fPIC", "-x", "c", "-o", folder / "libcuda.so.1", "-")
    subprocess.run(words, check=True, timeout=TIME_OUT, input=CUDA.encode())
    stand_in(folder)
    return folder


def check(checks: Checks, variables: Mapping[str, str]) -> tuple[int, list[str], float]:
    """The status, the lines and the seconds of a check."""
    began = start_clock()
    done = subprocess.run(
        (sys.executable, "-IS", CHECK, json.dumps(checks._asdict())),
        env={"PATH": os.defpath, **variables},
        capture_output=True,
        timeout=TIME_OUT,
        check=False,
    )
    lines = [line.removeprefix("trainworks: ") for line in done.stderr.decode().splitlines()]
    return done.returncode, lines, time.monotonic() - began


def host(smi: Path, fault: str) -> dict[str, str]:
    """The variables of a host whose driver has a fault."""
    return {"PATH": f"{smi}:{os.environ['PATH']}", "LD_LIBRARY_PATH": str(smi), "NVML_FAULT": fault}


MODERN = Checks(gpus=2, cuda="12.4", minimum_driver="525.60.13")


@pytest.mark.parametrize(
    ("fault", "status", "line"),
    [
        ("", 0, ""),
        ("none of it", 0, ""),  # a GPU without ECC
        (
            "old",
            67,
            (
                "check failed: the host's NVIDIA driver 450.51.06 is older than 525.60.13, which"
                " CUDA 12.4 needs: "
            ),
        ),
        (
            "mismatch",
            67,
            "check failed: the NVIDIA driver was changed while the host was running: ",
        ),
        ("no driver", 67, "check failed: the NVIDIA driver is not loaded on the host: "),
        (
            "one is missing",
            67,
            "check failed: the NVIDIA driver knows 1 of the 2 GPUs in this container: ",
        ),
        ("lost", 67, "check failed: GPU 1 is lost: "),
        ("reset", 67, "check failed: GPU 1 has to be reset before it can be used: "),
        ("ecc", 67, "check failed: GPU 1 has 7 memory errors that could not be corrected: "),
        ("remap", 67, "check failed: GPU 1 has broken memory that could not be replaced: "),
        ("fallen", 67, "check failed: the NVIDIA driver knows 0 of the 2 GPUs in this container: "),
        ("pending", 0, "warning: GPU 1 has broken memory that the next reset replaces: "),
        ("hot", 0, "warning: GPU 1 is slowed down: too hot (hardware limit): "),
        ("crash", 0, "warning: nvidia-smi was ended by signal 6: "),
        ("slow", 0, ""),
        (
            "fabric",
            67,
            "check failed: NVIDIA's fabric manager is not up: CUDA cannot start (error 802): ",
        ),
        (
            "old fabric manager",
            67,
            "check failed: NVIDIA's fabric manager is not up: CUDA cannot start (error 802): ",
        ),
        ("fabric late", 0, ""),  # CUDA starts
    ],
)
def test_what_the_library_says_of_the_gpus(smi: Path, fault: str, status: int, line: str) -> None:
    code, lines, _ = check(MODERN, host(smi, fault))
    assert code == status, lines
    assert [text[: len(line)] for text in lines] == ([line] if line else [])


def test_a_fabric_that_is_late_is_said_where_cuda_cannot_be_asked(tmp_path: Path) -> None:
    stand_in(tmp_path)
    code, (line,), _ = check(MODERN, host(tmp_path, "fabric late"))
    assert code == 0
    assert line.startswith(
        "warning: 1 of 2 GPUs wait for NVIDIA's fabric manager: start nvidia-fabricmanager"
    )


def test_a_driver_that_never_answers_is_left_behind(smi: Path) -> None:
    """The driver may have to start its GPUs first, one after the other: there is no persistence
    daemon here.
    """
    code, lines, seconds = check(MODERN, host(smi, "hang"))
    assert code == 0
    assert lines[0].startswith("warning: the NVIDIA driver does not answer within 8.5 s")
    now = time.monotonic()
    assert_within(QUICK_SECONDS + 2 * GPU_SECONDS, now - seconds, now)


def test_a_container_without_the_program_is_told_how_to_get_it() -> None:
    code, (line,), _ = check(MODERN, {})
    assert code == 0
    assert line.startswith("warning: nvidia-smi is not in this container: ")


# --- a whole job ----------------------------------------------------------------------------------
def gpu_host(tmp_path: Path, smi: Path, fault: str, minimum_driver: str = "") -> dict[str, str]:
    """Variables of a host with two GPUs."""
    components: Json = {"cuda": {"version": "12.4"}}
    programs = {"python": sys.executable}
    image = write_manifest(
        tmp_path / "image.json", programs, components=components, minimum_driver=minimum_driver
    )
    return {**host(smi, fault), "TRAINWORKS_IMAGE_MANIFEST": str(image)}


@pytest.mark.parametrize(("minimum", "status"), [("580.65.06", 67), ("450.51.06", 0)])
def test_a_job_ends_with_a_status_of_its_own(
    tmp_path: Path, smi: Path, minimum: str, status: int
) -> None:
    write_inputs(tmp_path, "print('it ran')", {}, {})
    with Launcher(
        tmp_path, variables=gpu_host(tmp_path, smi, "old", minimum_driver=minimum)
    ) as launcher:
        assert launcher.wait() == status
    assert ("it ran\n" in launcher.text) is (status == 0)
    if status:
        assert (
            " failed: the host's NVIDIA driver 450.51.06 is older than 580.65.06, which CUDA 12.4"
            in launcher.failure
        )
        document = json.loads((tmp_path / "output/failure.json").read_text(encoding="utf-8"))
        assert (document["status"], document["cause"]) == (67, launcher.failure.partition("\n")[0])


def test_a_failed_check_of_one_host_ends_all_with_its_cause(tmp_path: Path, smi: Path) -> None:
    hosts = ["127.0.0.1", "127.0.0.2"]
    shared = {"TRAINWORKS_CONTROL_PORT": str(free_port())}
    for host in hosts:
        config: dict[str, Json] = {
            "hosts": [*hosts],
            "current_host": host,
            "network_interface_name": "lo",
        }
        write_inputs(tmp_path / host, "print('it ran')", {}, config)
    with (
        Launcher(tmp_path / hosts[0], variables=shared) as leader,
        Launcher(
            tmp_path / hosts[1], variables={**shared, **gpu_host(tmp_path, smi, "lost")}
        ) as worker,
    ):
        assert (leader.wait(), worker.wait()) == (67, 67)
    assert leader.failure == worker.failure
    assert leader.failure.startswith(
        "a check of host 127.0.0.2 failed: GPU 1 is lost: it has fallen off the bus: "
    )
    assert "it ran\n" not in leader.text + worker.text


def test_a_warning_does_not_end_a_job_and_off_does_not_look(tmp_path: Path, smi: Path) -> None:
    write_inputs(tmp_path, "print('it ran')", {}, {})
    variables = gpu_host(tmp_path, smi, "hot")
    with Launcher(tmp_path, variables=variables) as launcher:
        assert launcher.wait() == 0
    assert "trainworks: warning: GPU 1 is slowed down" in launcher.text
    with Launcher(
        tmp_path, variables={**variables, "NVML_FAULT": "lost", "TRAINWORKS_CHECK": "off"}
    ) as launcher:
        assert launcher.wait() == 0
    assert "GPU 1" not in launcher.text


def test_a_value_that_is_not_a_level_is_refused(tmp_path: Path) -> None:
    write_inputs(tmp_path, "", {}, {})
    with Launcher(tmp_path, variables={"TRAINWORKS_CHECK": "quik"}) as launcher:
        assert launcher.wait() == 64
    assert (
        "'quik' is not understood (variable TRAINWORKS_CHECK); did you mean 'quick'?"
        in launcher.text
    )


@pytest.mark.parametrize(
    ("script", "limit", "status", "message"),
    [
        (
            "exec sleep infinity",
            0.1,
            names.EXIT_HANG,
            "failed: the all-reduce of 16 ranks on 2 host(s) has not ended within 0.1 s: ",
        ),
        ("exit 3", TIME_OUT, 3, ""),
        ("kill -9 $$", TIME_OUT, 137, ""),
        (":", TIME_OUT, 1, "failed: all_reduce_perf left no figure: "),
        ("echo half > $2", TIME_OUT, 1, "failed: all_reduce_perf left no figure: "),
    ],
)
def test_how_an_all_reduce_may_end(script: str, limit: float, status: int, message: str) -> None:
    request = {"limit": limit, "ranks": 16, "hosts": 2, "type": "ml.x", "gigabits": 400}
    words = (
        sys.executable,
        "-I",
        CHECK.with_name("measure.py"),
        json.dumps(request),
        "sh",
        "-c",
        script,
        "mpirun",
    )
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIME_OUT, check=False)
    assert (done.returncode, done.stderr[: len(f"trainworks: {message}")]) == (
        status,
        f"trainworks: {message}" if message else "",
    )


def test_a_check_of_the_bandwidth_fails_in_an_image_without_nccl_tests(tmp_path: Path) -> None:
    with Launcher(tmp_path, "check", "bandwidth") as launcher:
        assert launcher.wait() == names.EXIT_CHECK
    assert launcher.text.startswith(
        "check failed: no bandwidth was measured: all_reduce_perf is not in this image:"
        " build it with `--with nccl-tests`"
    )


def test_the_command_warns_of_devices_as_the_start_of_a_job_does(tmp_path: Path) -> None:
    image = write_manifest(tmp_path / "image.json", {"python": sys.executable})
    config: dict[str, Json] = {
        "hosts": ["algo-1", "algo-2"],
        "current_host": "algo-1",
        "current_instance_type": "ml.fabric.xlarge",
    }
    write_inputs(tmp_path, "", {}, config)
    variables = {"TRAINWORKS_IMAGE_MANIFEST": str(image), "NCCL_SOCKET_IFNAME": "absent0"}
    with Launcher(tmp_path, "--plan", variables=variables) as planned:
        assert planned.wait() == 0, planned.text
    warnings = json.loads(planned.text)["warnings"]
    with Launcher(tmp_path, "check", variables=variables) as launcher:
        launcher.wait()
    for words in ("ml.fabric.xlarge has EFA, but no EFA device", "NCCL_SOCKET_IFNAME=absent0"):
        (warning,) = [line for line in warnings if words in line]
        assert f"warning: {warning}\n" in launcher.text
    assert "nothing is wrong" not in launcher.text


def test_the_command_checks_a_host_without_a_script(tmp_path: Path, smi: Path) -> None:
    variables = gpu_host(tmp_path, smi, "ecc")
    with Launcher(tmp_path, "check", variables=variables) as launcher:
        assert launcher.wait() == 67
    assert launcher.text.startswith("check failed: GPU 1 has 7 memory errors")
    with Launcher(tmp_path, "check", variables={**variables, "NVML_FAULT": ""}) as launcher:
        assert launcher.wait() == 0
    assert "nothing is wrong with this host" in launcher.text


@pytest.mark.parametrize(
    ("place", "size", "status", "words"),
    [
        ("/dev/shm", "1m", 0, "warning: /dev/shm has 1 MiB"),
        ("{base}", "4m", 67, "check failed: {base}/output has 4 MiB of free disk"),
        ("{base}", "500m", 0, "warning: {base}/output has 500 MiB of free disk"),
    ],
)
def test_a_small_file_system(place: str, size: str, status: int, words: str) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="trainworks-test-") as folder:
        small_file_system(Path(folder), place, size, status, words)


def small_file_system(tmp_path: Path, place: str, size: str, status: int, words: str) -> None:
    base = tmp_path / "ml"
    base.mkdir()
    script = f'mount -t tmpfs -o size={size} tmpfs {place.format(base=base)} && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", script, "sh")
    if subprocess.run((*prefix, "true"), check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    image = write_manifest(tmp_path / "image.json", {}, target={"framework": "pytorch"})
    variables = {"TRAINWORKS_IMAGE_MANIFEST": str(image), "TMPDIR": str(tmp_path)}
    with Launcher(base, "check", prefix=prefix, variables=variables) as launcher:
        assert launcher.wait() == status
    assert words.format(base=base) in launcher.text


def test_hosts_whose_clocks_differ_say_so(tmp_path: Path) -> None:
    """A library in front of clock_gettime moves one host's clock by half a minute."""
    source = tmp_path / "clock.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <time.h>\nint clock_gettime(clockid_t"
        " id, struct timespec *at) {\n    int code = ((int (*)(clockid_t, struct timespec"
        ' *))dlsym(RTLD_NEXT, "clock_gettime"))(id, at);\n    if (id == CLOCK_REALTIME) at->tv_sec'
        " += 30;\n    return code;\n}\n",
        encoding="ascii",
    )
    library = tmp_path / "clock.so"
    subprocess.run(
        ("gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"), check=True, timeout=TIME_OUT
    )
    hosts = ["127.0.0.1", "127.0.0.2"]
    shared = {"TRAINWORKS_CONTROL_PORT": str(free_port())}
    for host in hosts:
        config: dict[str, Json] = {
            "hosts": [*hosts],
            "current_host": host,
            "network_interface_name": "lo",
        }
        write_inputs(tmp_path / host, "", {}, config)
    with (
        Launcher(tmp_path / hosts[0], variables=shared) as leader,
        Launcher(tmp_path / hosts[1], variables={**shared, "LD_PRELOAD": str(library)}) as worker,
    ):
        assert (leader.wait(), worker.wait()) == (0, 0)
    assert "warning: the clock of 127.0.0.2 is 30.0 s ahead of the leader's" in worker.text
    assert "the clock of" not in leader.text
