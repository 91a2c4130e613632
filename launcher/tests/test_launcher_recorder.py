"""The records of torch's flight recorder: which rank lacks which call, and how
ranks are asked for them.

The four recorded faults of 16 GPUs are those of NVIDIA's nvidia-resiliency-ext:
TRAINWORKS_TEST_NVRX names a checkout.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from launcher_support import TIME_OUT, environment, manifest_document, plan

from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.manifest import parse_manifest
from trainworks_launcher.supervise.hang.flight_recorder import Recorder, record_of
from trainworks_launcher.supervise.hang.missing_collectives import find_missing_calls, format_ranks
from trainworks_launcher.supervise.hang.nccl import nccl_report, remarks
from trainworks_launcher.supervise.hang.outlier_rank import RankSample, name_outliers, row_of
from trainworks_launcher.supervise.hang.stacks import Frame, Thread
from trainworks_launcher.supervise.processes.job_directory import JobDirectory
from trainworks_testing.ports import free_port

NVRX = os.environ.get("TRAINWORKS_TEST_NVRX", "")
FAULTS = {
    "gpu_error_1st": (12,),
    "gpu_error_2nd": (9, 14),
    "lock_gil_1st": (9, 14),
    "lock_gil_2nd": (10, 15),
}


@pytest.mark.skipif(
    not NVRX, reason="NOT TESTED: TRAINWORKS_TEST_NVRX names no checkout of nvidia-resiliency-ext"
)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_ranks_of_nvidias_recorded_faults_are_named(fault: str) -> None:
    folder = Path(NVRX, "tests/attribution/unit/fr_traces", fault)
    missing_calls = find_missing_calls(
        [record_of(rank, (folder / f"_dump_{rank}").read_bytes()) for rank in range(16)]
    )
    assert missing_calls.ranks == FAULTS[fault], missing_calls.lines
    assert all("EXPERT_MODEL_PARALLEL_GROUP" in line for line in missing_calls.lines)


# --- records of our own ---------------------------------------------------------------------------
Made = tuple[str, int, str, str]  # group, number, call, state
WORLD, PAIR = "0", "7"


def dump(*calls: Made, ranks: int = 4) -> bytes:
    """A record as torch writes it; a number of -1 is a call to one rank."""
    entries = [
        {
            "process_group": (group, {WORLD: "default_pg", PAIR: "PIPE"}[group]),
            "collective_seq_id": max(seq, 0),
            "profiling_name": f"nccl:{call}",
            "input_sizes": [[8]],
            "state": state,
            "retired": state == "completed",
            "is_p2p": seq < 0,
        }
        for group, seq, call, state in calls
    ]
    config = {WORLD: {"ranks": str([*range(ranks)])}, PAIR: {"ranks": "[2, 3]"}}
    return pickle.dumps(
        {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
    )


def missing_calls_in(*dumps: bytes) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The words and the ranks, after the way to the leader."""
    documents = json.loads(
        json.dumps(
            [document for rank, data in enumerate(dumps) if (document := record_of(rank, data))]
        )
    )
    missing_calls = find_missing_calls(documents)
    return missing_calls.lines, missing_calls.ranks


DONE: Made = (WORLD, 4, "all_reduce", "completed")
WAITS: Made = (WORLD, 5, "all_reduce", "scheduled")
SIZES = "all_reduce of sizes [[8]] of default_pg (call 5)"
LAST = f"rank 3 has not called {SIZES}, in which ranks 0-2 wait"


