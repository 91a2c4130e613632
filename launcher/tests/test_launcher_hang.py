"""Hangs, without torch: which look shows progress, which rank differs, and a
real program that waits for ever.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from launcher_support import (
    LAUNCHER,
    REPOSITORY,
    TIME_OUT,
    Launcher,
    environment,
    manifest_document,
    plan,
    write_inputs,
    write_manifest,
)

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.manifest import parse_manifest
from trainworks_launcher.supervise.event_loop import Loop
from trainworks_launcher.supervise.hang import detector, outlier_rank, stacks
from trainworks_launcher.supervise.hang.outlier_rank import RankSample, Row, name_outliers, row_of
from trainworks_launcher.supervise.hang.progress import (
    WORKING_SHARE,
    CpuTime,
    Process,
    Sample,
    StackHistory,
    find_progress,
)
from trainworks_launcher.supervise.hang.rank_grid import as_svg, as_text, grid
from trainworks_launcher.supervise.hang.sampling import Root, Sampler
from trainworks_launcher.supervise.hang.stacks import Frame, Thread

C10D = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
WRAPPER = "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py"
DATA = "/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
QUEUE = "/usr/lib/python3.11/multiprocessing/queues.py"
SCRIPT = "/opt/ml/code/train.py"


def stack(*frames: tuple[str, str, int], values: int = 0) -> tuple[Thread, ...]:
    """A process with its main thread, innermost frame first."""
    return (Thread(main=True, frames=tuple(Frame(*frame) for frame in frames), values=values),)


MAIN = ("<module>", SCRIPT, 60)
ALL_REDUCE = stack(
    ("all_reduce", C10D, 2819), ("wrapper", WRAPPER, 83), ("train", SCRIPT, 41), MAIN
)
BARRIER = stack(("barrier", C10D, 4815), ("wrapper", WRAPPER, 83), ("save", SCRIPT, 52), MAIN)
LOADER = stack(("get", QUEUE, 113), ("_next_data", DATA, 732), ("train", SCRIPT, 38), MAIN)
LOCK = stack(("take", SCRIPT, 12), MAIN)
BACKWARD = stack(
    ("_engine_run_backward", "/opt/venv/lib/python3.11/site-packages/torch/autograd/graph.py", 829),
    ("train", SCRIPT, 44),
    MAIN,
)

# --- the odd one ----------------------------------------------------------------------------------
WAITS = RankSample(ALL_REDUCE, "S", "which waits for a lock or another thread")
LOCKED = RankSample(LOCK, "S", "which waits for a lock")


def rows(*samples: RankSample) -> list[Row]:
    """Two ranks on each host."""
    return [row_of(rank, f"algo-{rank // 2 + 1}", sample) for rank, sample in enumerate(samples)]


OTHERS = "3 others wait in all_reduce (train.py:41)"
OTHER = "rank 0 on algo-1 waits in all_reduce (train.py:41)"
STOPPED = "is stopped (state T, by a signal such as SIGSTOP)"


@pytest.mark.parametrize(
    ("samples", "sentence", "odd"),
    [
        (
            [WAITS, WAITS, WAITS, RankSample(LOADER, "S", "which waits for data")],
            f"rank 3 on algo-2 is in DataLoader (train.py:38), which waits for data; {OTHERS}",
            [3],
        ),
        (
            [WAITS, LOCKED, WAITS, WAITS],
            f"rank 1 on algo-1 is in take (train.py:12), which waits for a lock; {OTHERS}",
            [1],
        ),
        (
            [RankSample(BARRIER, "S"), WAITS, WAITS, WAITS],
            f"rank 0 on algo-1 waits in barrier (train.py:52); {OTHERS}",
            [0],
        ),
        (
            [WAITS, RankSample(BARRIER, "S")],
            f"{OTHER}; rank 1 on algo-1 waits in barrier (train.py:52)",
            [],
        ),
        (
            [WAITS, WAITS, RankSample(ALL_REDUCE, "T"), WAITS],
            f"rank 2 on algo-2 {STOPPED}; {OTHERS}",
            [2],
        ),
        ([WAITS, RankSample((), "T")], f"rank 1 on algo-1 {STOPPED}; {OTHER}", [1]),
        (
            [WAITS, RankSample(stack(("read", SCRIPT, 7), MAIN), "S", "", "open of /data/fifo")],
            f"rank 1 on algo-1 waits in open of /data/fifo (train.py:7); {OTHER}",
            [1],
        ),
        ([WAITS] * 16, "all 16 ranks wait in all_reduce (train.py:41)", []),
        (
            [RankSample(BACKWARD, "R", "which spins")] * 3
            + [RankSample(LOCK, "S", "which sleeps")],
            (
                "rank 3 on algo-2 is in take (train.py:12), which sleeps; 3 others are in train"
                " (train.py:44), which spins"
            ),
            [3],
        ),
        (
            [WAITS, RankSample((), "D", "which waits in the kernel (nfs_wait)")],
            (
                "rank 1 on algo-1 is without a Python stack:"
                f" which waits in the kernel (nfs_wait); {OTHER}"
            ),
            [1],
        ),
    ],
)
def test_the_odd_rank_is_named(
    samples: Sequence[RankSample], sentence: str, odd: Sequence[int]
) -> None:
    verdict = name_outliers(rows(*samples), (), 600)
    assert verdict.cause == f"no rank has made progress for 600 s: {sentence}"
    assert [row.rank for row in verdict.outliers] == odd


def natively(*names_: str) -> tuple[Thread, ...]:
    """The stack of a call in compiled code, innermost first, below a line of the script."""
    frames = [Frame(name, "", 0, native=True) for name in names_]
    return (Thread(main=True, frames=(*frames, Frame("together", SCRIPT, 7), Frame(*MAIN))),)


@pytest.mark.parametrize(
    ("frames", "call_name"),
    [
        (
            ("opal_progress", "ompi_request_default_wait", "PMPI_Allreduce", "__pyx_pw_allreduce"),
            "MPI_Allreduce",
        ),
        (("MPI_Barrier",), "MPI_Barrier"),
        (("PMPI_Comm_dup", "MPI_PyMPI_Commctx_INTRA.constprop.0", "allreduce"), "MPI_Comm_dup"),
        (("pollAny", "ncclGroupEnd"), "ncclGroupEnd"),
        (("ioctl", "cudaStreamSynchronize", "item"), "StreamSynchronize"),
    ],
)
def test_who_waits_for_others_is_read_from_compiled_code_too(
    frames: Sequence[str], call_name: str
) -> None:
    """mpi4py's calls are no Python frames: the rank that waits in one is not to
    blame, though it is alone.
    """
    together = stack(("together", SCRIPT, 7), MAIN)
    waiting = row_of(
        0, "algo-1", RankSample(together, "R", "which computes or spins", "", natively(*frames))
    )
    assert (waiting.kind, waiting.detail, waiting.place) == ("collective", call_name, "train.py:7")
    others = [row_of(rank, "algo-1", LOCKED) for rank in (1, 2, 3)]
    assert [row.rank for row in name_outliers([waiting, *others], (), 60).outliers] == [1, 2, 3]


def test_without_such_evidence_a_rank_only_differs() -> None:
    together = stack(("together", SCRIPT, 7), MAIN)
    alone = row_of(0, "algo-1", RankSample(together, "R", "which computes or spins"))
    others = [row_of(rank, "algo-1", LOCKED) for rank in (1, 2, 3)]
    assert "nothing shows who waits for whom" in name_outliers([alone, *others], (), 60).text
    assert "nothing shows" not in name_outliers([*rows(WAITS, WAITS), others[1]], (), 60).text


def test_ranks_that_wait_for_one_rank_are_the_odd_ones_beside_a_collective() -> None:
    """mpi4py's lower-case recv waits in MPI_Mprobe, for one rank; the others wait for all."""
    probing = [row_of(1, "algo-1", RankSample((), "S", native_threads=natively("PMPI_Mprobe")))]
    barrier = [row_of(0, "algo-1", RankSample((), "S", native_threads=natively("MPI_Barrier")))]
    assert [row.rank for row in name_outliers([*probing, *barrier], (), 60).outliers] == [1]


