#!/usr/bin/env python3
"""Measures how long a job needs after the death of a rank: ours beside torchrun
alone, same script, Python and torch.

Two CPU ranks train with gloo; in the first life rank 1 kills itself at its third step (SIGKILL),
torchrun starts both again, and what is measured is the time from the death to the first step of the
last rank. Three scenarios: one host; two hosts (network namespaces, root); and one host whose other
rank has a handler of SIGTERM and waits where Python cannot run it, as in a collective of GPUs. Each
is split at what the ranks say: their processes were started (read from proc), first line, torch
imported, first step. Both take turns. Needs torch in .cache/peers/programs (`make peers`).

`--ft-launcher PREFIX`: an environment with nvidia-resiliency-ext, whose
`ft_launcher` is measured beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import ROOT, Figure, Section, amount, describe, load, machine, table, write
from start import install_ours
from trainworks.engine.temporary_folders import private_folder
from trainworks_testing.network_hosts import Network, as_host, network_of

LIMIT = 75.0
"""Seconds after which a job is given up."""

PROMISE = 3.0
"""Seconds from the death to the start of the last process: what is not the script's own start."""

SCRIPT = """\
import os, signal, sys, time

now = time.monotonic()
ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
booted = now - time.clock_gettime(time.CLOCK_BOOTTIME)
started = booted + ticks / os.sysconf("SC_CLK_TCK")
mark, rank = sys.argv[1], os.environ["RANK"]
first = not os.path.exists(mark)

def say(word, moment=None):
    moment = moment or time.monotonic()
    line = f"moment {word} of rank {rank} begun {started:.3f}: {moment:.3f}\\n"
    os.write(1, line.encode())  # in one piece: the other rank writes too

say("started", started)
say("line", now)
import torch
import torch.distributed as dist

say("imported")
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
waits = first and "waits" in sys.argv
if waits:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
for step in range(6):
    if step == 3 and first:
        if rank == "1":
            open(mark, "w").close()
            say("died")
            os.kill(os.getpid(), signal.SIGKILL)
        elif waits:
            dist.distributed_c10d._get_default_store().get("that nobody sets")
    model(torch.randn(16, 64)).square().mean().backward()
    if step == 0:
        say("step")
dist.barrier()
dist.destroy_process_group()
"""

PARTS = ("started", "line", "imported", "step")


@dataclass(frozen=True)
class Turn:
    """One job: when a rank died, and when the last rank came to each part of
    its next life, in seconds after that.

    start: seconds from the start of the last process to the first step of the last rank, in the
    first life. lives: how many it took after the death until the ranks trained again; 0: the job
    failed, and nothing else is known.
    """

    after: Mapping[str, float]
    start: float
    lives: int


@dataclass(frozen=True)
class Launch:
    """A way to start the job. command: ``{mark}`` stands for the file that says
    that a rank died.
    """

    command: Sequence[str]
    environment: Mapping[str, str]


def run_job(launch: Launch, folder: Path, network: Network | None) -> Turn:
    """Run one job on one host, or on those of the network, to its end.

    Raises:
        SystemExit: It failed before the rank died; says with what words.
    """
    processes = []
    hosts = network.hosts if network else ("localhost",)
    with contextlib.ExitStack() as stack:
        for host in hosts:
            base = folder / host
            base.mkdir(parents=True)
            prefix: tuple[str, ...] = ()
            if network:
                _write_hosts(base / "ml", host, hosts)
                prefix = network.inside(host, *as_host(host, folder.parent))
            log = stack.enter_context((base / "log").open("wb"))
            words = [word.format(mark=folder / "died") for word in launch.command]
            variables = {**launch.environment, "SAGEMAKER_BASE_DIR": str(base / "ml")}
            process = subprocess.Popen(
                (*prefix, *words), env=variables, cwd=folder.parent, stdout=log, stderr=log
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        statuses = [_wait(process) for process in processes]
    said = "".join(
        (folder / host / "log").read_text(encoding="utf-8", errors="replace") for host in hosts
    )
    moments: dict[str, list[dict[str, float]]] = {"0": [], "1": []}
    for word, rank, _, moment in re.findall(
        r"moment (\w+) of rank (\d) begun (\d+\.\d+): (\d+\.\d+)", said
    ):
        if word == "started":
            moments[rank].append({})
        moments[rank][-1][word] = float(moment)
    if not moments["1"] or "died" not in moments["1"][0]:
        raise SystemExit(
            f"the job never came to its third step, statuses {statuses}:\n{said[-6000:]}"
        )
    if any(statuses):
        return Turn({}, 0, 0)
    died = moments["1"][0]["died"]
    after = {word: max(lives[-1][word] for lives in moments.values()) - died for word in PARTS}
    first = [lives[0] for lives in moments.values()]
    start = max(life["step"] for life in first) - max(life["started"] for life in first)
    return Turn(after, start, max(map(len, moments.values())) - 1)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return a job's exit status; that of timeout(1) where it does not end."""
    try:
        return process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()
        return 124


def _write_hosts(base: Path, host: str, hosts: Sequence[str]) -> None:
    """Write the file in which a platform names the job's hosts."""
    (base / "input" / "config").mkdir(parents=True)
    document = {"current_host": host, "hosts": hosts, "network_interface_name": "eth0"}
    (base / "input" / "config" / "resourceconfig.json").write_text(
        json.dumps(document), encoding="utf-8"
    )


LINES: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("death to the next step of all ranks", ("step",), 0),
    ("- death to the start of the last process", ("started",), PROMISE),
    ("- to the first line of the script", ("line", "started"), 0),
    ("- to torch imported", ("imported", "line"), 0),
    ("- to the first step", ("step", "imported"), 0),
)


