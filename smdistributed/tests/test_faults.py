"""A rank fails: every other rank ends within ten seconds, with a status other
than 0, and the cause is printed once.

The job has two pipelines of two ranks. The steps at the end of a process are the interpreter's
part: an uncaught exception goes to `sys.excepthook`, then the exit functions run. Forked ranks do
just that, and start in a tenth of the time; one case runs as programs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs import BY_HAND
from ranks import _FORKS, free_port, rank_variables, run_program, run_ranks
from trainworks_testing import clock
from trainworks_testing.clock import PATIENCE, assert_within, start_clock

RANKS = 4
"""pp_rank 0 and 1 of the first pipeline, then of the second."""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        rank: The rank that fails.
        where: The place in the program.
        how: The fault: "raise"; "raise late", which ends its program only after rank 0 has ended;
            "raise and stay", whose process groups never go, as NCCL's wait for ranks that are gone;
            "kill", or the name of another signal; "leave", which is `os._exit(0)`; or "return": its
            script is over.
        others: The work of the other ranks outside steps meanwhile.
    """

    rank: int
    where: str
    how: str
    others: str = "next"


FAULTS = {
    "exception in a remote forward": Fault(3, "forward", "raise"),
    "exception in a remote backward": Fault(1, "backward", "raise"),
    "exception that ends its rank after the others": Fault(1, "backward", "raise late"),
    "exception in a rank whose end hangs": Fault(1, "backward", "raise and stay"),
    "exception in the user's step": Fault(0, "step", "raise"),
    "killed in a step": Fault(1, "forward", "kill"),
    "killed in a step, and rank 0": Fault(0, "step", "kill"),
    "exception between steps, others in a collective": Fault(2, "between", "raise", "barrier"),
    "killed between steps, others in a collective": Fault(0, "between", "kill", "barrier"),
    "killed between steps, others compute": Fault(3, "between", "kill", "compute"),
    "exception between steps, others compute": Fault(0, "between", "raise", "compute"),
    "ended by SIGTERM between steps": Fault(2, "between", "SIGTERM", "barrier"),
    "ended by SIGSEGV in a forward": Fault(3, "forward", "SIGSEGV"),
    "os._exit(0) in a forward": Fault(1, "forward", "leave"),
    "os._exit(0) between steps": Fault(0, "between", "leave", "barrier"),
    "a script that is over before the others": Fault(1, "between", "return"),
}

QUIET = ("leave", "return")
"""Ways to end a rank with status 0."""


def stay(group: Any = None) -> None:  # noqa: ARG001
    threading.Event().wait()


