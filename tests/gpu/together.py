"""Share two things among the parts of this suite: how a part is a program, and how it starts
several ranks on one GPU.

NCCL refuses two ranks on one GPU only where both report the same host. Each rank gets a host
identity of its own, so NCCL sends between them through the network code.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOT_TESTED_STATUS = 77
GIVE_UP = 20.0
"""Seconds that the other ranks get after one has failed."""

ONE_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
"""For several ranks on one GPU: NCCL must not look for a way within the host."""


class NotTestedError(Exception):
    """A part cannot run on this machine; the text names the missing thing."""


class RanksError(Exception):
    """A rank failed; its last lines are in the text.

    Attributes:
        statuses: Exit statuses by rank. Those that had not ended after some
            seconds more were killed.
        output: The output of each rank.
    """

    def __init__(self, text: str, statuses: list[int], output: list[str]) -> None:
        """Note how the ranks ended."""
        super().__init__(text)
        self.statuses, self.output = statuses, output


def main(part: Mapping[str, Any]) -> None:
    """Run a part, or one of its ranks, as this process: `run OPTIONS RESULT` or
    `rank FUNCTION ARGUMENTS RESULT`.

    Args:
        part: Globals of the part's file. `run(options)` returns figures; a
            rank's function returns anything for JSON.
    """
    role, *words = sys.argv[1:]
    try:
        if role == "rank":
            result = part[words[0]](**json.loads(words[1]))
        else:
            options = json.loads(words[0])
            for need in part["NEEDS"]:
                _NEEDS[need](options)
            result = part["run"](options)
    except NotTestedError as error:
        Path(words[-1]).write_text(str(error), encoding="utf-8")
        sys.exit(NOT_TESTED_STATUS)
    Path(words[-1]).write_text(json.dumps(result), encoding="utf-8")


def ranks(
    part: str,
    count: int,
    function: str,
    variables: Mapping[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Run a function of a part as the ranks of a job on one GPU, and return the value of each rank.

    Args:
        part: The part's `__file__`.
        count: Number of ranks.
        function: Its name.
        variables: More environment variables, for all ranks.
        arguments: For JSON.

    Raises:
        RanksError: A rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        place, port = Path(folder), free_port()
        children = []
        for rank in range(count):
            words = [
                sys.executable,
                part,
                "rank",
                function,
                json.dumps(arguments),
                str(place / f"result{rank}"),
            ]
            with (place / f"output{rank}").open("wb") as output:
                environment = {
                    **os.environ,
                    **ONE_GPU,
                    **rank_variables(rank, count, port),
                    **(variables or {}),
                }
                children.append(
                    subprocess.Popen(words, stdout=output, stderr=output, env=environment)
                )
        first = _wait(children)
        if first is not None:
            texts = [(place / f"output{rank}").read_text(errors="replace") for rank in range(count)]
            statuses = [child.returncode for child in children]
            text = "\n".join(texts[first].splitlines()[-15:])
            failure_line = (
                f"{function} {arguments} of {count}: rank {first} failed first of {statuses}"
            )
            raise RanksError(f"{failure_line}\n{text}", statuses, texts)
        return [
            json.loads((place / f"result{rank}").read_text(encoding="utf-8"))
            for rank in range(count)
        ]


def rank_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the variables of a rank that is alone on its host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"rank-{rank}",
    }


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def nvidia_libraries() -> list[str]:
    """Return the folders of NVIDIA's wheels that have libraries: those that torch itself loads."""
    import torch

    return [str(place) for place in sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib"))]


def near(title: str, difference: float, limit: float) -> float:
    """Return a difference.

    Raises:
        AssertionError: The difference is above the limit, or not a number.
    """
    if not difference <= limit:
        raise AssertionError(f"{title}: differs by {difference:g}, at most {limit:g} is right")
    return difference


def _wait(children: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all ranks.

    Return the one that failed first, or None; the others are ended some seconds later.
    """
    first, end = None, float("inf")
    while any(child.poll() is None for child in children):
        if first is None:
            first = next((rank for rank, child in enumerate(children) if child.returncode), None)
            end = time.monotonic() + GIVE_UP if first is not None else end
        if time.monotonic() > end:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    return (
        next((rank for rank, child in enumerate(children) if child.returncode), None)
        if first is None
        else first
    )


def _torch(_: Mapping[str, Any]) -> Any:
    try:
        import torch
    except ImportError as error:
        raise NotTestedError(f"this Python cannot import torch: {error}") from error
    return torch


def _cuda(options: Mapping[str, Any]) -> None:
    torch = _torch(options)
    if options["device"] == "cpu":
        return
    if not torch.cuda.is_available():
        why = (
            "it was built without CUDA"
            if torch.version.cuda is None
            else "it finds no GPU and driver that work"
        )
        raise NotTestedError(f"torch {torch.__version__} cannot use a GPU: {why}")


def _nccl(options: Mapping[str, Any]) -> None:
    _cuda(options)
    if options["device"] != "cpu" and not _torch(options).distributed.is_nccl_available():
        raise NotTestedError("torch was built without NCCL")


def _archive(options: Mapping[str, Any]) -> None:
    if not options["archive"]:
        raise NotTestedError("no archive of an image's plugin was given: --archive FILE")


_NEEDS = {"torch": _torch, "cuda": _cuda, "nccl": _nccl, "archive": _archive}
"""Needs of parts, and the check that says that one is absent."""


def cause_of(output: str) -> str:
    """Return the last line of an output that says something."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


__all__ = ["ONE_GPU", "ROOT", "NotTestedError", "RanksError", "cause_of", "main", "near", "ranks"]
