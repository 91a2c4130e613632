"""The failure text: the cause first, the right rank's traceback, inside the limit."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import pytest
from launcher_support import environment, plan

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.supervise.attribution.failure import Verdict
from trainworks_launcher.supervise.attribution.memory import highest_bytes, oom_kills
from trainworks_launcher.supervise.control.messages import (
    MESSAGE_LIMIT,
    Decoder,
    outcome_fields,
    read_outcome,
)
from trainworks_launcher.supervise.outcome.cause import OutsideEvidence, ProcessEnd, failure_of
from trainworks_launcher.supervise.outcome.evidence import Kind, Suspect
from trainworks_launcher.supervise.outcome.outcome import (
    FAILED,
    STOPPED,
    SUCCEEDED,
    Outcome,
    ProgramPlace,
    describe_status,
    exit_status,
    shorten,
    with_status,
)
from trainworks_launcher.supervise.outcome.records import Record, read
from trainworks_launcher.supervise.outcome.starter_reports import (
    Report,
    find_lost_daemon,
    find_torchrun_status,
    report_of,
)
from trainworks_launcher.supervise.processes.ranks import Rank

FRAMES = '  File "a.py", line 1, in <module>\n    boom()\n'


def died(
    message: str = "ValueError: first\n", frames: str = FRAMES, output: bytes = b"step 1\n"
) -> ProcessEnd:
    """A process that died of an exception, by its own record."""
    return ProcessEnd(output, output, [Record(7, 1.0, 2.0, message, frames)], 7)


TORCHRUN = (
    'Traceback (most recent call last):\n  File "torchrun", line 8, in'
    " <module>\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    " \nFailures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 2) "
    " (SIGTERM)\nRoot Cause (first observed failure):\n[0]:\n  rank      : 3 (local_rank: 1)\n "
    " exitcode  : 42 (pid: 3) \n"
)


def test_the_cause_stands_first() -> None:
    text = failure_of(ProgramPlace("train.py", "algo-2", "mpi"), 3, died()).text
    assert text.splitlines()[:2] == [
        "ValueError: first",
        "train.py on host algo-2 (mode mpi): exit status 3",
    ]


@pytest.mark.parametrize(
    "message",
    [
        "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
        "AssertionError: Torch not compiled with CUDA enabled",
        "RuntimeError: No CUDA GPUs are available",
        (
            "RuntimeError: Attempting to deserialize object on a CUDA device but"
            " torch.cuda.is_available() is False."
        ),
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "RuntimeError: Distributed package doesn't have NCCL built in",
        (
            "RuntimeError: Found no NVIDIA driver on your system."
            " Please check that you have an NVIDIA GPU"
        ),
    ],
)
def test_a_script_of_smp_that_asks_for_cuda_is_told_how_to_do_without(message: str) -> None:
    process_end = died(f"{message}\n")
    for mode, is_advised in (
        ("smdistributed.modelparallel", True),
        ("smdistributed.dataparallel", True),
        ("mpi", False),
    ):
        lines = failure_of(ProgramPlace("train.py", "a", mode), 1, process_end).text.splitlines()
        assert lines[0] == message
        assert ("SMP_CPU_EMULATION=1" in lines[2]) is is_advised
    below = died(
        f"{message}\n",
        FRAMES.replace("a.py", "/v/site-packages/smdistributed/modelparallel/torch/step.py"),
    )
    text = failure_of(ProgramPlace("train.py", "a", "mpi"), 1, below).text
    assert "SMP_CPU_EMULATION=1" in text


def test_the_whole_message_is_kept_and_nothing_after_it() -> None:
    message = (
        "RuntimeError: Error(s) in loading state_dict for Net:\n"
        "\tMissing key(s): bias.\n"
        "\tsize mismatch: weight.\n"
    )
    text = failure_of(
        ProgramPlace("x.py", "a", "none"), 1, died(message, output=b"loss 0.5\n")
    ).text
    assert (
        text.splitlines()[0]
        == "RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): bias."
    )
    assert "size mismatch: weight" in text
    assert "loss 0.5" not in text


@pytest.mark.parametrize(("frames", "message"), [(100, 500), (3, 5000), (200, 100), (1, 900)])
def test_of_a_long_text_the_frames_are_cut_before_the_message(frames: int, message: int) -> None:
    lines = "".join(f'  File "a.py", line {number}, in f\n    f()\n' for number in range(frames))
    words = " ".join(f"word{number}" for number in range(message // 7))
    process_end = died(f"ValueError: the cause\n{words}\n", lines)
    text = failure_of(ProgramPlace("x.py", "a", "none"), 1, process_end).text
    assert len(text) <= 1024
    assert text.startswith("ValueError: the cause\nx.py on host a")
    assert f"line {frames - 1}, in f" in text  # the innermost frame
    assert (words in text) is (message <= 500)
    assert words[-100:] in text


def test_what_a_terminal_obeys_is_not_in_the_text() -> None:
    process_end = ProcessEnd(
        b"\x1b[1mstep 1\n",
        records=read(b'{"pid": 7, "message": "ValueError: \\u001b[1mfirst"}\n'),
        pid=7,
    )
    text = failure_of(ProgramPlace("x.py", "a", "none"), 1, process_end).text
    assert "\x1b" not in text
    assert text.startswith("ValueError: ")


def test_without_a_traceback_the_last_lines_are_shown() -> None:
    text = failure_of(
        ProgramPlace("run.sh", "a", "none"), 2, ProcessEnd(b"one\n\xff\n\ntwo\n")
    ).text
    assert text == "run.sh on host a (mode none): exit status 2\none\n\ufffd\ntwo"


def test_torchruns_report_gives_the_first_failing_rank_and_its_own_status() -> None:
    for ranks_by in ("torchrun", ""):
        assert report_of(TORCHRUN.encode(), ranks_by) == Report(3, 42, starter="torchrun")
        assert report_of(b"nothing", ranks_by) == Report()


def test_torchruns_log_gives_the_status_of_a_process() -> None:
    message = (
        b"E1124 10:04:12 5 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 17) of binary:"
        b" /usr/bin/python3\n"
    )
    assert find_torchrun_status(message, 17) == -9
    assert find_torchrun_status(message, 1) is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nothing", (-1, 0)),
        # Open MPI 4.1
        (
            (
                "thus causing\nthe job to be terminated. The first process to do so was:\n\n"
                "  Process name: [[39593,1],2]\n  Exit code:    42\n"
            ),
            (2, 42),
        ),
        (
            (
                "mpirun noticed that process rank 3 with PID 0"
                " on node algo-2 exited on signal 9 (Killed)."
            ),
            (3, -9),
        ),
        (
            "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\nwith errorcode 5.\n",
            (3, 5),
        ),
        # Open MPI 5.0
        (
            (
                "thus causing the job to be terminated. The first process to do so was:\n\n"
                "   Process name: [prterun-algo-1-77@1,1]\n   Exit code:    1\n"
            ),
            (1, 1),
        ),
        (
            (
                "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\n"
                "  Proc: [[1,1],3]\n"
                "  Errorcode: 7\n"
            ),
            (3, 7),
        ),
        # An abort is told when it happens; the summary at the end may name
        # another rank, which died of it.
        (
            (
                "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\n  Errorcode: 7\n"
                "The first process to do so was:\n  Process name: [[1,1],0]\n  Exit code:    1\n"
            ),
            (3, 7),
        ),
    ],
)
def test_mpiruns_words_name_the_first_failing_rank_and_its_status(
    words: str, expected: tuple[int, int]
) -> None:
    for ranks_by in ("mpirun", ""):
        assert report_of(words.encode(), ranks_by)[:2] == expected


@pytest.mark.parametrize(
    ("words", "host"),
    [
        ("nothing", ""),
        (
            (
                "inability to find the\n"
                "daemon executable, or\n"
                "  Local host:    algo-1\n"
                "  Remote host:   algo-2\n"
            ),
            "algo-2",
        ),
        (
            (
                "ORTE has lost communication with a remote daemon.\n"
                "\n"
                "  HNP daemon   : [[1,0],0] on node algo-1\n"
                "  Remote daemon: [[1,0],1] on node algo-3\n"
            ),
            "algo-3",
        ),
    ],
)
def test_mpiruns_words_name_the_host_of_a_daemon_that_is_gone(words: str, host: str) -> None:
    assert find_lost_daemon(words.encode()) == host


@pytest.mark.parametrize(
    ("printed", "code"), [(-9, -9), (17, 17), (-256, 1), (256, 1), (-64, -64), (-139, -11)]
)
def test_a_number_out_of_range_is_a_wait_status(printed: int, code: int) -> None:
    """hyperpodrun prints -256 for a rank that ended with 1."""
    words = (
        "Root Cause (first observed failure):\n"
        "  rank : 0 (local_rank: 0)\n"
        f"  exitcode : {printed} (pid: 5)\n"
    )
    assert report_of(words.encode()) == Report(0, code, starter="torchrun")


def test_a_help_of_mpirun_and_a_line_of_dashes_are_no_cause() -> None:
    """The help comes through the rank's own standard error, where an exit takes its time."""
    dashes = "-" * 74 + "\n"
    abort = (
        "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n"
        "  Errorcode: 1\n"
        "\n"
        "NOTE: it failed\n"
    )
    log = (
        "[algo-1:00000] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,\n"
    )
    delay = "[algo-1:00012] Delaying for 1 seconds before aborting\n"
    for printed in (dashes + abort + dashes, dashes + abort, dashes, "=====\n", log, delay):
        errors = f"the set is empty\n{printed}".encode()
        failure = failure_of(
            ProgramPlace("x.py", "a", "mpi"), 1, ProcessEnd(errors, errors, [Record(7)], 7)
        )
        assert failure.text.startswith("the set is empty\n"), printed
        errors = printed.encode()
        failure = failure_of(
            ProgramPlace("x.py", "a", "mpi"), 1, ProcessEnd(errors, errors, [Record(7)], 7)
        )
        assert failure.text.startswith("x.py on host a (mode mpi): exit status 1"), printed


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no record\n",
        b'{"pid": 7',
        b"[]\n",
        b"\xff\n",
        b'{"pid": "x", "at": [], "rank": {}}\n',
        b"{" * 9999,
    ],
)
def test_what_is_no_record_of_an_end_is_passed_over(data: bytes) -> None:
    """A program of the user's may write there, and a full disk cuts a line in two."""
    records = read(data + b'\n{"pid": 7, "at": 2.5, "message": "ValueError: first", "rank": 1}\n')
    assert records[-1] == Record(7, 0.0, 2.5, "ValueError: first", rank=1)
    assert not any(row.message for row in records[:-1])


