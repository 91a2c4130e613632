"""Jobs that hang, and jobs that only look so: real ranks with torch and gloo on two hosts.

Hosts are network namespaces (``launcher_network``). The rank that differs is
rank 3, on the second host.
"""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from launcher_network import Host, Network, engine_manifest, job_on, need, network_of
from launcher_support import GLOO_ENDS, Launcher, write_inputs

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_testing.clock import assert_within, crowd_since, start_clock

pytestmark = pytest.mark.engine

LIMIT = 5.0
AFTER = 15.0
"""Seconds after the limit in which the rank must be named."""

PAUSE_LIMIT = 4
"""Seconds without progress in the tests of pauses."""

CROWD = 4
"""Threads that want a processor, above which the actions of a rank within the limit cannot be seen.
"""

MODE: dict[str, Json] = {
    "sagemaker_torch_distributed_enabled": "true",
    "sagemaker_mpi_num_of_processes_per_host": 2,
}
RANKS = (
    GLOO_ENDS
    + """
import os, signal, socket, subprocess, sys, threading, time
import torch
import torch.distributed as dist

def say(*words):
    print(*words, time.monotonic(), flush=True)

dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(8)
"""
)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    need("torchrun")
    return engine_manifest(tmp_path)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_of(2) as new_network:
        yield new_network


def variables(spy: bool, **more: str) -> dict[str, str]:
    """The settings of a job; py-spy is that of the test's own environment."""
    own = str(Path(sys.executable).parent)
    path = os.environ["PATH"] if not spy else f"{os.environ['PATH']}:{own}"
    path_entries = [entry for entry in path.split(":") if spy or not Path(entry, "py-spy").exists()]
    return {
        "PATH": ":".join(path_entries),
        "TRAINWORKS_HANG": "fail",
        "TRAINWORKS_HANG_LIMIT_SECONDS": f"{LIMIT:g}",
        **more,
    }


def text_of(hosts: Sequence[Host]) -> str:
    return "\n".join(f"--- {host.base.name}\n{host.text}" for host in hosts)


def begin_of_hang(hosts: Sequence[Host], since: float) -> float:
    """Return when the odd rank began to hang.

    Skip where the ranks took longer than the limit to start.
    """
    matches = re.findall(r"hangs (\d+\.\d+)$", text_of(hosts), re.MULTILINE)
    if not matches and (crowd := crowd_since(since)) > CROWD:
        pytest.skip(
            f"NOT TESTED: {crowd:.0f} threads want each processor here, and the limit is {LIMIT} s"
        )
    assert matches, text_of(hosts)
    return max(map(float, matches))


HANGS = {
    "skips an all_reduce": (
        """
for step in range(6):
    if rank == 3 and step == 2:
        continue
    dist.all_reduce(ones)
    if step == 4:
        say("hangs")
dist.barrier()
""",
        (
            r"rank 3 on algo-2 waits in barrier \(train\.py:\d+\); 3 others wait in all_reduce"
            r" \(train\.py:\d+\)"
        ),
    ),
    "sleeps in a lock": (
        """
lock = threading.Lock()
def take_the_lock():
    lock.acquire()
    say("hangs")
    lock.acquire()
if rank == 3:
    take_the_lock()
dist.all_reduce(ones)
""",
        (
            r"rank 3 on algo-2 is in take_the_lock \(train\.py:\d+\),"
            r" which waits for a lock.*; 3 others wait"
        ),
    ),
    "is stopped": (
        """
dist.barrier()
if rank == 3:
    say("hangs")
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(ones)
""",
        (
            r"rank 3 on algo-2 is stopped \(state T, by a signal such as SIGSTOP\);"
            r" 3 others wait in all_reduce"
        ),
    ),
    "reads a FIFO": (
        """
path = os.environ["SM_CURRENT_HOST"] + ".fifo"
if rank == 3:
    os.mkfifo(path)
    say("hangs")
    open(path).read()
dist.all_reduce(ones)
""",
        (
            r"rank 3 on algo-2 waits in open of algo-2\.fifo \(train\.py:\d+\);"
            r" 3 others wait in all_reduce"
        ),
    ),
}