def train(folder: str, fault: Fault) -> None:
    """Train for two steps; fail in the second or after the first."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch import initialize

    smp.init({**BY_HAND, "ddp": True})
    armed = False
    if fault.how == "raise late" and smp.rank() == fault.rank:
        watch, hook_before = initialize._watch, sys.excepthook
        assert watch is not None
        watch.grace = PATIENCE  # a busy machine ends the others later than this one's grace

        def late(*error: Any) -> None:
            watch._thread.join(PATIENCE)  # it ends with the connection to rank 0
            hook_before(*error)

        sys.excepthook = late

    if fault.how == "raise and stay" and smp.rank() == fault.rank:
        torch.distributed.destroy_process_group = stay
        torch.distributed.distributed_c10d._abort_process_group = stay

    def fail(where: str) -> bool:
        """Fail, if this is the place. Return whether the script shall end instead."""
        if not armed or fault.rank != smp.rank() or fault.where != where:
            return False
        Path(folder, "failed").write_text(str(time.time()))
        if fault.how == "return":
            return True
        if fault.how == "leave":
            os._exit(0)
        if fault.how == "kill" or fault.how.startswith("SIG"):
            name = "SIGKILL" if fault.how == "kill" else fault.how
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.Signals[name])
        raise ValueError("the cause")

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            return value * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            fail("backward")
            return grad

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            fail("forward")
            result: torch.Tensor = Failing.apply(self.linear(value))  # type: ignore[no-untyped-call]
            return result

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body = nn.Linear(4, 4), Body()
            smp.set_partition(self.body, 1)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.body(self.first(value)).relu()
            return result

    model = smp.DistributedModel(Net())

    @smp.step
    def step(model: Any, value: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(value).sum()
        fail("step")
        model.backward(loss)
        return loss

    step(model, torch.ones(4, 4))
    smp.barrier()
    armed = True
    if fail("between"):
        return
    if fault.others == "barrier":
        smp.barrier()
    end = time.monotonic() + 60
    while fault.others == "compute" and time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)
    step(model, torch.ones(4, 4))
    smp.barrier()
    print("the end was reached")


def as_process(
    rank: int,
    port: int,
    folder: str,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    count: int = RANKS,
) -> None:
    """Run a function as the interpreter runs a script."""
    os.environ.update(rank_variables(rank, count, port))
    for name in ("stdout", "stderr"):
        number = getattr(sys, name).fileno()
        os.dup2(os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT), number)
    import torch

    torch.set_num_threads(1)
    try:
        function(*arguments)
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        raise SystemExit(1) from None


def run_ranks_to_their_end(
    folder: Path, function: Callable[..., None], *arguments: Any
) -> list[int]:
    """Run a job whose ranks write to ``folder``, and return the exit statuses by rank."""
    port = free_port()
    processes = [
        _FORKS.Process(target=as_process, args=(rank, port, str(folder), function, arguments))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(end - time.monotonic(), 0.1))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert None not in statuses, f"a rank still ran after {PATIENCE} s: {statuses}"
    return [status for status in statuses if status is not None]


def check_others(
    folder: Path, failing: int, how: str, function: Callable[..., None], *arguments: Any
) -> None:
    """Run a job of which a rank fails and notes the moment in ``folder``/failed.

    See how all ranks end.

    Args:
        folder: An empty folder.
        failing: The rank that fails.
        how: A fault that begins with "raise", or a way to end that raises nothing.
        function: The function of each rank.
        arguments: Its arguments.
    """
    start_clock()
    statuses = run_ranks_to_their_end(folder, function, *arguments)
    now = time.monotonic()
    seconds = time.time() - float((folder / "failed").read_text())
    errors = [(folder / f"stderr{rank}").read_text() for rank in range(RANKS)]
    joined_text = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(errors))
    quiet = [failing] if how in QUIET else []
    assert all(status for rank, status in enumerate(statuses) if rank not in quiet), joined_text
    assert_within(10, now - seconds, now, joined_text)
    assert "the end was reached" not in "".join(
        (folder / f"stdout{r}").read_text() for r in range(RANKS)
    )
    raises = how.startswith("raise")
    for rank, text in enumerate(errors):
        if rank == failing:
            assert text.count("Traceback") == raises, joined_text
            assert ("ValueError: the cause" in text) == raises, joined_text
            continue
        lines = [line for line in text.splitlines() if line.startswith("smp: ")]
        assert len(lines) == 1, joined_text
        assert re.search(
            rf" ends: rank {failing}( \(pp_rank {failing % 2}\))? failed: ", lines[0]
        ), joined_text
        assert "Traceback" not in text, joined_text
        if raises:
            assert lines[0].endswith("ValueError: the cause"), joined_text


CORE = "exception in a remote forward"


CASES = [pytest.param(case, marks=[pytest.mark.core] if case == CORE else []) for case in FAULTS]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_ends_and_the_cause_is_printed_once(case: str, tmp_path: Path) -> None:
    fault = FAULTS[case]
    check_others(tmp_path, fault.rank, fault.how, train, str(tmp_path), fault)


def test_programs_end_as_forked_ranks_do(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        f"sys.path[:0] = {[str(Path(file).parent) for file in (__file__, clock.__file__)]!r}\n"
        "from test_faults import Fault, train\n"
        f"train({str(tmp_path)!r}, Fault(1, 'forward', 'raise'))\n"
    )
    first, second, third, fourth = run_program(RANKS, [str(program)])
    assert [end.status for end in (first, second, third, fourth)] == [1, 1, 1, 1]
    assert second.err.count("Traceback") == 1
    for other in (first, third, fourth):
        assert "rank 1 (pp_rank 1) failed: ValueError: the cause" in other.err
        assert "Traceback" not in other.err


def test_a_rank_may_end_before_the_others(tmp_path: Path) -> None:
    port = free_port()
    processes = [
        _FORKS.Process(
            target=as_process, args=(rank, port, str(tmp_path), leave_early, (str(tmp_path),))
        )
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    errors = "".join((tmp_path / f"stderr{rank}").read_text() for rank in range(RANKS))
    assert [process.exitcode for process in processes] == [0] * RANKS, errors
    assert "smp: " not in errors


def leave_early(folder: str) -> None:
    """Rank 1 ends.

    Rank 0 has nothing to do, too. The others go on for longer than a failure would let them.
    """
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.transport.failure_watch import GRACE

    smp.init({"ddp": True})
    smp.barrier()
    if smp.rank() > 1:
        end = time.monotonic() + GRACE + 1
        while time.monotonic() < end:
            pass
        Path(folder, f"done{smp.rank()}").write_text("")


def lose_a_connection(folder: str) -> list[bool]:
    """Rank 0 knows that rank 3 was killed, and the connection to rank 1 ends,
    as that ends for the same reason.
    """
    from smdistributed.modelparallel.torch import initialize
    from smdistributed.modelparallel.torch.exceptions import PeerError
    from smdistributed.modelparallel.torch.transport.failure_watch import Watch

    os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    pairs = {rank: socket.socketpair() for rank in (1, 2, 3)}
    watch = Watch(
        0, {rank: mine for rank, (mine, _) in pairs.items()}, lambda rank: f"rank {rank}", grace=1e6
    )
    pairs[3][1].close()
    assert watch.wait_for_failure(PATIENCE) is not None
    return [initialize._report_failure(watch, PeerError(1, "rank 1", "its connection was lost"))]


def test_the_first_failure_is_named_and_not_what_followed_from_it(tmp_path: Path) -> None:
    assert run_ranks(1, lose_a_connection, str(tmp_path)) == [[True]]
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert line.startswith("smp: rank 0 ends: rank 3 failed: it was killed")


def wait_for_a_rank_whose_script_is_over(folder: str) -> list[bool]:
    """Rank 0 has told rank 2 that the script of rank 1 is over; a collective of rank 2 breaks."""
    from smdistributed.modelparallel.torch import initialize
    from smdistributed.modelparallel.torch.transport.failure_watch import Watch

    os.dup2(os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    mine, of_rank_0 = socket.socketpair()
    watch = Watch(2, {0: mine}, lambda rank: f"rank {rank}", grace=1e6)
    news = json.dumps({"over": 1}).encode()
    of_rank_0.sendall(struct.pack("<I", len(news)) + news)
    deadline = time.monotonic() + PATIENCE
    while watch.over is None and time.monotonic() < deadline:
        os.sched_yield()
    broken = RuntimeError("Read error: Connection reset by peer")
    return [
        initialize._report_failure(watch, broken),
        initialize._report_failure(watch, ValueError("its own")),
    ]


def test_a_rank_that_waited_for_one_that_was_over_is_not_named(tmp_path: Path) -> None:
    assert run_ranks(1, wait_for_a_rank_whose_script_is_over, str(tmp_path)) == [[True, False]]
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    assert (
        line
        == "smp: rank 2 ends: rank 1 failed: its script was over while rank 2 still waited for it"
    )