def test_a_verdict_says_what_to_look_at_and_where_the_rank_is() -> None:
    assert "look at the network" in name_outliers(rows(WAITS, WAITS), (), 600).text
    assert "left out a call" in name_outliers(rows(WAITS, RankSample(BARRIER, "S")), (), 600).text
    text = name_outliers(rows(WAITS, WAITS, RankSample(LOADER, "S")), ("algo-9",), 600).text
    assert (
        "rank 2 on algo-2:\n"
        "  get (queues.py:113)\n"
        "  _next_data (dataloader.py:732)\n"
        "  train (train.py:38)" in text
    )
    assert "algo-9 did not answer" in text
    # The hosts may answer in any order.
    assert "rank 0 on algo-1:\n" in name_outliers(rows(WAITS, WAITS)[::-1], (), 600).text


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [(("recv", "recv"), "every rank waits in recv"), (("send", "recv"), "recv and send")],
)
def test_a_call_to_one_rank_is_no_collective(calls: Sequence[str], sentence: str) -> None:
    rank_stacks = [stack((call, C10D, 9), ("train", SCRIPT, 4), MAIN) for call in calls]
    text = name_outliers(
        rows(*(RankSample(rank_stack, "S") for rank_stack in rank_stacks)), (), 600
    ).text
    assert sentence in text
    assert "collective" not in text
    assert "network" not in text


IMPORT = stack(("create_module", "<frozen importlib._bootstrap_external>", 1233), MAIN)
INSIDE = stack(
    ("<module>", SCRIPT, 3), ("exec_module", "<frozen importlib._bootstrap_external>", 940), MAIN
)


@pytest.mark.parametrize(
    ("where", "then", "works"),
    [
        (IMPORT, {"faults": 8}, True),  # it waits for pages
        (IMPORT, {"threads": {1: (5, 9 * 10**8)}}, True),  # for a CPU
        (IMPORT, {"threads": {1: (9 * 10**8, 5)}}, True),
        (IMPORT, {"state": "D"}, True),
        (IMPORT, {}, False),  # for another thread's import
        # The module's own lines run.
        (
            INSIDE,
            {"faults": 8, "threads": {1: (9 * 10**8, 5)}},
            False,
        ),
        (ALL_REDUCE, {"faults": 8}, False),
    ],
)
def test_an_import_that_waits_for_pages_or_a_cpu_works(
    where: tuple[Thread, ...], then: dict[str, Any], works: bool
) -> None:
    old = Process("1", python=True, threads={1: CpuTime(5, 5)}, stack=where, state="S", faults=7)
    sign = find_progress(Sample(0.0, (1,), {1: old}), Sample(1.0, (1,), {1: old._replace(**then)}))
    assert bool(sign) == works


