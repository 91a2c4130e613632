"""Children end: by themselves, in time, when interrupted, with everything they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from trainworks.engine.subprocesses import (
    Capture,
    Child,
    Interruption,
    LineSplitter,
    clean,
    own_environment,
    programs,
    run,
    stream,
    uninterrupted,
)
from trainworks_testing.clock import PATIENCE, assert_within, start_clock

FOREVER = "import signal, sys, time; print('ready', flush=True); signal.pause()"
STUBBORN = (
    "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)];"
    "print('ready', flush=True)\nwhile True: signal.pause()"
)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_run_returns_status_and_both_streams() -> None:
    done = run(
        python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"), timeout=300
    )
    assert (done.status, done.output, done.errors, done.timed_out) == (3, b"out\n", b"err\n", False)
    assert done.words == "err"


def test_run_merges_in_order_of_arrival() -> None:
    code = "import os; os.write(1, b'a'); os.write(2, b'b'); os.write(1, b'c')"
    assert run(python(code), timeout=300, capture=Capture(merge=True)).output == b"abc"


def test_more_output_than_a_pipe_holds_on_both_streams() -> None:
    code = "import sys; sys.stdout.write('x' * 1000000); sys.stderr.write('y' * 1000000)"
    done = run(python(code), timeout=300)
    assert (len(done.output), len(done.errors)) == (1000000, 1000000)


def test_a_signalled_child_has_128_and_the_number() -> None:
    assert run(python("import os; os.kill(os.getpid(), 9)"), timeout=300).status == 137


def test_time_is_up() -> None:
    began = start_clock()
    done = run(python(FOREVER), timeout=0.5)
    assert done.timed_out
    assert done.status == 124
    assert_within(5, began, time.monotonic())


def test_a_missing_program_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        run(("/nonexistent/program",), timeout=1)


def test_stream_hands_on_lines_and_the_rest_without_newline() -> None:
    lines: list[str] = []
    assert stream(python("print('a'); print('b', end='')"), lines.append) == 0
    assert lines == ["a", "b"]


def test_stream_does_not_wait_for_a_daemon_that_keeps_the_pipe() -> None:
    code = (
        "import subprocess, sys; subprocess.Popen(['sleep',"
        " '60'], start_new_session=True); print('done')"
    )
    lines: list[str] = []
    began = start_clock()
    assert stream(python(f"{code}"), lines.append) == 0
    assert lines == ["done"]
    assert_within(10, began, time.monotonic())
    ours = [pid for pid in children_named("sleep", "60") if os.getsid(pid) == pid]
    for pid in ours:
        os.kill(pid, signal.SIGKILL)


def children_named(*argv: str) -> list[int]:
    command_bytes = b"\0".join(word.encode() for word in argv) + b"\0"
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes() == command_bytes:
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids


class StopHereError(Exception):
    pass


def pid_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("code", [FOREVER, STUBBORN])
def test_an_exception_ends_the_child_even_a_stubborn_one(code: str) -> None:
    pids: list[int] = []

    def take(line: str) -> None:
        pids.append(int(line.split()[0]))
        raise StopHereError

    with pytest.raises(StopHereError):
        stream(python(code.replace("'ready'", "__import__('os').getpid()")), take, grace=1.0)
    assert pid_gone(pids[0])


def test_the_group_of_an_ended_child_is_ended_too() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '61'], stdout=2).pid, flush=True)"
    done = run(python(code), timeout=300)
    pid = int(done.output)
    deadline = time.monotonic() + PATIENCE
    while not pid_gone(pid):
        assert time.monotonic() < deadline
        os.sched_yield()


def test_interrupt_ends_the_child_of_a_real_program(tmp_path: Path) -> None:
    """A second Ctrl-C during the cleaning up changes nothing."""
    program = tmp_path / "program.py"
    says_its_number = STUBBORN.replace("'ready'", "__import__('os').getpid()")
    command = python(says_its_number)
    program.write_text(
        "import sys\n"
        "from trainworks.engine.subprocesses import stream\n"
        f"stream({command!r}, lambda line: print(line, flush=True), grace=1.0)\n"
    )
    with subprocess.Popen(
        (sys.executable, str(program)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert b"KeyboardInterrupt" in errors
    assert pid_gone(pid)


def test_an_interrupt_between_the_first_one_and_the_cleaning_up() -> None:
    """The second Ctrl-C falls on the first step of ``__exit__``, before
    anything there can guard itself.
    """
    child = Child(("sleep", "62"), merge=True, grace=1.0)
    arrived: list[str] = []

    def again(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is Child.__exit__.__code__:
            arrived.append(event)
            signal.raise_signal(signal.SIGINT)

    def work() -> None:
        with child:
            sys.settrace(again)
            signal.raise_signal(signal.SIGINT)

    before, tracer = signal.getsignal(signal.SIGINT), sys.gettrace()
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        sys.settrace(tracer)
    assert arrived == ["call"]
    assert pid_gone(child.identifier)
    assert signal.getsignal(signal.SIGINT) is before


def test_uninterrupted_delivers_afterwards() -> None:
    done: list[bool] = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]


def test_clean_lines() -> None:
    assert clean(b"\x1b[31mred\x1b[0m text") == "red text"
    assert clean(b"10%\r50%\r100%\r") == "100%"
    assert clean(b"\xff") == "\ufffd"
    splitter = LineSplitter()
    assert list(splitter.feed(b"a\nb")) == ["a"]
    assert list(splitter.feed(b"c\r\n")) == ["bc"]
    assert list(splitter.finish()) == []


def test_an_endless_line_does_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(10) for line in splitter.feed(b"x" * 65536)]
    assert sum(map(len, lines)) == 9 * 65536


def test_programs_finds_each_real_file_once(tmp_path: Path) -> None:
    first, second, link = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for folder in (first, second):
        folder.mkdir()
        (folder / "tool").write_text("#!/bin/sh\n")
        (folder / "tool").chmod(0o755)
    link.symlink_to(first)
    assert programs("tool", f"{link}:{second}:{first}:/nonexistent") == (
        f"{link}/tool",
        f"{second}/tool",
    )
    assert programs("tool", None) == ()


# Threads that Ctrl-C reaches.


def test_an_interruption_ends_what_a_thread_waits_for_and_lets_it_clean_up() -> None:
    interruption, up = Interruption(), threading.Event()
    children: list[int] = []
    cleaned: list[bytes] = []

    def note(line: str) -> None:
        children.append(int(line))
        up.set()

    def work() -> None:
        with interruption.reaches_this_thread():
            try:
                stream(("/bin/sh", "-c", "echo $$; exec sleep 100"), note)
            except KeyboardInterrupt:
                cleaned.append(run(("/bin/sh", "-c", "echo cleaned"), timeout=300).output)

    thread = threading.Thread(target=work)
    thread.start()
    assert up.wait(10)
    interruption.request()
    thread.join(10)
    assert cleaned == [b"cleaned\n"]
    assert not Path(f"/proc/{children[0]}").exists()


def test_an_interruption_waits_until_it_is_let_through() -> None:
    interruption = Interruption()
    interruption.request()
    done: list[str] = []

    def work() -> None:
        with interruption.reaches_this_thread():
            with uninterrupted():
                done.append(run(("echo", "whole"), timeout=300).words)
            try:
                run(("sleep", "100"), timeout=300)
            except KeyboardInterrupt:
                done.append("interrupted")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert done == ["whole", "interrupted"]


def test_the_environment_is_read_while_another_thread_changes_it() -> None:
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            os.environ["TRAINWORKS_TEST"] = "x"
            del os.environ["TRAINWORKS_TEST"]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        environments = [own_environment() for _ in range(2000)]
    finally:
        stop.set()
        thread.join()
    assert all(variables["PATH"] == os.environ["PATH"] for variables in environments)
