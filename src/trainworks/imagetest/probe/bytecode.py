"""Which bytecode of an image is not what its source compiles to.

Part of the program that runs inside (``trainworks.imagetest.probe``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from trainworks.imagetest.probe.files import Image, ask

# Runs under the Python whose bytecode it is: sent as text. Another version compiles to other code,
# so the name of each file says which Python reads it.
_COMPILED = r"""
import sys
# The folder of -c is the current one, which is not part of the environment.
sys.path = [entry for entry in sys.path if entry]
import importlib.util, json, marshal, os, re, struct, warnings

TAG = sys.implementation.cache_tag
NAME = re.compile(r"(.+)\." + re.escape(TAG) + r"(?:\.opt-(\d))?\.pyc")

def sources(root):
    for folder, folders, files in os.walk(root or "/"):
        place = folder[len(root):] or "/"
        if place in ("/proc", "/sys", "/dev"):
            folders[:] = []
        elif os.path.basename(folder) == "__pycache__":
            for name in sorted(files):
                match = NAME.fullmatch(name)
                source = os.path.join(os.path.dirname(folder), match[1] + ".py") if match else ""
                if source and os.path.isfile(source):
                    yield os.path.join(folder, name), source, int(match[2] or 0)

def problem(job):
    path, source, level = job
    try:
        with open(path, "rb") as file:
            data = file.read()
        with open(source, "rb") as file:
            text = file.read()
    except OSError as error:
        return path, "cannot be read: %s" % error.strerror
    if len(data) < 16:
        return path, "has %d bytes, which is no bytecode" % len(data)
    if data[:4] != importlib.util.MAGIC_NUMBER:
        reason = "is bytecode of another Python than its name says"
        return path, reason + ", and is compiled anew at each start"
    flags = struct.unpack_from("<I", data, 4)[0]
    if flags & 1 and data[8:16] != importlib.util.source_hash(text):
        return source, "has other contents than its bytecode was made of"
    try:
        found = marshal.loads(data[16:])
    except (ValueError, EOFError, TypeError) as error:
        return path, "is damaged bytecode: %s" % error
    try:
        # Python asserts that it knows a file by its name: the name is in what warnings say.
        wanted = compile(text, source, "exec", dont_inherit=True, optimize=level)
    except (SyntaxError, ValueError) as error:
        return path, "is bytecode of a source that cannot be compiled: %s" % error
    return path, "" if found == wanted else "is not what its source compiles to"

def judged(jobs):
    found = []
    for path, said in map(problem, jobs):
        if said:
            found.append([path, said])
    return found

def main():
    warnings.simplefilter("ignore")
    root = sys.argv[2]
    jobs = [*sources(root)]
    lanes = os.cpu_count() or 1
    # By hand: a pool of multiprocessing needs a folder for semaphores,
    # which a closed container may not have.
    readers = []
    for lane in range(lanes):
        reader, writer = os.pipe()
        if os.fork() == 0:
            with open(writer, "w") as stream:
                json.dump(judged(jobs[lane::lanes]), stream)
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    told = []
    for reader in readers:
        with open(reader) as stream:
            told += [[path[len(root):], said] for path, said in json.load(stream)]
    print("\n" + sys.argv[1] + json.dumps(told) + sys.argv[1])

main()
"""


SECONDS = 900.0
"""How long the sources of an image may take to compile: 10 s on two free cores for PyTorch's."""


def bytecode_problems(image: Image) -> Iterator[tuple[str, str]]:
    """Yield files of bytecode, or their sources, and what is wrong: each source
    is compiled again, and compared.

    Python takes bytecode of the kind that these images have without a look at its source. The image
    has the system's Python, which runs this, and that of its environment.
    """
    told: list[tuple[str, str]] = []
    for python in dict.fromkeys((sys.executable, image.python)):
        found, error = ask(python, _COMPILED, image.root, seconds=SECONDS)
        if error:
            yield python, f"does not compile the sources of its bytecode: {error}"
        told += [(path, said) for path, said in found or ()]
    yield from dict.fromkeys(told)