def test_a_hang_is_a_grid_of_ranks_and_places() -> None:
    grid_rows = rows(WAITS, WAITS, RankSample(LOADER, "S"), WAITS, RankSample(BARRIER, "S"), WAITS)
    assert (
        as_text(grid(grid_rows, grid_rows[2:3], ("algo-9",)))
        == """\
ranks, a letter for the place of each:
  algo-1  0-1        aa
  algo-2  2-3        Ba
  algo-3  4-5        ca
  algo-9: no answer
  B = 1 is in DataLoader (train.py:38) (differs)
  a = 4 wait in all_reduce (train.py:41)
  c = 1 waits in barrier (train.py:52)"""
    )


def test_a_grid_of_many_hosts_shows_those_that_differ_and_is_bounded() -> None:
    grid_rows = rows(*[WAITS] * 400, RankSample(LOADER, "S"))
    lines = as_text(grid(grid_rows, grid_rows[400:])).splitlines()
    assert lines[1] == "  algo-201  400        B"
    assert lines[21:] == [
        "  and 181 more hosts",
        "  B = 1 is in DataLoader (train.py:38) (differs)",
        "  a = 400 wait in all_reduce (train.py:41)",
    ]
    assert grid(grid_rows[:1], ()) == []
    alone = [Row(-1, f"algo-{number}", "code", "main", "train.py:1") for number in (1, 2)]
    assert as_text(grid(alone, ())).splitlines()[1] == "  algo-1  -          a"
    wide = [Row(number, "h" * 160, "code", f"f{number}", "x" * 160) for number in range(999)]
    assert len(as_text(grid(wide, wide))) < 4096