def test_of_a_brief_record_and_the_whole_one_the_whole_one_counts_with_the_time_of_the_first() -> (
    None
):
    """A rank may be ended between the two."""
    brief = b'{"pid": 7, "began": 1, "at": 2, "message": "ValueError: first", "brief": true}\n'
    message = b'{"pid": 7, "began": 1, "at": 3, "message": "ValueError: first\\n", "frames": "f"}\n'
    assert read(brief) == [Record(7, 1.0, 2.0, "ValueError: first", brief=True)]
    assert read(brief + message) == [Record(7, 1.0, 2.0, "ValueError: first\n", "f")]


def test_a_status_that_only_another_host_knows_is_put_into_the_text() -> None:
    failure = failure_of(
        ProgramPlace("x.py", "b", "mpi", 3), None, ProcessEnd(b""), OutsideEvidence(oom_kills=1)
    )
    changed = with_status(failure, -9)
    assert changed.status == 137
    assert (
        changed.text == "out of memory: the kernel killed 1 process(es) of host b\n"
        "x.py on host b, rank 3 (mode mpi): killed by SIGKILL (exit status 137)"
    )


@pytest.mark.parametrize(
    ("membership", "files", "count"),
    [
        ("0::/\n", {"memory.events": "low 0\noom 1\noom_kill 2\n"}, 2),
        ("0::/a/b\n", {"a/b/memory.events": "oom_kill 3\n", "memory.events": "oom_kill 9\n"}, 3),
        ("0::/not/seen/here\n", {"memory.events": "oom_kill 4\n"}, 4),
        (
            "4:cpu,memory:/a\n0::/\n",
            {"memory/a/memory.oom_control": "under_oom 0\noom_kill 5\n"},
            5,
        ),
        ("4:memory:/docker/x\n", {"memory/memory.oom_control": "oom_kill 6\n"}, 6),
        ("0::/\n", {}, None),
        ("0::/\n", {"memory.events": "oom_kill many\n"}, None),
        ("nonsense", {}, None),
    ],
)
def test_the_kernels_count_of_kills_for_lack_of_memory(
    tmp_path: Path, membership: str, files: dict[str, str], count: int | None
) -> None:
    (tmp_path / "cgroup").write_text(membership, encoding="ascii")
    for name, content in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(content, encoding="ascii")
    assert oom_kills(str(tmp_path / "cgroup"), str(tmp_path / "fs")) == count


