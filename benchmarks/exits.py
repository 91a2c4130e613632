#!/usr/bin/env python3
"""Measures how jobs of two CPU ranks end: ours beside torchrun alone, with the same script, Python and torch.

The ranks train with gloo under DDP, and end without a word to torch, while gloo's threads still have the works of
their last collectives to drop. With torchrun alone some ranks are aborted then, after the last line of their script
("terminate called without an active exception"); our launcher lets each Python wait for these threads
(TRAINWORKS_CLEAN_EXIT). Both take turns. What is measured is how many jobs failed, and the seconds from the last line
of the last rank to the end of the job. Needs torch in .cache/peers/programs (`make peers`, or --prefix PREFIX).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from measure import ROOT, Figure, Section, describe, load, machine, write
from start import install_ours
from trainworks.engine.scratch import private_folder

LIMIT = 600.0
"""Seconds after which a job is given up."""

ABORTED = "terminate called without an active exception"
SCRIPT = """\
import os
import time
import torch
import torch.distributed as dist

torch.manual_seed(0)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
works = [dist.all_reduce(parameter.detach().clone(), async_op=True) for parameter in model.parameters()]
for work in works:
    work.wait()
os.write(1, f"moment {time.monotonic()}\\n".encode())  # in one piece: the other rank writes too
"""


@dataclass
class Ends:
    """How the jobs of one side ended."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    aborted: int = 0

    def run(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """Run one job to its end."""
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT
        )
        ended = time.monotonic()
        said = done.stdout + done.stderr
        moments = re.findall(r"moment (\d+\.\d+)", said)
        if len(moments) != 2:
            raise SystemExit(f"the script never came to its end:\n{said[-4000:]}")
        self.statuses[done.returncode] += 1
        self.aborted += ABORTED in said
        if done.returncode == 0:
            self.seconds.append(ended - max(map(float, moments)))

    @property
    def words(self) -> str:
        """How many jobs ended with which status."""
        listed = ", ".join(f"{count} with {status}" for status, count in sorted(self.statuses.items()))
        return f"{listed} (aborted: {self.aborted})"


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=Path, default=ROOT / ".cache/peers/programs", help="environment with torch")
    parser.add_argument("--repeat", type=int, default=60, metavar="N", help="jobs of each (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="turns at a time (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="record the section in benchmarks/results.md")
    asked = parser.parse_args()
    programs = {name: str(asked.prefix.absolute() / "bin" / name) for name in ("python", "torchrun")}
    ours, peer = Ends(), Ends()
    with private_folder() as folder:
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        manifest = folder / "image.json"
        manifest.write_text(json.dumps({"schema": 1, "name": "benchmark", "components": {}, "programs": programs}))
        train = install_ours(folder)
        environment = {
            "PATH": f"{Path(programs['python']).parent}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        own = {**environment, "TRAINWORKS_IMAGE_MANIFEST": str(manifest)}
        job = (str(train), "--mode", "torch_distributed", "--processes-per-host", "2", "--", "train.py")
        alone = (programs["torchrun"], "--standalone", "--nproc-per-node", "2", "train.py")
        found = machine(torch=_torch(programs["python"]), **{"jobs at once": str(asked.at_once)})

        def turn(number: int) -> None:
            ours.run(job, {**own, "SAGEMAKER_BASE_DIR": str(folder / f"ml-{number}")}, folder)
            peer.run(alone, environment, folder)
            print(f"ours {ours.words}; peer {peer.words}", file=sys.stderr, flush=True)

        with ThreadPoolExecutor(asked.at_once) as pool:
            list(pool.map(turn, range(asked.repeat)))
        found["load at the end"] = load()
    figures = (
        Figure(
            name="last line of the script to the end of the job",
            unit="s",
            ours=tuple(ours.seconds),
            peer=tuple(peer.seconds),
            note="of the jobs that ended well",
        ),
    )
    section = Section(
        title="End of a job of two CPU ranks",
        machine=found,
        figures=figures,
        peer="torchrun alone, with the same script, Python and torch.",
        details=(f"Exit statuses of ours: {ours.words}. Of the peer: {peer.words}.",),
    )
    print(describe(section))
    if asked.write:
        write("exits", section)
    return 0


def _torch(python: str) -> str:
    """Return torch's version in an environment."""
    code = "import importlib.metadata as found; print(found.version('torch'))"
    return subprocess.run((python, "-c", code), capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