def svg_texts(svg: str) -> list[str]:
    """The texts of an SVG that a person reads, in their order. The SVG must be well-formed."""
    return [
        "".join(element.itertext())
        for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_golden_chart_of_the_documentation() -> None:
    """The same hosts, letters and legend as the text, of the example in docs/hangs.md."""
    samples = [WAITS] * 16
    samples[13] = RankSample(LOADER, "S", "which waits for data of other processes")
    grid_rows = [
        row_of(rank, f"algo-{rank // 8 + 1}", sample) for rank, sample in enumerate(samples)
    ]
    path = REPOSITORY / "docs" / "hangs.svg"
    lines = grid(grid_rows, grid_rows[13:14])
    svg = as_svg(lines, "no rank has made progress for 600 s", str)
    if os.environ.get("TRAINWORKS_UPDATE_GOLDEN"):
        path.write_text(svg, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == svg, (
        "run this test with TRAINWORKS_UPDATE_GOLDEN=1, or: make golden"
    )
    assert as_text(lines) in (REPOSITORY / "docs" / "hangs.md").read_text(encoding="utf-8")
    assert "".join(svg_texts(svg)[1:]) == as_text(lines).replace("\n", "")


HOSTILE = "</text><script>alert('&')</script>\x00\x1b[31m\ud800\uffff\u202e]]>\"\n"


def test_a_chart_is_well_formed_and_keeps_secrets_whatever_names_the_script_has() -> None:
    grid_rows = [
        Row(number, HOSTILE, "code", f"{HOSTILE}{number} s<cret", HOSTILE, HOSTILE)
        for number in range(4)
    ]
    grid_rows.append(Row(4, "algo-2", "code", "log_in s<cret", "train.py:1"))
    svg = as_svg(
        grid(grid_rows, grid_rows[:1], (HOSTILE,)),
        HOSTILE,
        lambda text: text.replace("s<cret", "***"),
    )
    svg_bytes = svg.encode("utf-8")
    assert b"<script" not in svg_bytes
    assert " = 1 is in log_in *** (train.py:1)" in svg_texts(svg_bytes.decode())
    assert "s<cret" not in "".join(ElementTree.fromstring(svg).itertext())


def test_a_chart_of_any_job_has_one_width_and_a_bounded_height() -> None:
    wide = [
        Row(number, "h" * 99 + str(number // 99), "code", f"f{number}" * 99, "x" * 160)
        for number in range(9999)
    ]
    for grid_rows, odd in ((wide, wide[9990:]), (wide[:2], ())):
        root = ElementTree.fromstring(as_svg(grid(grid_rows, odd), "h" * 999, str))
        ends = [
            float(element.get("x", 0)) + float(element.get("textLength", 0))
            for element in root.iter()
        ]
        assert max(ends) <= float(root.get("width", 0)) < 1000
        assert (
            max(float(element.get("y", 0)) for element in root.iter())
            < float(root.get("height", 0))
            < 1000
        )


def test_rows_survive_the_way_to_the_leader() -> None:
    """Ranks of one place go together, and a message has room for a host of any size."""
    sample_rows = rows(*[WAITS] * 190, RankSample(LOCK, "S", "which sleeps"))
    sent = json.dumps(outlier_rank.documents([row._replace(host="algo-2") for row in sample_rows]))
    assert len(sent) < 2000
    back = outlier_rank.read_documents("algo-2", json.loads(sent))
    assert (
        name_outliers(back, (), 60).cause
        == name_outliers([row._replace(host="algo-2") for row in sample_rows], (), 60).cause
    )
    many = [
        Row(number, "algo-2", "code", f"f{number}" * 99, "x" * 999, "", ("y" * 999,) * 8)
        for number in range(500)
    ]
    assert len(json.dumps(outlier_rank.documents(many))) < 60_000
    assert outlier_rank.read_documents("algo-2", "nonsense") == []


# --- signs of progress ----------------------------------------------------------------------------
BEFORE = Sample(100.0, (10,), {10: Process("1", python=True, cpu=50.0, stack=ALL_REDUCE)})


def after(seconds: float = 30.0, **changes: object) -> Sample:
    return BEFORE._replace(at=BEFORE.at + seconds, **changes)  # type: ignore[arg-type]


def with_rank(**changes: object) -> Sample:
    return after(processes={10: BEFORE.processes[10]._replace(**changes)})  # type: ignore[arg-type]


def with_child(cpu: float, **more: object) -> tuple[Sample, Sample]:
    """Two looks at a rank with a child, whose CPU time grows so much in 30 s."""
    child = Process("2", cpu=5.0)
    grown = child._replace(cpu=5.0 + cpu, **more)  # type: ignore[arg-type]
    return BEFORE._replace(processes={**BEFORE.processes, 11: child}), after(
        processes={**BEFORE.processes, 11: grown}
    )


POLLS = stack(("take", SCRIPT, 12), MAIN, values=1)


def polling(
    *,
    ran: float,
    cpu: float = 1.0,
    waited: float = 0,
    wrote: int = 0,
    sleeps: bool = True,
    now: tuple[Thread, ...] = (),
) -> tuple[Sample, Sample]:
    """Two looks at a rank that waits for a file: its loop has another counter,
    and stops at another line.

    waited: seconds of 30 in which its main thread had no CPU, though it was ready to run.
    """
    begin = CpuTime(10**9, 10**9)
    old = Process(
        "1", python=True, cpu=50.0, threads={10: begin}, stack=POLLS, writes=0, sleeps=sleeps
    )
    later = now or stack(("take", SCRIPT, 13), MAIN, values=2)
    now_ = CpuTime(begin.ran + int(ran * 1e9), begin.waited + int(waited * 1e9))
    new = old._replace(cpu=50.0 + cpu, threads={10: now_}, stack=later, writes=wrote)
    return BEFORE._replace(processes={10: old}), after(processes={10: new})


@pytest.mark.parametrize(
    ("before", "now", "sign"),
    [
        (BEFORE, after(), ""),
        (BEFORE, with_rank(cpu=80.0), ""),  # it spins, as NCCL and MPI do
        (BEFORE, with_rank(stack=BARRIER), "stack changed"),
        (BEFORE, with_rank(stack=stack(("train", SCRIPT, 41), values=2)), "stack changed"),
        (BEFORE, with_rank(moved=30 * 300_000), "bytes were read"),
        (BEFORE, with_rank(moved=30 * 20_000), ""),  # keep-alives
        (BEFORE, with_rank(children=20.0), "other programs"),
        (
            BEFORE._replace(connections={7: 900}),
            after(connections={7: 900 + 30 * 300_000}),
            "network",
        ),
        (BEFORE, after(connections={8: 20 * 300_000, 9: 10 * 300_000}), "network"),
        (
            BEFORE._replace(connections={7: 9_000_000}),
            after(connections={7: 9_000_000 + 30 * 50_000}),
            "",
        ),
        (BEFORE, after(heartbeat=7), "heartbeat"),
        (BEFORE, after(roots=(20,), processes={}), "other processes"),
        (*with_child(25.0), "other programs"),  # a compiler
        (*with_child(1.0), ""),  # a monitor
        # A compiler on a crowded host.
        (
            *with_child(1.0, threads={11: CpuTime(10**9, 29 * 10**9)}),
            "other programs",
        ),
        (*with_child(1.0, threads={11: CpuTime(10**9, 20 * 10**9)}), ""),  # a monitor there
        (BEFORE, with_rank(stack=(), cpu=80.0), "other programs"),  # cannot be read: it may work
        (BEFORE, with_rank(stack=()), ""),
        (*polling(ran=0.4), ""),  # it sleeps, looks and counts
        (*polling(ran=0.4, sleeps=False), "stack changed"),
        (*polling(ran=9.0), "stack changed"),
        (*polling(ran=0.4, waited=28), "stack changed"),  # it was ready to run nearly all the time
        (*polling(ran=0.4, waited=20), ""),
        (*polling(ran=0.4, wrote=9), ""),  # it writes a log, or to another process
        (*polling(ran=29, now=POLLS), ""),  # it spins
        (*polling(ran=29, wrote=1, now=POLLS), "works and writes"),  # a worker of a pool
        (*polling(ran=2, waited=27, wrote=1, now=POLLS), "works and writes"),
        (*polling(ran=0.4, cpu=20.0), "stack changed"),  # another thread of it works
        (*polling(ran=0.4, now=stack(("other", SCRIPT, 70), MAIN)), "stack changed"),
        (
            *polling(
                ran=0.4,
                now=stack(
                    ("exists", "/usr/lib/python3.11/genericpath.py", 19), ("take", SCRIPT, 13), MAIN
                ),
            ),
            "",
        ),
    ],
)
def test_what_counts_as_progress(before: Sample, now: Sample, sign: str) -> None:
    progress = find_progress(before, now)
    assert sign in progress
    assert bool(progress) == bool(sign)


@pytest.mark.parametrize("python", [False, True])
def test_a_program_counts_as_if_it_were_alone_on_its_host(python: bool) -> None:
    """The program takes a CPU for some time, again and again, and sleeps in between.

    On a crowded host each time takes longer.

    The verdict on the program stays the same, as it is measured over some of its rounds.
    """
    for seed in range(500):
        draw = random.Random(seed)
        runs, sleeps, crowd = draw.uniform(0.001, 0.1), draw.uniform(0, 0.3), draw.uniform(1, 100)
        share = runs / (runs + sleeps)
        if 0.2 < share < 0.3:
            continue  # near the limit
        rounds = 20
        seconds = rounds * (runs * crowd + sleeps)
        cpu_seconds = rounds * runs
        ran, waited = int(cpu_seconds * 1e9), int(cpu_seconds * (crowd - 1) * 1e9)
        # Of a Python whose stack cannot be read, and of any other program.
        before = Process("2", python=python, cpu=5.0, threads={11: CpuTime(7, 7)})
        now = before._replace(cpu=5.0 + cpu_seconds, threads={11: CpuTime(7 + ran, 7 + waited)})
        sign = find_progress(
            Sample(0.0, processes={11: before}), Sample(seconds, processes={11: now})
        )
        assert bool(sign) == (share > 0.25), (seed, share, crowd)
        started = Sample(
            seconds,
            processes={11: before._replace(cpu=cpu_seconds, threads={11: CpuTime(ran, waited)})},
        )
        assert bool(find_progress(Sample(0.0), started)) == (share > 0.25), (seed, share, crowd)


def test_a_program_that_gets_no_cpu_works(tmp_path: Path) -> None:
    """The program shares one CPU with others that the kernel prefers, and gets a twentieth of it or
    less.
    """
    cpu = min(os.sched_getaffinity(0))
    endless = tmp_path / "endless.sh"
    endless.write_text("while :; do :; done", encoding="ascii")

    def on_one_cpu(nicer: int) -> subprocess.Popen[bytes]:
        endless_process = subprocess.Popen(("sh", endless))
        os.sched_setaffinity(endless_process.pid, {cpu})
        os.setpriority(
            os.PRIO_PROCESS, endless_process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nicer
        )
        return endless_process

    others = [on_one_cpu(0) for _ in range(2)]
    starved = on_one_cpu(10)
    try:
        sampler, roots = Sampler("", ""), (Root(0, starved.pid),)
        begin = sampler.sample(roots)
        if not begin.processes[starved.pid].threads:
            pytest.skip("NOT TESTED: this kernel does not say how long a program waits for a CPU")
        deadline, sign, share = time.monotonic() + TIME_OUT, "", 1.0
        while (not sign or share > WORKING_SHARE) and time.monotonic() < deadline:
            time.sleep(0.2)
            now = sampler.sample(roots)
            share = (now.processes[starved.pid].cpu - begin.processes[starved.pid].cpu) / (
                now.at - begin.at
            )
            sign = find_progress(begin, now)
        assert sign == "other programs that the ranks started take CPU time"
        assert share < WORKING_SHARE
    finally:
        for process in (*others, starved):
            process.kill()
            process.wait()


def test_a_loop_that_only_repeats_its_lines_makes_no_progress() -> None:
    """Each line counts once in a stall; a loop with a counter has another stack each time."""
    seen = StackHistory()

    def signs(*values: int) -> list[str]:
        signs_seen, before = [], BEFORE
        for step, value in enumerate(values):
            look = after(seconds=float(step), processes={10: at(value)})
            signs_seen.append(find_progress(before, look, seen))
            seen.add(look)
            before = look
        return signs_seen

    def at(value: int) -> Process:
        line, counter = value % 3, value // 3 + 1
        return BEFORE.processes[10]._replace(
            cpu=80.0, stack=stack(("loop", SCRIPT, 20 + line), MAIN, values=counter)
        )

    assert all(signs(0, 1, 2))
    assert not any(signs(1, 0, 2, 1, 2, 0)[1:])
    assert all(signs(3, 4, 6, 9, 11, 13))
    assert all(signs(*range(30, 300))), "more than is remembered"
    assert all(signs(-1, -2, -1, -2)), "the variables are not known: it may count"


# --- stacks ---------------------------------------------------------------------------------------
def test_stacks_of_py_spy() -> None:
    """A local variable of a loop counts.

    Those of the standard library do not, for a wait counts its seconds.
    """

    def dump(step: str, left: str) -> str:
        def frame(name: str, file: str, variable: str, value: str) -> dict[str, object]:
            shown = [{"name": variable, "addr": 1, "arg": False, "repr": value}]
            return {"name": name, "filename": file, "module": None, "line": 7, "locals": shown}

        frames = [frame("get", QUEUE, "left", left), frame("train", SCRIPT, "step", step)]
        main = {"pid": 5, "os_thread_id": 5, "thread_name": "MainThread", "frames": frames}
        other = {"pid": 5, "os_thread_id": 6, "thread_name": "reader", "frames": frames[:1]}
        return json.dumps([other, main])

    threads = stacks.from_py_spy(dump("3", "0.5"))
    assert [thread.main for thread in threads] == [False, True]
    assert threads == stacks.from_py_spy(dump("3", "0.2"))
    assert threads != stacks.from_py_spy(dump("4", "0.5"))
    assert stacks.from_py_spy("Error: Permission denied") == ()
    shown = "\n".join(stacks.lines(threads))
    assert shown.index("thread MainThread") < shown.index("thread reader")
    assert f"train ({SCRIPT}:7)" in shown
    assert "step" not in shown


def test_a_function_that_a_package_calls_again_does_not_poll() -> None:
    """A worker of a data loader, whose data set sleeps for each sample, and one
    that waits for a file for ever.
    """
    loader = DATA.replace("dataloader", "_utils/worker")

    def look(at: float, batch: str, attempt: str) -> Sample:
        def frame(name: str, file: str, variable: str, value: str) -> dict[str, object]:
            shown = [{"name": variable, "addr": 1, "arg": False, "repr": value}]
            return {"name": name, "filename": file, "module": None, "line": 7, "locals": shown}

        frames = [
            frame("__iter__", SCRIPT, "attempt", attempt),
            frame("_worker_loop", loader, "idx", batch),
            frame("run", "/usr/lib/python3.11/multiprocessing/process.py", "count", attempt),
            frame("<module>", SCRIPT, "step", "1"),
        ]
        main = {"pid": 10, "os_thread_id": 10, "thread_name": "MainThread", "frames": frames}
        cpu_times = {10: CpuTime(int(at * 1e7), 0)}
        threads = stacks.from_py_spy(json.dumps([main]))
        return Sample(
            at,
            (10,),
            {10: Process("1", python=True, sleeps=True, threads=cpu_times, stack=threads)},
        )

    assert find_progress(look(1, "3", "1"), look(2, "3", "2")) == ""
    assert find_progress(look(1, "3", "1"), look(2, "4", "1")) == "a stack changed"


def test_stacks_of_faulthandler() -> None:
    words = (
        'Thread 0x00007f01 (most recent call first):\n  File "/a/pool.py", line 3 in work\n\n'
        'Current thread 0x00007f02 (most recent call first):\n  File "/a/b.py", line 9 in wait\n'
        '  File "/a/train.py", line 2 in <module>\n'
    )
    threads = stacks.from_faulthandler(words)
    assert [thread.main for thread in threads] == [False, True]
    assert threads[1].frames == (Frame("wait", "/a/b.py", 9), Frame("<module>", "/a/train.py", 2))
    assert stacks.from_faulthandler("") == ()


# --- settings -------------------------------------------------------------------------------------
def test_settings() -> None:
    def limit(**variables: str) -> float:
        return plan(environment(variables={"PATH": "/bin", **variables})).limits.hang

    assert limit() == 600
    assert limit(TRAINWORKS_HANG_LIMIT_SECONDS="90", TRAINWORKS_HANG="fail") == 90
    assert limit(TRAINWORKS_HANG="off") == 0
    with pytest.raises(RefusalError) as refused:
        limit(TRAINWORKS_HANG="kill", TRAINWORKS_HANG_LIMIT_SECONDS="soon")
    assert "'kill' is not understood" in str(refused.value)
    assert "'soon' is not a number of seconds" in str(refused.value)


@pytest.mark.parametrize(
    ("torch", "inherited", "expected_variables"),
    [
        (
            "2.4.1",
            {},
            {
                "TORCH_NCCL_TRACE_BUFFER_SIZE",
                "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
                "TORCH_NCCL_DUMP_ON_TIMEOUT",
            },
        ),
        (
            "2.15.0",
            {},
            {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"},
        ),
        (
            "2.15.0",
            {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
            {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"},
        ),
        ("", {}, set()),
    ],
)
def test_torchs_flight_recorder_is_on_unless_the_user_says_something(
    torch: str, inherited: dict[str, str], expected_variables: set[str]
) -> None:
    components: dict[str, Json] = {
        "nccl": {"version": "2.30.7"},
        **({"torch": {"version": torch}} if torch else {}),
    }
    image = parse_manifest(json.dumps(manifest_document(components=components)), "made-up")
    env = plan(environment(manifest=image, variables={"PATH": "/bin", **inherited})).env
    assert {
        name for name in env if name.startswith(("TORCH_FR", "TORCH_NCCL"))
    } == expected_variables
    files = [env[name] for name in names.RECORDER_FILES if name in env]
    assert files == (["/opt/ml/output/data/flight-recorder-rank-"] if expected_variables else [])


# --- a real program -------------------------------------------------------------------------------
WAITING = """
import os, sys
for name in sys.argv[2].split(","):
    if not os.path.exists(name):
        os.mkfifo(name)
    print("reads", name, flush=True)
    open(name).read()
"""


LOOP = """
def work(flag, n):
    while True:
        if flag:
            break
        if n > 5:
            return
work(False, 0)
"""


POLLING = """
import os, threading, time
def take(path):
    attempt = 0
    while not os.path.exists(path):
        attempt += 1
        time.sleep(0.02)
        if attempt > 10**9:
            return
def monitor(seen):
    while True:
        seen.append(len(seen))
        time.sleep(0.3)
threading.Thread(target=monitor, args=([],), daemon=True).start()
take("/no/such/lock")
"""


@pytest.mark.parametrize(("script", "place"), [(POLLING, "take"), (LOOP, "work")])
def test_a_rank_that_polls_or_loops_makes_no_progress(
    tmp_path: Path, script: str, place: str
) -> None:
    """A lock that another rank holds: the counter of the attempts moves, and a thread beside it
    samples something. And an endless loop, which stops at another line at each look.
    """
    write_inputs(tmp_path, script, {}, {})
    # py-spy is beside the program.
    manifest = write_manifest(tmp_path / "image.json", {"python": sys.executable})
    variables = {
        "TRAINWORKS_HANG": "fail",
        "TRAINWORKS_HANG_LIMIT_SECONDS": "4",
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
    }
    with Launcher(tmp_path, variables=variables) as launcher:
        assert launcher.wait() == 68, launcher.text
    assert re.match(
        rf"no rank has made progress for 4 s: the program on \S+ is in {place} \(train",
        launcher.failure,
    )


BAR = """
import threading, time
def bar():
    while True:
        print("\\r 42 %", end="", flush=True)
        time.sleep(0.3)
def work():
    threading.Event().wait()
threading.Thread(target=bar, daemon=True).start()
work()
"""


def test_a_bar_that_a_thread_prints_is_no_progress_of_the_main_thread(tmp_path: Path) -> None:
    write_inputs(tmp_path, BAR, {}, {})
    manifest = write_manifest(tmp_path / "image.json", {"python": sys.executable})
    variables = {
        "TRAINWORKS_HANG": "fail",
        "TRAINWORKS_HANG_LIMIT_SECONDS": "4",
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
    }
    with Launcher(tmp_path, variables=variables) as launcher:
        assert launcher.wait() == 68, launcher.text
    assert re.match(
        r"no rank has made progress for 4 s: the program on \S+ is in work \(train",
        launcher.failure,
    )


DRIVER = """
import threading, time
def get(seconds):
    def show():
        while True:
            print("a worker says something", flush=True)
            time.sleep(0.3)
    threading.Thread(target=show, daemon=True).start()
    threading.Event().wait(seconds)
"""


def test_a_main_thread_that_waits_in_a_package_is_a_driver(tmp_path: Path) -> None:
    """Count the output about workers on other hosts as a sign, from any thread."""
    package = tmp_path / "lib/python3/site-packages/cluster.py"
    package.parent.mkdir(parents=True)
    package.write_text(DRIVER, encoding="ascii")
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(package.parent)!r})\n"
        "import cluster\n"
        "cluster.get(12)\n"
    )
    write_inputs(tmp_path, script, {}, {})
    manifest = write_manifest(tmp_path / "image.json", {"python": sys.executable})
    variables = {
        "TRAINWORKS_HANG": "fail",
        "TRAINWORKS_HANG_LIMIT_SECONDS": "5",
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
    }
    with Launcher(tmp_path, variables=variables) as launcher:
        assert launcher.wait() == 0, launcher.text


@pytest.mark.parametrize(
    ("threads", "waits"),
    [
        (
            stack(("wait", "/usr/lib/python3.11/threading.py", 331), ("take", SCRIPT, 12), MAIN),
            False,
        ),
        (ALL_REDUCE, False),
        (BACKWARD, False),
        (
            stack(("get_objects", "/opt/venv/lib/python3.11/site-packages/ray/worker.py", 9), MAIN),
            True,
        ),
        (
            stack(
                ("wait", "/usr/lib/python3.11/threading.py", 1),
                ("g", "/a/site-packages/b.py", 9),
                MAIN,
            ),
            True,
        ),
        ((), False),
    ],
)
def test_who_waits_in_a_package(threads: tuple[Thread, ...], waits: bool) -> None:
    assert outlier_rank.waits_in_a_package(threads) == waits


def test_a_warning_comes_once_for_a_stall_and_the_job_goes_on(tmp_path: Path) -> None:
    """Use faulthandler, as where there is no py-spy.

    With a sitecustomize of the user's, which is still imported.
    """
    write_inputs(tmp_path, WAITING, {"fifos": "first,second"}, {})
    (tmp_path / "code/sitecustomize.py").write_text(
        "print('the users own sitecustomize', flush=True)\n"
    )
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
    manifest = write_manifest(tmp_path / "image.json", {"python": str(python)})
    variables = {
        "TRAINWORKS_HANG_LIMIT_SECONDS": "3",
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
        "PATH": "/bin",
    }
    with Launcher(tmp_path, variables=variables) as launcher:
        for number, name in enumerate(("first", "second"), 1):
            launcher.read_until(f"stacks of this host's ranks: {tmp_path}/output/data/hang", number)
            with (tmp_path / "code" / name).open("w"):
                pass  # the reader sees its end
        assert launcher.wait() == 0, launcher.text
    assert "the users own sitecustomize" in launcher.text
    assert re.findall(
        r"for 3 s: the program on \S+ waits in open of (\w+) \(train.py:7\)\n", launcher.text
    ) == [
        "first",
        "second",
    ]
    stacks_ = sorted(path.name for path in (tmp_path / "output/data").glob("hang*"))
    assert len(stacks_) == 2, stacks_
    assert "<module> (" in (tmp_path / "output/data" / stacks_[0]).read_text(encoding="utf-8")


def test_a_job_that_hangs_fails_with_a_status_of_its_own(tmp_path: Path) -> None:
    """Use py-spy, which the environment of the checkout has.

    The heartbeat file keeps the job alive until it stops.
    """
    script = """
import os, threading, time
def work():
    for beat in range(12):
        with open("beat", "w") as opened: opened.write(str(beat))
        threading.Event().wait(0.2)
    threading.Event().wait()
work()
"""
    write_inputs(tmp_path, script, {}, {})
    manifest = write_manifest(tmp_path / "image.json", {"python": sys.executable})
    variables = {
        "TRAINWORKS_HANG": "fail",
        "TRAINWORKS_HANG_LIMIT_SECONDS": "5",
        names.HEARTBEAT_FILE_VARIABLE: "beat",
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
        "TOKEN": "a-secret-of-the-job",
    }
    with Launcher(tmp_path, variables=variables) as launcher:
        assert launcher.wait() == names.EXIT_HANG, launcher.text
    assert (tmp_path / "code/beat").read_text(encoding="ascii") == "11", (
        "it was stopped while its heart beat"
    )
    first = launcher.failure.splitlines()[0]
    assert first.startswith("no rank has made progress for 5 s: the program on ")
    assert "is in work (train.py:7), which waits for a lock" in first
    document = json.loads((tmp_path / "output" / names.FAILURE_JSON).read_text(encoding="utf-8"))
    assert (document["kind"], document["status"], document["cause"]) == (
        "failed",
        names.EXIT_HANG,
        first,
    )


def test_a_look_and_process_1_may_wait_for_the_same_process() -> None:
    """Start py-spy in a thread: the first of the two waiters takes its status."""
    script = """
import subprocess, threading
from trainworks_launcher.supervise.processes.processes import Orphans
orphans = Orphans()
def look():
    for _ in range(100):
        subprocess.run(["true"], check=True)
thread = threading.Thread(target=look)
thread.start()
while thread.is_alive():
    orphans.reap(())
"""
    words = (sys.executable, "-c", script)
    result = subprocess.run(
        words, env={"PYTHONPATH": str(LAUNCHER)}, capture_output=True, timeout=TIME_OUT, check=False
    )
    assert (result.returncode, result.stderr) == (0, b"")


def test_the_program_that_listens_for_the_signal_knows_the_names() -> None:
    """The program imports nothing of ours, so it has two of our constants as text."""
    from trainworks_launcher.supervise.hang import signals

    text = (LAUNCHER / "trainworks_launcher/programs/python/sitecustomize.py").read_text(
        encoding="utf-8"
    )
    assert f"\n_SIGNAL = {signals.SIGNAL}\n" in text
    assert "faulthandler.register(_SIGNAL," in text
    assert f'os.memfd_create("{signals.MEMORY}")' in text


# --- a look that does not end as planned ----------------------------------------------------------
class _Blind:
    """Sampler that see nothing twice: the first look raises, the second one never returns.

    Then they see a program.
    """

    def __init__(self, never: Path) -> None:
        self.looks = 0
        self.never = never

    def writes(self, roots: Sequence[Root]) -> None:
        del roots
        self.looks += 1
        if self.looks == 1:
            raise OSError("no such process")
        if self.looks == 2:
            self.never.read_bytes()  # a FIFO without a writer, as a dead file system


def test_the_watch_goes_on_after_a_look_that_fails_and_one_that_never_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = tmp_path / "never"
    os.mkfifo(never)
    monkeypatch.setattr(detector, "_NEVER_SECONDS", 0.3)
    monkeypatch.setattr(detector, "_LONGEST_PAUSE_AFTER_FAILURES", 0.01)
    loop, sampler, lines = Loop(), _Blind(never), list[str]()
    spoken = iter(range(1, 1000))

    def tell(line: str) -> None:
        lines.append(line)

    around = detector.DetectorContext(
        host="a",
        member="a",
        leader=True,
        limit=20.0,
        fails=False,
        output=tmp_path,
        roots=lambda: (),
        printed=lambda: time.monotonic() + next(spoken),
        others=lambda: (),
        tell=lambda _: None,
        end=lambda _: None,
        log=tell,
        redact=str,
    )
    hang_detector = detector.HangDetector(loop, sampler, around)  # type: ignore[arg-type]

    def until_the_third() -> None:
        if sampler.looks >= 3:
            hang_detector.end()
            loop.stop()
        else:
            loop.after(0.05, until_the_third)

    hang_detector.begin(time.monotonic())
    until_the_third()
    loop.run()
    loop.close()
    os.close(os.open(never, os.O_WRONLY))  # the reader ends
    assert sampler.looks == 3
    assert lines == [
        "a look for a hang shows nothing: it failed, or has not returned; looking again"
    ]


def test_a_look_for_which_no_thread_can_be_started_is_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel refuses a thread once; the callback comes all the same, with nothing."""
    loop, samples_seen = Loop(), list[object]()
    start = threading.Thread.start
    refusals = iter([True])

    def refused(thread: threading.Thread) -> None:
        if next(refusals, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)

    def then(seen: object) -> None:
        samples_seen.append(seen)
        if len(samples_seen) == 1:
            loop.look(lambda: "seen", 30.0, then)
        else:
            loop.stop()

    loop.look(lambda: "seen", 30.0, then)
    loop.run()
    loop.close()
    assert samples_seen == [None, "seen"]