@pytest.mark.parametrize(
    ("dumps", "lines", "ranks"),
    [
        pytest.param([(DONE, WAITS)] * 3 + [(DONE,)], [LAST], (3,), id="one"),
        pytest.param([(DONE, WAITS)] * 3 + [()], [LAST], (3,), id="none"),
        pytest.param(
            # Rank 2 lacks the call of all, but only because it waits for rank
            # 3, which has left out another one.
            [(DONE, WAITS)] * 2 + [(DONE, (PAIR, 1, "all_gather", "started")), (DONE,)],
            [f"rank 3 has not called {SIZES}, in which ranks 0,1 wait"],
            (3,),
            id="a rank that waits is not at fault",
        ),
        pytest.param(
            [(DONE, WAITS)] * 3 + [(DONE, (PAIR, 1, "all_gather", "scheduled"))],
            [LAST],
            (3,),
            id="each waits for another",
        ),
        pytest.param(
            [(DONE, WAITS)] * 3 + [(DONE, (WORLD, 5, "broadcast", "scheduled"))],
            [f"rank 3 called broadcast of sizes [[8]], and ranks 0-2 {SIZES}"],
            (3,),
            id="another call",
        ),
        pytest.param(
            [(DONE, WAITS)] * 4,
            [
                (
                    f"every rank has called {SIZES}, which does not end:"
                    " look at the network and the GPUs"
                )
            ],
            (),
            id="all",
        ),
        pytest.param(
            [(DONE,), (DONE,), (DONE, (PAIR, -1, "send 0->1", "scheduled")), (DONE,)],
            ["rank 3 has not called send 0->1 of PIPE, in which rank 2 waits"],
            (3,),
            id="nobody receives",
        ),
        pytest.param(
            [
                (DONE,),
                (DONE,),
                (DONE, (PAIR, -1, "send 0->1", "scheduled")),
                (DONE, (PAIR, -1, "recv 1<-0", "scheduled")),
            ],
            [],
            (),
            id="sent and received",
        ),
        pytest.param([(DONE,)] * 4, [], (), id="nothing is open"),
    ],
)
def test_who_lacks_a_call(
    dumps: Sequence[Sequence[Made]], lines: list[str], ranks: tuple[int, ...]
) -> None:
    assert missing_calls_in(*(dump(*calls) for calls in dumps)) == (tuple(lines), ranks)


def test_a_rank_without_a_record_is_told_of_and_not_named() -> None:
    lines, ranks = missing_calls_in(dump(DONE, WAITS), dump(DONE, WAITS), dump(DONE, WAITS))
    assert lines == (f"rank 3 left no record of {SIZES}, in which ranks 0-2 wait",)
    assert ranks == ()


def test_a_rank_that_waits_for_one_without_a_record_is_not_named() -> None:
    """Rank 2 has most waiters, but rank 3, which left no record, keeps rank 2 waiting."""
    lines, ranks = missing_calls_in(
        dump(DONE, WAITS), dump(DONE, WAITS), dump(DONE, (PAIR, 1, "all_gather", "started"))
    )
    assert lines == (
        f"rank 2 has not called {SIZES}, in which ranks 0,1 wait",
        f"rank 3 left no record of {SIZES}, in which ranks 0,1 wait",
    )
    assert ranks == ()


class Runs:
    """A command that runs where an unpickler reads it and trusts it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no pickle",
        dump(DONE)[:-9],
        pickle.dumps([1]),
        pickle.dumps({"entries": [Runs()]}),
        pickle.dumps(Runs()),
    ],
)
def test_what_is_no_record_is_none_and_never_run(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert record_of(0, data) == {}
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "documents",
    [
        [None, 7, "x", [], {}, {"rank": 0}, {"rank": "a", "groups": {}, "open": []}],
        [
            {
                "rank": 0,
                "groups": {"0": ["a", "0-99999", 1]},
                "open": [["0", 5, "x\x1b[2J", -1], ["9", -1, "send", 10**9]],
            }
        ],
    ],
)
def test_what_another_host_says_can_be_anything(documents: list[Json]) -> None:
    assert all(
        "\x1b" not in line and len(line) < 2000 for line in find_missing_calls(documents).lines
    )


def test_ranks_in_short() -> None:
    assert format_ranks([]) == ""
    assert format_ranks([3]) == "3"
    assert format_ranks([0, 1]) == "0,1"
    assert format_ranks([*range(8), 9, *range(16, 64, 8)]) == "0-7,9,16-56:8"


def test_where_the_stacks_show_all_ranks_in_collectives_the_records_name_the_one() -> None:
    frame = Frame("all_reduce", "/venv/site-packages/torch/distributed/distributed_c10d.py", 2)
    stack = (Thread(True, (frame, Frame("train", "/code/train.py", 7))),)
    rows = [row_of(rank, "a", RankSample(stack, "S")) for rank in range(4)]
    records = find_missing_calls(
        [record_of(rank, dump(DONE, *((WAITS,) if rank != 2 else ()))) for rank in range(4)]
    )
    assert [row.rank for row in name_outliers(rows, (), 9.0).outliers] == []
    verdict = name_outliers(rows, (), 9.0, records)
    assert [row.rank for row in verdict.outliers] == [2]
    assert (
        f"torch's flight recorder: rank 2 has not called {SIZES}, in which ranks 0,1,3 wait"
        in verdict.text
    )


# --- ranks are asked ------------------------------------------------------------------------------
RANK = """
import os, select, sys
pipe, file, record = sys.argv[1:4]
os.mkfifo(pipe)
fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
print("listens", flush=True)
select.select([fd], [], [])
half = len(bytes.fromhex(record)) // 2
with open(file, "wb", buffering=0) as opened:  # in two parts: it is read in between
    opened.write(bytes.fromhex(record)[:half])
    os.stat(file)
    opened.write(bytes.fromhex(record)[half:])