def test_what_the_kernel_killed_in_an_earlier_life_is_not_the_cause_of_the_last(
    tmp_path: Path,
) -> None:
    """The process may have been a Python that stood by, and the ranks went on."""
    (tmp_path / "cgroup").write_text("0::/\n", encoding="ascii")

    def kernel_has_killed(count: int) -> None:
        (tmp_path / "memory.events").write_text(f"oom_kill {count}\n", encoding="ascii")

    kernel_has_killed(1)
    counted = functools.partial(oom_kills, str(tmp_path / "cgroup"), str(tmp_path))
    verdict = Verdict(plan(environment()), str(tmp_path), Redactor({}), oom_kills=counted)
    rank = Rank(1, os.getpid(), 1)
    rank.status = -signal.SIGKILL
    kernel_has_killed(2)
    first = verdict.suspect_ended_rank(rank)
    assert first is not None
    assert "out of memory: the kernel killed 1 process(es)" in first.outcome.text
    verdict.forget(1)
    second = verdict.suspect_ended_rank(rank)
    assert second is not None
    assert second.outcome.text.startswith(
        "train.py on host algo-1, rank 1 (mode none): killed by SIGKILL"
    )


def _failed_on(host: str, rank: int, kind: Kind, restarts: int) -> Suspect:
    outcome = Outcome(
        FAILED, 1, host, "ValueError: label 17", rank, place=f"train.py on host {host}, rank {rank}"
    )
    return Suspect(kind, 1.0 + restarts, 1.0 + restarts, outcome, restarts)