@pytest.mark.parametrize("hang", HANGS)
@pytest.mark.parametrize("spy", [True, False], ids=["py-spy", "faulthandler"])
def test_the_rank_that_hangs_is_named(
    network: Network, manifest: Path, tmp_path: Path, hang: str, spy: bool
) -> None:
    script, sentence = HANGS[hang]
    since = start_clock()
    with job_on(
        network, tmp_path, RANKS + script, MODE, manifest=manifest, variables=variables(spy)
    ) as hosts:
        statuses = [host.wait() for host in hosts]
        end_time = time.monotonic()
        assert statuses == [names.EXIT_HANG] * 2, text_of(hosts)
    assert_within(LIMIT + AFTER, begin_of_hang(hosts, since), end_time, text_of(hosts))
    for host in hosts:
        assert re.match(rf"no rank has made progress for 5 s: {sentence}", host.failure), (
            host.failure
        )
        stacks = (host.base / f"output/data/hang-{host.base.name}.txt").read_text(encoding="utf-8")
        assert stacks.count("=== rank ") == 2
        assert "all_reduce" in stacks
    assert hosts[0].failure == hosts[1].failure
    svg = ElementTree.parse(hosts[0].base / "output/data/hang.svg")
    assert hosts[0].failure.partition(":")[0] in "".join(svg.getroot().itertext())
    assert not (hosts[1].base / "output/data/hang.svg").exists()
    assert re.search(r"summary: .* on 2 hosts, .* without progress", hosts[0].text)


RECORDS = """
def record():  # torch does the same in a rank that uses NCCL
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
    os.mkfifo(pipe)
    opened = os.open(pipe, os.O_RDWR)
    while os.read(opened, 128):
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"], "wb") as file:
            file.write(torch._C._distributed_c10d._dump_fr_trace())
threading.Thread(target=record, daemon=True).start()
dist.all_reduce(ones)
"""


def test_the_call_that_a_rank_lacks_is_in_the_report(
    network: Network, manifest: Path, tmp_path: Path
) -> None:
    """The records are torch's own, of gloo; with NCCL torch has the thread itself."""
    script, sentence = HANGS["sleeps in a lock"]
    host_variables = variables(
        True, TORCH_FR_BUFFER_SIZE="2000", TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/record-"
    )
    with job_on(
        network,
        tmp_path,
        RANKS + RECORDS + script,
        MODE,
        manifest=manifest,
        variables=host_variables,
    ) as hosts:
        assert [host.wait() for host in hosts] == [names.EXIT_HANG] * 2, text_of(hosts)
    for host in hosts:
        assert re.match(rf"no rank has made progress for 5 s: {sentence}", host.failure), (
            host.failure
        )
        line = (
            r"torch's flight recorder: rank 3 has not called all_reduce .* \(call \d+\), in which"
            r" ranks 0-2 wait"
        )
        assert re.search(line, host.failure), host.failure


WAITS_FOR_EVER = {
    "a loop of one line": "    while True: pass\n",
    "a file that never comes": "    while not os.path.exists('never'):\n        time.sleep(0.1)\n",
    "a loop of three lines": (
        """
    flag, n = False, 0
    while True:
        if flag:
            break
        if n > 5:
            return
"""
    ),
    "a lock of another rank": "    filelock.FileLock('lock').acquire()\n",
    "a thread that samples": (
        """
    def sample():
        samples = []
        while True:
            samples.append(open("/proc/self/stat").read())
            time.sleep(2)
    threading.Thread(target=sample, daemon=True).start()
    threading.Event().wait()
"""
    ),
    "a thread that prints a bar": (
        """
    def bar():
        for percent in range(10**6):
            print(f"\\r{percent} of 1000000", end="", flush=True)
            time.sleep(0.3)
    threading.Thread(target=bar, daemon=True).start()
    threading.Event().wait()
"""
    ),
}
"""Code of the odd rank, which no process ends: the others wait for it in a collective."""

