"""Test which rank failed first: real ranks that miss each other, and take their time to end.

A stand-in for torchrun starts them, and ends them as torchrun does: it acts on the end of a
process, sends SIGTERM to the other ranks of its host, and names the process whose end it has seen
first.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from launcher_support import Launcher, write_inputs, write_manifest

from trainworks_launcher.contract.json_values import Json
from trainworks_testing.ports import free_port

TORCHRUN = """#!{python}
import os, subprocess, sys, time

words = sys.argv[1:]

def given(name, otherwise):
    for word in words:
        if word.startswith(name + "="):
            return int(word.partition("=")[2])
    return otherwise

count, node, nodes = given("--nproc-per-node", 1), given("--node-rank", 0), given("--nnodes", 1)
command = words[words.index("--no-python") + 1 :]
ranks = {{}}
for local in range(count):
    rank = node * count + local
    names = dict(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(nodes * count))
    ranks[rank] = subprocess.Popen(command, env=dict(os.environ, **names))
while not any(rank.poll() for rank in ranks.values()):
    if all(rank.poll() == 0 for rank in ranks.values()):
        sys.exit(0)
    time.sleep(0.05)
first = next(number for number, rank in ranks.items() if rank.poll())
for rank in ranks.values():
    rank.terminate()
codes = [rank.wait() for rank in ranks.values()]
print("Root Cause (first observed failure):", file=sys.stderr)
print("  rank      :", first, "(local_rank: 0)", file=sys.stderr)
print("  exitcode  :", ranks[first].returncode, file=sys.stderr)
sys.exit(1)
"""

RANKS = """
import atexit, os, socket, sys, threading, time
rank = int(os.environ.get("RANK") or os.environ["SM_CURRENT_HOST"] != "127.0.0.1")
other = PORT
if rank == 0:
    with socket.create_server(("127.0.0.1", other)) as server:
        peer, _ = server.accept()
    peer.recv(1)
    if not peer.recv(1):
        MISS
else:
    while True:
        try:
            peer = socket.create_connection(("127.0.0.1", other))
            break
        except OSError:
            time.sleep(0.02)
    peer.send(b"x")
    SLOW
    try:
        END
    finally:
        peer.close()
        LEAVE
"""
"""Two ranks with one connection. Rank 1 fails and leaves; rank 0 misses it."""

SLOW_HANDLER = "atexit.register(time.sleep, 4)"
SLOW_THREAD = "threading.Thread(target=time.sleep, args=(4,)).start()"
LICENCE = "no licence for data set X"
MISSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:29871"
LABEL = "ValueError: label 17 is out of range"
RAISES = "raise ValueError('label 17 is out of range')"
MISSES = f"raise RuntimeError({MISSED!r})"
ABORTS = f"os.write(2, b'terminate called\\n  what():  {MISSED}\\n'); os.abort()"


def script_of(end: str, slow: str = "", leave: str = "", miss: str = MISSES) -> str:
    words = {"PORT": str(free_port()), "SLOW": slow, "END": end, "LEAVE": leave, "MISS": miss}
    script = RANKS
    for word, text in words.items():
        script = script.replace(word, text)
    return script


@contextlib.contextmanager
def job_of(
    base: Path, script: str, hosts: int, mode: str = "torch_distributed"
) -> Iterator[list[Launcher]]:
    """Two ranks, on one host or on two."""
    starter = base / "torchrun"
    starter.write_text(TORCHRUN.format(python=sys.executable), encoding="utf-8")
    starter.chmod(0o755)
    manifest = write_manifest(
        base / "image.json", {"python": sys.executable, "torchrun": str(starter)}, components={}
    )
    hyperparameters: dict[str, Json] = {}
    if mode != "none":
        hyperparameters = {
            f"sagemaker_{mode}_enabled": "true",
            "sagemaker_mpi_num_of_processes_per_host": 2 // hosts,
        }
    names = [f"127.0.0.{number}" for number in range(1, hosts + 1)]
    variables = {
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
        "TRAINWORKS_CONTROL_PORT": str(free_port()),
        "MASTER_PORT": str(free_port()),
    }
    with contextlib.ExitStack() as stack:
        launchers = []
        for name in names:
            write_inputs(
                base / name, script, hyperparameters, {"hosts": list(names), "current_host": name}
            )
            launchers.append(stack.enter_context(Launcher(base / name, variables=variables)))
        yield launchers


def failure_report(launcher: Launcher) -> Mapping[str, Json]:
    document: Mapping[str, Json] = json.loads(
        (launcher.base / "output/failure.json").read_text(encoding="utf-8")
    )
    return document


def assert_first_failure(
    hosts: list[Launcher], status: int, words: str, rank: int | None = 1
) -> None:
    """Every host ends with one status and one text, about a rank of the last host."""
    statuses = [host.wait() for host in hosts]
    output = "\n".join(host.text for host in hosts)
    assert statuses == [status] * len(hosts), output
    assert len({host.failure for host in hosts}) == 1, output
    report = failure_report(hosts[0])
    assert (report["rank"], report["host"]) == (rank, f"127.0.0.{len(hosts)}"), output
    assert words in hosts[0].failure.splitlines()[0], hosts[0].failure
    assert report["retry"] is False


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (RAISES, 1, LABEL),
        (f"sys.exit({LICENCE!r})", 1, LICENCE),
        ("sys.exit(3)", 3, "exit status 3"),
    ],
)
@pytest.mark.parametrize(
    "slow", [SLOW_HANDLER, SLOW_THREAD, ""], ids=["handler", "thread", "at-once"]
)
def test_a_rank_that_takes_its_time_to_end_is_the_first_to_fail(
    tmp_path: Path, hosts: int, end: str, status: int, words: str, slow: str
) -> None:
    """The peer misses the rank at once and fails; the starter ends the rank then, in its exit
    handlers.
    """
    with job_of(tmp_path, script_of(end, slow), hosts) as launchers:
        assert_first_failure(launchers, status, words)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_program_that_aborts_for_a_lost_peer_is_not_the_first_to_fail(
    tmp_path: Path, hosts: int
) -> None:
    """Abort as NCCL and gloo do: only the text that the runtime of C++ prints of an exception tells
    about the end.
    """
    with job_of(tmp_path, script_of(RAISES, SLOW_HANDLER, miss=ABORTS), hosts) as launchers:
        assert_first_failure(launchers, 1, LABEL)


PEER_ERROR = """
import atexit, os
rank = int(os.environ["RANK"])
error = type(
    "PeerError", (RuntimeError,), {"__module__": "smdistributed.modelparallel.torch.exceptions"}
)
if rank == 0:
    # After the record: lets rank 1 go on, and reads until it has ended.
    atexit.register(lambda: (open("GO", "wb"), open("ENDED", "rb").read()))
    raise error("rank 1 (pp_rank 1) failed: label 17 is out of range")