def test_a_rank_that_fails_before_this_hosts_ranks_have_started_again_stays_known(
    tmp_path: Path,
) -> None:
    verdict = Verdict(plan(environment()), str(tmp_path), Redactor({}))
    verdict.add(_failed_on("algo-1", 0, Kind.TERMINATED, 0))
    verdict.add(_failed_on("algo-2", 1, Kind.RECORDED, 0))
    # Both start again, and rank 1 fails at once.
    verdict.add(_failed_on("algo-2", 1, Kind.RECORDED, 1))
    earlier = verdict.forget(1)
    assert earlier is not None
    assert earlier.is_effect
    verdict.add(_failed_on("algo-1", 0, Kind.TERMINATED, 1))
    known = verdict.first_failure()
    assert known is not None
    assert (known.outcome.host, known.outcome.rank, known.is_effect) == ("algo-2", 1, False)


def test_a_failure_for_which_the_job_was_ended_is_not_judged_again(tmp_path: Path) -> None:
    """The ranks of the next attempt are ended with the job: that is an effect."""
    verdict = Verdict(plan(environment()), str(tmp_path), Redactor({}))
    verdict.add(_failed_on("algo-1", 0, Kind.TERMINATED, 1))
    reported = _failed_on("algo-2", 1, Kind.RECORDED, 0).outcome
    assert verdict.judge(reported._replace(is_decided=True)).host == "algo-2"


@pytest.mark.parametrize(
    ("membership", "files", "highest"),
    [
        ("0::/a\n", {"a/memory.peak": "4096\n", "memory.peak": "9\n"}, 4096),
        ("0::/not/seen/here\n", {"memory.peak": "8192\n"}, 8192),
        ("4:memory:/docker/x\n", {"memory/memory.max_usage_in_bytes": "5\n"}, 5),
        (
            "4:memory:/\n",
            {"memory/memory.max_usage_in_bytes": "5\n", "memory/release_agent": ""},
            None,
        ),
        ("0::/\n", {"memory.current": "5\n"}, None),
        ("nonsense", {}, None),
    ],
)
def test_the_highest_memory_of_a_container_is_the_kernels_word(
    tmp_path: Path, membership: str, files: dict[str, str], highest: int | None
) -> None:
    """Read a container's own limit, not that of a whole machine."""
    (tmp_path / "cgroup").write_text(membership, encoding="ascii")
    for name, content in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(content, encoding="ascii")
    assert highest_bytes(str(tmp_path / "cgroup"), str(tmp_path / "fs")) == highest


@pytest.mark.parametrize(("others", "highest"), [("", 4096), ("1\n", None)])
def test_memory_of_a_group_with_other_processes_is_not_the_jobs(
    tmp_path: Path, others: str, highest: int | None
) -> None:
    """A plain host: the group is the login session's, or that of the service
    that started the job.
    """
    (tmp_path / "cgroup").write_text("0::/a\n", encoding="ascii")
    (tmp_path / "fs" / "a").mkdir(parents=True)
    (tmp_path / "fs" / "a" / "memory.peak").write_text("4096\n", encoding="ascii")
    (tmp_path / "fs" / "a" / "cgroup.procs").write_text(
        f"{os.getpid()}\n{others}", encoding="ascii"
    )
    files = (str(tmp_path / "cgroup"), str(tmp_path / "fs"))
    assert highest_bytes(*files, contained=False) == highest
    assert highest_bytes(*files) == 4096


