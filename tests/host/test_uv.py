"""The uv of the builder, found by many threads at once."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from trainworks.host.uv import find_uv

sys.setswitchinterval(1e-6)
barrier = Barrier(8)

def find(_):
    barrier.wait()
    return find_uv()

with ThreadPoolExecutor(8) as pool:
    print(*set(pool.map(find, range(8))), sep="\\n")
"""


def test_threads_that_ask_first_at_the_same_time_get_the_same_path() -> None:
    """Python's table of its own paths is filled by the first question of a
    process, so each try is a process.
    """
    paths = set()
    for _ in range(10):
        done = subprocess.run(
            (sys.executable, "-c", PROGRAM), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        paths.add(done.stdout)
    [path] = paths
    assert path.endswith("/uv\n")
