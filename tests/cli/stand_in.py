"""A program called ``buildah`` that builds nothing, for tests of how a run of many targets uses an
engine.

Files in its folder say how a build ends: ``fails`` and ``waits`` hold a part of the names of
images, ``meets`` how many builds run before one ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = """\
#!{python} -IS
import os, sys

folder = {folder!r}
words = sys.argv[1:]


def said(name):
    try:
        with open(folder + "/" + name) as stream:
            return stream.read()
    except FileNotFoundError:
        return ""


def write(name, text):
    with open(folder + "/" + name, "w") as stream:
        stream.write(text)


def image(reference):
    return "images/" + reference.replace("/", "%")


def describe(labels):
    import json  # takes as long as Python itself: a build starts this program seven times

    found = dict(FromImageID="1" * 64, OCIv1=dict(config=dict(Labels=labels)), Manifest="")
    return json.dumps(found)


if words[0] == "--version":
    print("buildah version 1.33.0")
elif words[0] == "info":
    print('{{"store": {{"GraphRoot": "%s", "GraphDriverName": "vfs"}}}}' % folder)
elif words[0] == "images":
    import json

    names = [name.replace("%", "/") for name in os.listdir(folder + "/images")]
    print(json.dumps([dict(names=["localhost/" + name]) for name in names]))
elif words[0] == "inspect":
    if words[-1].startswith("trainworks/base:"):
        print(describe(dict()))
    else:
        print(said(image(words[-1])) or sys.exit("image not known"))
elif words[0] == "run":
    # The one thing that a build asks in an image: which states of the archive it was made of.
    import json

    labels = json.loads(said(image("sha256:" + "1" * 64)))["OCIv1"]["config"]["Labels"]
    script, mark = words[words.index("--") + 1 :][2:4]
    text = labels.get("trainworks.archives", "").replace(", ", "\\n")
    os.execv("/bin/sh", ["sh", "-c", script, mark, "printf", "%s", text])
elif words[0] == "build":
    tags = [words[number + 1] for number, word in enumerate(words) if word == "--tag"]
    values = [words[number + 1] for number, word in enumerate(words) if word == "--label"]
    labels = dict(value.split("=", 1) for value in values)
    write("running/%d" % os.getpid(), "")
    print("[1/1] STEP 1/2: FROM x AS y\\n[1/1] STEP 2/2: RUN true\\nup", flush=True)
    import fcntl

    with open(folder + "/counting", "w") as counting:
        fcntl.flock(counting, fcntl.LOCK_EX)
        write("most", str(max(len(os.listdir(folder + "/running")), int(said("most") or 0))))
    write("begun/%d" % os.getpid(), "")
    if said("waits") and said("waits") in tags[0]:
        import signal

        signal.pause()
    while len(os.listdir(folder + "/begun")) < int(said("meets") or 0):
        import time

        time.sleep(0.01)
    os.unlink(folder + "/running/%d" % os.getpid())
    if said("fails") and said("fails") in tags[0]:
        print('Error: building at STEP "RUN true": while running runtime: exit status 9')
        sys.exit(9)
    identifier = "sha256:" + "1" * 64
    with open(words[words.index("--iidfile") + 1], "w") as stream:
        stream.write(identifier)
    for each in (identifier, *tags):
        write(image(each), describe(labels))
"""


def write_stand_in(folder: Path) -> Path:
    """Write the program into a folder, and return it."""
    for name in ("images", "running", "begun"):
        (folder / name).mkdir()
    path = folder / "buildah"
    path.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)), encoding="utf-8")
    path.chmod(0o755)
    return path