def column(turns: Sequence[Turn], of: Sequence[str]) -> tuple[float, ...]:
    """Return one measurement of the turns that ended well. of: a part, or the
    part and the one from which it counts.
    """
    well = [turn.after for turn in turns if turn.lives]
    return tuple(after[of[0]] - (after[of[1]] if of[1:] else 0) for after in well)


def figures_of(name: str, ours: Sequence[Turn], peer: Sequence[Turn]) -> list[Figure]:
    """Return the lines of one scenario. Raises SystemExit if no job of ours ended well."""
    if not any(turn.lives for turn in ours):
        raise SystemExit(f"{name}: no job of ours ended well")
    found = [
        Figure(
            name=f"{name}: {words}",
            unit="s",
            ours=column(ours, of),
            peer=column(peer, of),
            promise=promise,
        )
        for words, of, promise in LINES
    ]
    starts = [tuple(turn.start for turn in turns if turn.lives) for turns in (ours, peer)]
    return [
        *found,
        Figure(name=f"{name}: (the first start)", unit="s", ours=starts[0], peer=starts[1]),
    ]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prefix", type=Path, default=ROOT / ".cache/peers/programs", help="environment with torch"
    )
    parser.add_argument(
        "--ft-launcher", type=Path, metavar="PREFIX", help="environment with nvidia-resiliency-ext"
    )
    parser.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="jobs of each (default: %(default)s)"
    )
    parser.add_argument(
        "--only", choices=("one", "two", "waits"), nargs="+", help="these scenarios only"
    )
    parser.add_argument(
        "--write", action="store_true", help="record the section in benchmarks/results.md"
    )
    asked = parser.parse_args()
    bin_ = asked.prefix.absolute() / "bin"
    programs = {name: str(bin_ / name) for name in ("python", "torchrun")}
    chosen = asked.only or ("one", "waits", "two")
    figures: list[Figure] = []
    with private_folder() as folder:
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        manifest = folder / "image.json"
        manifest.write_text(
            json.dumps({"schema": 1, "name": "benchmark", "components": {}, "programs": programs})
        )
        train = install_ours(folder / "ours")
        variables = {
            "PATH": f"{bin_}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        own = {
            **variables,
            "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
            "TRAINWORKS_MAX_RESTARTS": "3",
        }
        ft = (
            (str(asked.ft_launcher.absolute() / "bin/ft_launcher"), "--nnodes=1")
            if asked.ft_launcher
            else ()
        )
        rows: list[tuple[str, ...]] = [
            (
                "",
                "launcher",
                "jobs",
                "ended well",
                "restarts of those",
                "death to the next step, median",
            )
        ]
        found = machine(torch=_torch(programs["python"]))

        def scenario(
            name: str, processes: int, words: Sequence[str], network: Network | None
        ) -> None:
            """Measure one; the turns of ours and the peer alternate."""
            ours = (
                str(train),
                "--mode",
                "torch_distributed",
                "--processes-per-host",
                str(processes),
                "--",
                "train.py",
            )
            where: tuple[str, ...] = ("--standalone",)
            if network:
                point = f"--rdzv-endpoint={network.hosts[0]}:29400"
                where = ("--nnodes=2", "--rdzv-backend=c10d", point, "--rdzv-id=1")
            alone = (
                programs["torchrun"],
                *where,
                f"--nproc-per-node={processes}",
                "--max-restarts=3",
                "train.py",
            )
            launches = {
                "ours": Launch((*ours, "{mark}", *words), own),
                "peer": Launch((*alone, "{mark}", *words), variables),
            }
            if ft and not network and not words:
                path = {**variables, "PATH": f"{Path(ft[0]).parent}:{variables['PATH']}"}
                ft_words = (
                    *ft,
                    f"--nproc-per-node={processes}",
                    "--max-restarts=3",
                    "train.py",
                    "{mark}",
                )
                launches["ft_launcher"] = Launch(ft_words, path)
            turns: dict[str, list[Turn]] = {side: [] for side in launches}
            for number in range(asked.repeat):
                for side, launch in launches.items():
                    at = folder / f"{name}-{number}-{side}".replace(" ", "-")
                    turns[side].append(run_job(launch, at, network))
                    print(f"{name}, {side}: {turns[side][-1]}", file=sys.stderr, flush=True)
            for side, made in turns.items():
                lives = ", ".join(str(turn.lives) for turn in made if turn.lives) or "-"
                after = amount(column(made, ("step",)), "s") or "-"
                rows.append(
                    (
                        name,
                        side,
                        str(len(made)),
                        str(sum(turn.lives > 0 for turn in made)),
                        lives,
                        after,
                    )
                )
            figures.extend(figures_of(name, turns["ours"], turns["peer"]))

        if "one" in chosen:
            scenario("one host", 2, (), None)
        if "waits" in chosen:
            scenario("a rank that waits", 2, ("waits",), None)
        if "two" in chosen and os.geteuid() == 0:
            with network_of(2) as network:
                scenario("two hosts", 1, (), network)
        found["load at the end"] = load()
    section = Section(
        title="Restart of a job of two CPU ranks",
        machine=found,
        figures=tuple(figures),
        peer=(
            "torchrun alone (`--standalone` or `--rdzv-backend=c10d`,"
            " `--max-restarts=3`), with the same script, Python and torch."
            f" A job that has not ended after {LIMIT:g} s counts as failed."
        ),
        details=(table(rows),),
    )
    print(describe(section))
    if asked.write:
        write("restarts", section)
    return 0


def _torch(python: str) -> str:
    """Return torch's version in an environment."""
    code = "import importlib.metadata as found; print(found.version('torch'))"
    return subprocess.run(
        (python, "-c", code), capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