@pytest.mark.parametrize(("code", "status"), [(0, 0), (42, 42), (-9, 137), (-15, 143), (255, 255)])
def test_exit_status(code: int, status: int) -> None:
    assert exit_status(code) == status


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exit status 3"),
        (-9, "killed by SIGKILL (exit status 137, perhaps out of memory)"),
        (137, "killed by SIGKILL (exit status 137, perhaps out of memory)"),
        (-11, "killed by SIGSEGV (exit status 139)"),
        (-40, "killed by signal 40 (exit status 168)"),
        (200, "exit status 200"),
    ],
)
def test_a_status_in_words(code: int, words: str) -> None:
    assert describe_status(code) == words


@pytest.mark.parametrize(
    ("outcome", "retry"),
    [
        (Outcome(STOPPED, 143, "a"), True),
        (Outcome(FAILED, 64, "a", "the inputs were refused"), False),
        (Outcome(FAILED, 66, "a", "lost host b"), True),
        (Outcome(FAILED, 66, "a", place="train.py on host a (mode none)"), False),
        (Outcome(FAILED, 1, "a", place="train.py on host a (mode none)"), False),
        (Outcome(FAILED, 137, "a", place="train.py on host a (mode none)"), True),
        (
            Outcome(
                FAILED, 137, "a", memory="out of memory", place="train.py on host a (mode none)"
            ),
            False,
        ),
        (Outcome(FAILED, 139, "a", place="train.py on host a (mode none)"), False),
    ],
)
def test_another_try_makes_sense_where_the_script_is_not_the_cause(
    outcome: Outcome, *, retry: bool
) -> None:
    assert outcome.retry is retry


@pytest.mark.parametrize("length", [0, 10, 1023, 1024, 1025, 5000])
def test_the_limit_keeps_both_ends(length: int) -> None:
    text = "".join(chr(ord("a") + index % 26) for index in range(length))
    shortened = shorten(text)
    assert len(shortened) == min(length, 1024)
    assert shortened[:300] == text[:300]
    assert shortened[-500:] == text[-500:]


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(SUCCEEDED),
        Outcome(FAILED, 42, "algo-2", "ValueError: é"),
        Outcome(STOPPED, 143, "a", "t"),
    ],
)
def test_an_outcome_survives_the_wire(outcome: Outcome) -> None:
    assert read_outcome(outcome_fields(outcome), "algo-9") == outcome._replace(
        host=outcome.host or "algo-9"
    )


def test_the_longest_failure_fits_into_a_message() -> None:
    line = "\U0001f525" * 3000
    process_end = died(f"ValueError: {line}\n{line}\n", f'  File "{line}", line 1, in f\n')
    failure = failure_of(ProgramPlace("x.py", "b", "mpi", 3), None, process_end)
    assert len(json.dumps(outcome_fields(with_status(failure, -9)))) < MESSAGE_LIMIT
    assert len(failure.text) <= 1024


@pytest.mark.parametrize(
    "message",
    [{}, {"outcome": FAILED, "status": 256}, {"outcome": 7, "cause": [], "rank": 1 << 70}],
)
def test_an_unreadable_outcome_is_a_failure_that_names_its_host(message: dict[str, Json]) -> None:
    outcome = read_outcome(message, "algo-3")
    assert (outcome.kind, outcome.status, outcome.host, outcome.rank) == (FAILED, 66, "algo-3", -1)
    assert "algo-3" in outcome.text


def test_messages_in_pieces() -> None:
    decoder = Decoder()
    assert decoder.feed(b'{"type":') == []
    assert decoder.feed(b'"a"}\n{"type":"b"}\n{"ty') == [{"type": "a"}, {"type": "b"}]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"\xff\n",
        b"x" * (MESSAGE_LIMIT + 1),
        b"{" * 65000 + b"\n",
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Decoder().feed(data)


def test_a_worker_of_an_mpi_job_has_no_command_of_its_own() -> None:
    node_plan = plan(environment({"sagemaker_mpi_enabled": True}, hosts=("a", "b"), host="a"), "b")
    assert node_plan.argv == ()
    assert node_plan.role == "worker"
