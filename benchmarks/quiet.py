#!/usr/bin/env python3
"""Counts false alarms: some fifty scripts of many kinds (``corpus.toml``) that do not hang, each in its own job.

A script prints steadily for a minute, which is the warm-up of the launcher's early warning with a limit of 120 s, and
then works in silence. 30 s without a sign of progress bring a warning, as they do in any job, and each warning is a
false one, but for two scripts that do hang for a while. In one thing it is stricter than the launcher: a silence in
which something moved does not make the next one longer, so every 30 s count.

Needs an environment with py-spy and the packages of tests/peers/corpus.txt (`tools/set-up-peers corpus`, or --prefix).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from measure import HERE, ROOT, Section, describe, load, machine, table, write
from trainworks.engine.scratch import private_folder
from trainworks_launcher.supervise.hang.pace import SHORTEST

LIMIT = 600.0
"""Seconds after which a job is given up."""

HANG_LIMIT = 120
"""Seconds, the job's limit. A quarter of it passes before the launcher listens, and another until it knows the pace."""

TRAIN = f"""\
import sys
sys.path.insert(0, {str(ROOT / "launcher")!r})
from trainworks_launcher.supervise.hang import pace
pace.Pace.excuse = lambda self, seconds: None
from trainworks_launcher.command.cli import main
sys.exit(main())
"""


class Script(NamedTuple):
    """One of the corpus. ranks: of its job. text: what is run, for SECONDS. hangs: it has to be warned of."""

    name: str
    ranks: int
    text: str
    hangs: bool


class Found(NamedTuple):
    """How a job ended: its status, seconds of the longest silence, and each line that says that it hangs."""

    script: Script
    status: int
    silence: float
    alarms: list[str]


def corpus() -> list[Script]:
    """Return the scripts, each with what it begins with."""
    found = tomllib.loads((HERE / "corpus.toml").read_text(encoding="utf-8"))
    begins = found["begins"]
    return [
        Script(
            each["name"],
            each["ranks"],
            "".join((*(begins[name] for name in (*each["begin"], "prologue")), each["text"])),
            each.get("hangs", False),
        )
        for each in found["scripts"]
    ]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prefix", type=Path, default=ROOT / ".cache/peers/corpus", help="environment with the packages"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="scripts with such a name")
    parser.add_argument("--seconds", type=int, default=75, help="each works in silence (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="jobs at a time (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="record the section in benchmarks/results.md")
    asked = parser.parse_args()
    scripts = [script for script in corpus() if re.search(asked.only, script.name)]
    found = machine(silence=f"{asked.seconds} s", **{"jobs at once": str(asked.at_once)})
    with private_folder() as folder, ThreadPoolExecutor(asked.at_once) as pool:
        jobs = [
            pool.submit(_run, script, asked.prefix.absolute(), folder / str(number), asked.seconds)
            for number, script in enumerate(scripts)
        ]
        ended = [job.result() for job in jobs]
    found["load at the end"] = load()
    ended_well = [each for each in ended if each.status == 0 and not each.script.hangs]
    ran = [each for each in ended_well if each.silence > SHORTEST or each.alarms]
    others = [f"- {each.script.name}: ended with status {each.status}, not counted" for each in ended if each.status]
    others += [
        f"- {each.script.name}: it was silent for {each.silence:.0f} s at most, which shows nothing: not counted"
        for each in ended_well
        if each not in ran
    ]
    hung = [each for each in ended if each.script.hangs]
    alarms = [f"- {each.script.name}: {line}" for each in ran for line in each.alarms]
    seen = sum(bool(each.alarms) for each in hung)
    rows = [(each.script.name, str(each.script.ranks), f"{each.silence:.0f} s", str(len(each.alarms))) for each in ran]
    section = Section(
        title=f"False alarms in {len(ran)} scripts that do not hang",
        machine=found,
        figures=(),
        peer="",
        details=(
            (
                f"{len(alarms)} false alarms, with the launcher's own {SHORTEST:.0f} s and a limit of {HANG_LIMIT} s. "
                f"Of {len(hung)} scripts that do hang, {seen} were warned of. "
                "A silence in which something moved did not make the next one longer, as it does in the launcher."
            ),
            "\n".join((*alarms, *others)),
            table([("script", "ranks", "longest silence", "false alarms"), *rows]),
        ),
    )
    print(describe(section))
    if asked.write:
        write("quiet", section)
    return 0


def _run(script: Script, prefix: Path, folder: Path, seconds: int) -> Found:
    """Run a script in a job of its own."""
    base = folder / "ml"
    (base / "code").mkdir(parents=True)
    body = textwrap.indent(f"SECONDS = {seconds}\n{script.text}\nprint('done', flush=True)\n", "    ")
    (base / "code/train.py").write_text(f'if __name__ == "__main__":\n{body}', encoding="utf-8")
    programs = {program: str(prefix / "bin" / program) for program in ("python", "torchrun")}
    manifest = folder / "image.json"
    manifest.write_text(json.dumps({"schema": 1, "name": "quiet", "components": {}, "programs": programs}))
    words = ["--mode", "torch_distributed", "--processes-per-host", str(script.ranks)] if script.ranks > 1 else []
    environment = {
        "PATH": f"{prefix / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SAGEMAKER_BASE_DIR": str(base),
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
        "TRAINWORKS_HANG_LIMIT_SECONDS": str(HANG_LIMIT),
    }
    command = (sys.executable, "-IS", "-c", TRAIN, *words, "--", "train.py")
    with subprocess.Popen(
        command, env=environment, cwd=base / "code", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as job:
        timer = threading.Timer(LIMIT, job.terminate)
        timer.start()
        silence, said = _read(job)
        status = job.wait()
        timer.cancel()
    shutil.rmtree(base)
    alarms = re.findall(r"no rank has made progress for .*", said.replace(f" on {socket.gethostname()}", ""))
    print(f"{script.name}: status {status}, {len(alarms)} alarms", file=sys.stderr, flush=True)
    if alarms or status:
        print(said[-2500:], file=sys.stderr, flush=True)
    return Found(script, status, silence, alarms)


def _read(job: subprocess.Popen[bytes]) -> tuple[float, str]:
    """Return (seconds of the longest silence, what was said), once a job has ended. Its start is no silence."""
    assert job.stdout is not None
    longest, last, said = 0.0, 0.0, b""
    while piece := os.read(job.stdout.fileno(), 1 << 16):
        now = time.monotonic()
        longest = max(longest, now - last) if b"step 9" in said else 0.0
        last, said = now, said + piece
    return longest, said.decode("utf-8", "replace")


if __name__ == "__main__":
    raise SystemExit(main())