# A pipe is open when both ranks have opened it.
open("GO", "rb")
end = open("ENDED", "wb")
RAISES
"""
"""Two ranks of smp: rank 1 fails, and the record of rank 0, which tells so, is the first."""


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_that_is_told_of_the_failure_of_another_is_not_the_first_to_fail(
    tmp_path: Path, hosts: int
) -> None:
    script = PEER_ERROR.replace("RAISES", RAISES)
    for name in ("GO", "ENDED"):
        os.mkfifo(tmp_path / name)
        script = script.replace(f'"{name}"', repr(str(tmp_path / name)))
    with job_of(tmp_path, script, hosts) as launchers:
        assert_first_failure(launchers, 1, LABEL)


@pytest.mark.parametrize("hosts", [1, 2])
def test_an_own_exception_counts_where_the_clean_up_misses_a_peer(
    tmp_path: Path, hosts: int
) -> None:
    """``finally: dist.barrier()`` fails too, and hides the exception that was on its way."""
    with job_of(tmp_path, script_of(RAISES, SLOW_HANDLER, leave=MISSES), hosts) as launchers:
        assert_first_failure(launchers, 1, f"{LABEL} (and then RuntimeError: {MISSED})")


@pytest.mark.parametrize(
    ("end", "leave", "status", "words"),
    [
        (RAISES, "time.sleep(2)", 1, LABEL),  # it is noted when it has left the program
        ("raise SystemExit('no licence for data set X')", "", 1, LICENCE),
        ("pass", "time.sleep(2); os._exit(17)", 17, "exit status 17"),  # it never is
    ],
)
def test_a_rank_of_another_host_that_has_noted_nothing_yet_is_awaited(
    tmp_path: Path, end: str, leave: str, status: int, words: str
) -> None:
    slow = "" if leave else "atexit.register(time.sleep, 2)"
    with job_of(tmp_path, script_of(end, slow, leave), 2) as launchers:
        assert_first_failure(launchers, status, words)


def test_a_rank_that_is_ended_after_it_has_left_is_named_with_what_it_printed(
    tmp_path: Path,
) -> None:
    """Python has no hook for ``raise SystemExit``: that the rank had left first
    is known, and its status is not.
    """
    with job_of(
        tmp_path, script_of(f"raise SystemExit({LICENCE!r})", SLOW_HANDLER), 1
    ) as launchers:
        assert_first_failure(launchers, 1, "had left its program, and other ranks went on")
    assert (
        f"rank 0 on host 127.0.0.1 failed after that: RuntimeError: {MISSED}"
        in launchers[0].failure
    )
    assert LICENCE in launchers[0].failure


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (RAISES, 1, LABEL),
        (f"sys.exit({LICENCE!r})", 1, LICENCE),
        ("sys.exit(3)", 3, "exit status 3"),
    ],
)
def test_programs_that_find_each_other_themselves_are_asked_too(
    tmp_path: Path, end: str, status: int, words: str
) -> None:
    """Run in mode none: the program of each host is the one rank of it that the launcher knows."""
    with job_of(tmp_path, script_of(end, SLOW_HANDLER), 2, mode="none") as launchers:
        assert_first_failure(launchers, status, words, rank=None)


@pytest.mark.parametrize("handler", ["sys.exit(7)", "raise RuntimeError('told to end')"])
def test_a_rank_whose_handler_of_sigterm_ends_it_was_told_to_end(
    tmp_path: Path, handler: str
) -> None:
    """The rank has a record of its own, and that is an effect: its starter had told this rank to
    end for its peer.
    """
    slow = f"import signal\n    def stop(*_): {handler}\n    signal.signal(signal.SIGTERM, stop)"
    with job_of(tmp_path, script_of("peer.close(); signal.pause()", slow), 1) as launchers:
        assert_first_failure(launchers, 1, MISSED, rank=0)