STARTS: dict[str, tuple[dict[str, Json], str]] = {
    "torchrun": (MODE, RANKS + "import filelock\ndef together():\n    dist.all_reduce(ones)\n"),
    "mpirun": (
        {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": 2},
        """
import os, threading, time
import filelock
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
def together():
    MPI.COMM_WORLD.allreduce(1)
""",
    ),
}


@pytest.mark.parametrize("wait", WAITS_FOR_EVER)
@pytest.mark.parametrize("start", STARTS)
def test_a_rank_that_waits_for_ever_is_named_whatever_moves_beside_it(
    network: Network, tmp_path: Path, start: str, wait: str
) -> None:
    need("mpirun", "torchrun")
    mode, script = STARTS[start]
    since = start_clock()
    script += f"""
def odd():
{WAITS_FOR_EVER[wait]}
if rank == 2:
    lock = filelock.FileLock("lock")
    lock.acquire()
together()
if rank == 3:
    print("hangs", time.monotonic(), flush=True)
    odd()
together()
"""
    image = engine_manifest(tmp_path)
    with job_on(
        network, tmp_path, script, mode, manifest=image, variables=variables(spy=True)
    ) as hosts:
        statuses = [host.wait() for host in hosts]
        end_time = time.monotonic()
        assert statuses == [names.EXIT_HANG] * 2, text_of(hosts)
    assert_within(LIMIT + AFTER, begin_of_hang(hosts, since), end_time, text_of(hosts))
    assert re.match(
        r"no rank has made progress for 5 s: rank 3 on algo-2 is in odd \(", hosts[0].failure
    )
    assert hosts[0].failure == hosts[1].failure


def test_a_rank_of_mpi_that_hangs_is_named(network: Network, tmp_path: Path) -> None:
    """The other ranks spin in MPI: their CPU time is no sign of life.

    Host algo-2 has ranks, and no command.
    """
    need("mpirun")
    script = """
import threading, time
from mpi4py import MPI
def take_the_lock():
    lock = threading.Lock()
    lock.acquire()
    print("hangs", time.monotonic(), flush=True)
    lock.acquire()
def train():
    MPI.COMM_WORLD.allreduce(1)
MPI.COMM_WORLD.barrier()
take_the_lock() if MPI.COMM_WORLD.rank == 3 else train()
"""
    mode: dict[str, Json] = {
        "sagemaker_mpi_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": 2,
    }
    image, since = engine_manifest(tmp_path), start_clock()
    with job_on(
        network, tmp_path, script, mode, manifest=image, variables=variables(spy=True)
    ) as hosts:
        statuses = [host.wait() for host in hosts]
        end_time = time.monotonic()
        assert statuses == [names.EXIT_HANG] * 2, text_of(hosts)
    assert_within(LIMIT + AFTER, begin_of_hang(hosts, since), end_time, text_of(hosts))
    sentence = (
        r"rank 3 on algo-2 is in take_the_lock \(train\.py:\d+\), which waits for a lock.*; 3"
        r" others wait in "
        r"MPI_[A-Z]\w+ \(train\.py:\d+\)"
    )
    assert re.search(sentence, hosts[0].failure), hosts[0].failure
    assert hosts[0].failure == hosts[1].failure


PHASES = """
def wait_for_the_others(what):
    dist.barrier()
    say("after", what)

def compile_something():
    compile = "cc -O2 -c big.c -o big.o || exit 1"
    again = f"end=$(($(date +%s) + 12)); while [ $(date +%s) -lt $end ]; do {compile}; done"
    subprocess.run(["sh", "-c", again], check=True)

def write_a_checkpoint():
    chunk, end = bytes(1 << 20), time.monotonic() + 12
    with open("checkpoint", "wb") as opened:
        while time.monotonic() < end:
            opened.seek(0)
            opened.write(chunk)
            time.sleep(0.1)

def evaluate():
    end = time.monotonic() + 12
    while time.monotonic() < end:
        sum(number * number for number in range(500000))
        time.sleep(0.1)

def download():
    buffer = bytearray(1 << 16)
    with socket.create_connection(("algo-1", 9099)) as connection:
        while connection.recv_into(buffer):
            pass

if rank == 3:
    with open("big.c", "w") as opened:
        for number in range(3000):
            opened.write(
                f"int f{number}(int *a, int n) {{ int s = 0;"
                f" for (int i = 0; i < n; i++) s += a[i] * {number}; return s; }}\\n"
            )
for work in (compile_something, write_a_checkpoint, evaluate, download):
    if rank == 3:
        work()
    wait_for_the_others(work.__name__)
"""
SERVER = """
import socket, time
with socket.create_server(("", 9099)) as server:
    print("listens", flush=True)
    connection, _ = server.accept()
    end = time.monotonic() + 12
    while time.monotonic() < end:
        connection.sendall(bytes(1 << 16))
        time.sleep(0.05)
"""


def test_a_job_that_only_looks_so_is_left_alone(
    network: Network, manifest: Path, tmp_path: Path
) -> None:
    """Let one rank work for more than twice the limit without output, while the others wait in a
    barrier.

    The test measures: a rank that hardly gets a processor within the limit does look as if it did
    nothing.
    """
    began = start_clock()
    need("cc")
    server = subprocess.Popen(
        network.inside("algo-1", sys.executable, "-c", SERVER), stdout=subprocess.PIPE
    )
    with (
        server,
        job_on(
            network,
            tmp_path,
            RANKS + PHASES,
            MODE,
            manifest=manifest,
            variables=variables(spy=True),
        ) as hosts,
    ):
        assert server.stdout is not None
        assert server.stdout.readline() == b"listens\n"
        statuses = [host.wait() for host in hosts]
        server.kill()
        if statuses != [0, 0] and (crowd := crowd_since(began)) > CROWD:
            pytest.skip(
                f"NOT TESTED: {crowd:.0f} threads want each processor here,"
                f" and the limit is {LIMIT} s"
            )
        assert statuses == [0, 0], text_of(hosts)
    assert "no rank has made progress" not in text_of(hosts)


PAUSES = {
    "tokenization in worker processes": (
        """
with multiprocessing.Pool(2) as pool:
    while time.monotonic() < end:
        pool.map(tokenize, range(64), chunksize=32)
"""
    ),
    "a data loader's first epoch": (
        """
def load(batches):
    while True:
        with open("data", "rb") as opened:
            batches.put(len(opened.read()))
        time.sleep(0.1)
with open("data", "wb") as opened:
    opened.write(os.urandom(4 << 20))
batches = multiprocessing.Queue(2)
workers = [multiprocessing.Process(target=load, args=(batches,), daemon=True) for _ in range(2)]
for worker in workers:
    worker.start()
while time.monotonic() < end:
    batches.get()
"""
    ),
    "pip install": (
        """
info = "wheel-1.dist-info/"
with zipfile.ZipFile("wheel-1-py3-none-any.whl", "w") as wheel:
    for number in range(500):
        wheel.writestr(f"wheel/module{number}.py", f"number = {number}\\n")
    wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: wheel\\nVersion: 1\\n")
    wheel.writestr(
        info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    )
    wheel.writestr(info + "RECORD", "")
while time.monotonic() < end:
    words = (
        "install",
        "--no-index",
        "--upgrade",
        "--quiet",
        "--target",
        "installed",
        wheel.filename,
    )
    subprocess.run((sys.executable, "-m", "pip", *words), check=True)
"""
    ),
    "a tarball that is unpacked": (
        """
with open("data", "wb") as opened:
    opened.write(os.urandom(16 << 20))
subprocess.run(("tar", "-czf", "data.tar.gz", "data"), check=True)
while time.monotonic() < end:
    subprocess.run(("tar", "-xzf", "data.tar.gz"), check=True)
"""
    ),
    "a loop of retries that says so": (
        """
attempt = 0
while time.monotonic() < end:
    attempt += 1
    print("attempt", attempt, flush=True)
    time.sleep(0.5)
"""
    ),
    "a listing of an object store": (
        """
def list_all():
    marker = "0"
    while time.monotonic() < end:
        with urllib.request.urlopen(os.environ["STORE"] + "?marker=" + marker) as answer:
            marker = answer.read().decode()
list_all()
"""
    ),
}
"""Code of a rank for longer than the limit while the other one waits for it.

More: the test of two hosts, above.
"""


class Store(http.server.BaseHTTPRequestHandler):
    """Answers the pages of a listing, each after a while."""

    def do_GET(self) -> None:
        threading.Event().wait(0.3)
        page = str(int(self.path.partition("marker=")[2]) + 1).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Drop the server's log lines."""


@pytest.mark.parametrize("pause", PAUSES)
def test_a_pause_is_no_hang(manifest: Path, tmp_path: Path, pause: str) -> None:
    """The test measures, too: see above."""
    began = start_clock()
    script = f"""
import multiprocessing, os, subprocess, sys, threading, time, urllib.request, zipfile
def tokenize(number):
    found = []
    for line in range(20000):
        found += ("words of line %d of text %d" % (line, number)).split()
    return len(found)
def wait_for_the_other():
    while not os.path.exists("done"):
        threading.Event().wait(0.05)
def main():
    end = time.monotonic() + {3 * PAUSE_LIMIT}
    {PAUSES[pause].strip().replace(chr(10), chr(10) + "    ")}
    open("done", "w").close()
if __name__ == "__main__":
    main() if os.environ["RANK"] == "1" else wait_for_the_other()
"""
    write_inputs(tmp_path, script, {**MODE}, {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host_variables = {
            **variables(spy=True),
            "TRAINWORKS_HANG_LIMIT_SECONDS": str(PAUSE_LIMIT),
            "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
            "STORE": f"http://127.0.0.1:{server.server_address[1]}/",
            "no_proxy": "127.0.0.1",
        }
        with Launcher(tmp_path, variables=host_variables) as launcher:
            status = launcher.wait()
        server.shutdown()
    if status == names.EXIT_HANG and (crowd := crowd_since(began)) > CROWD:
        pytest.skip(
            f"NOT TESTED: {crowd:.0f} threads want each processor here, and the limit is"
            f" {PAUSE_LIMIT} s"
        )
    assert status == 0, launcher.text
    assert "no rank has made progress" not in launcher.text