"""


def test_a_rank_is_asked_by_its_pipe_and_its_new_record_is_read(tmp_path: Path) -> None:
    """Make pipe and record as torch does.

    Rank 0 answers, rank 1 has no pipe, no process reads that of rank 2, and rank 3 is silent.
    """
    recorder = Recorder(f"{tmp_path}/pipe-", f"{tmp_path}/record-")
    (tmp_path / "record-0").write_bytes(dump(WAITS))  # of an earlier stall
    os.utime(tmp_path / "record-0", (1, 1))
    os.mkfifo(tmp_path / "pipe-2.pipe")
    os.mkfifo(tmp_path / "pipe-3.pipe")
    silent = os.open(tmp_path / "pipe-3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    words = (
        sys.executable,
        "-c",
        RANK,
        f"{tmp_path}/pipe-0.pipe",
        f"{tmp_path}/record-0",
        dump(DONE).hex(),
    )
    with subprocess.Popen(words, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"listens\n"
        assert recorder.request_records([0, 1, 2], TIME_OUT) == [record_of(0, dump(DONE))]
        assert rank.wait(TIME_OUT) == 0
    assert recorder.request_records([1, 2, 3], 0.0) == []
    assert os.read(silent, 9) == b"1\n"
    os.close(silent)
    assert Recorder("", "").request_records([0], TIME_OUT) == []


@pytest.mark.parametrize(
    ("host_variables", "pipe"),
    [
        ({}, "{}/recorder-rank-"),
        ({names.RECORDER_PIPE: "/mine/p"}, "/mine/p"),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/mine/f"}, "{}/recorder-rank-"),
    ],
)
def test_the_pipe_is_in_the_jobs_own_directory_unless_the_user_says_where(
    tmp_path: Path, host_variables: dict[str, str], pipe: str
) -> None:
    components: dict[str, Json] = {"nccl": {"version": "2.30.7"}, "torch": {"version": "2.15.0"}}
    image = parse_manifest(json.dumps(manifest_document(components=components)), "made-up")
    inherited = {"TMPDIR": str(tmp_path), **host_variables}
    planned = plan(environment(manifest=image, variables={"PATH": "/bin", **host_variables})).env
    runtime = JobDirectory(inherited, planned, own_ranks=True)
    assert runtime.env[names.RECORDER_PIPE] == pipe.format(runtime.path)
    runtime.remove()
    for variables, own in (({}, True), (planned, False)):
        without = JobDirectory({"TMPDIR": str(tmp_path)}, variables, own_ranks=own)
        assert names.RECORDER_PIPE not in without.env
        without.remove()


# --- RAS ------------------------------------------------------------------------------------------
TABLE = """
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  {}
"""
BEHIND = """
Errors
======


Warnings
========

#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 165 on node node1
"""
DEAD = """
Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5
"""


@pytest.mark.parametrize(
    ("report", "first", "last"),
    [
        ("", "", ""),
        (TABLE.format("OK"), "", ""),
        (
            TABLE.format("MISMATCH") + BEHIND,
            "#0-0 (78db921d1c117b4a) MISMATCH",
            "Rank 7 has launched up to operation 60",
        ),
        (
            TABLE.format("INCOMPLETE") + DEAD + BEHIND,
            "DEAD",
            "7 ranks have launched up to operation 64",
        ),
        (TABLE.format("x") + "\nWarnings\n========\n" + "word\n" * 999, "word", "word"),
    ],
)
def test_what_ras_lists_as_wrong_is_quoted(report: str, first: str, last: str) -> None:
    """Answers in the form of NCCL's user guide."""
    lines = remarks(report)
    assert (lines[:1] or [""])[0] == first
    assert (lines[-1:] or [""])[0].startswith(last)
    assert len(lines) <= 6


def test_ras_is_asked_at_the_jobs_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        requests: list[bytes] = []

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                requests.append(connection.recv(99))
                connection.sendall(BEHIND.encode())

        thread = threading.Thread(target=answer)
        thread.start()
        assert nccl_report(TIME_OUT, f"127.0.0.1:{server.getsockname()[1]}") == BEHIND
        thread.join(TIME_OUT)
    assert requests == [b"verbose status\n"]
    assert (
        nccl_report(TIME_OUT, f"127.0.0.1:{free_port()}")
        == nccl_report(TIME_OUT, "no address")
        == ""
    )
