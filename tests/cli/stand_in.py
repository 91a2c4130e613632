"""A program called ``buildah`` that builds nothing, for what a run of many targets makes of an engine.

Files in its folder say how a build ends: ``fails`` and ``waits`` hold a part of the names of images, ``meets`` how many
builds run before one ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = """\
#!{python}
import hashlib, json, os, signal, sys, time
from pathlib import Path

folder = Path({folder!r})
words = sys.argv[1:]


def said(name):
    path = folder / name
    return path.read_text() if path.exists() else ""


def image(reference):
    return folder / "images" / hashlib.sha256(reference.encode()).hexdigest()


def describe(labels):
    found = dict(FromImageID="1" * 64, OCIv1=dict(config=dict(Labels=labels)), Manifest="")
    return json.dumps(found)


if words[0] == "--version":
    print("buildah version 1.33.0")
elif words[0] == "info":
    print(json.dumps(dict(store=dict(GraphRoot=str(folder), GraphDriverName="vfs"))))
elif words[0] == "inspect":
    if words[-1].startswith("trainworks/base:"):
        print(describe(dict()))
    elif image(words[-1]).exists():
        print(image(words[-1]).read_text())
    else:
        sys.exit("image not known")
elif words[0] == "build":
    tags = [words[number + 1] for number, word in enumerate(words) if word == "--tag"]
    labels = dict(words[number + 1].split("=", 1) for number, word in enumerate(words) if word == "--label")
    running = folder / "running" / str(os.getpid())
    running.touch()
    at_once = len(list(running.parent.iterdir()))
    print("[1/1] STEP 1/2: FROM x AS y\\n[1/1] STEP 2/2: RUN true\\nup", flush=True)
    (folder / "most").write_text(str(max(at_once, int(said("most") or 0))))
    (folder / "begun" / str(os.getpid())).touch()
    if said("waits") and said("waits") in tags[0]:
        signal.pause()
    while len(list((folder / "begun").iterdir())) < int(said("meets") or 0):
        time.sleep(0.01)
    running.unlink()
    if said("fails") and said("fails") in tags[0]:
        print('Error: building at STEP "RUN true": while running runtime: exit status 9')
        sys.exit(9)
    identifier = "sha256:" + "1" * 64
    Path(words[words.index("--iidfile") + 1]).write_text(identifier)
    for each in (identifier, *tags):
        image(each).write_text(describe(labels))
"""


def write_stand_in(folder: Path) -> Path:
    """Write the program into a folder, and return it."""
    for name in ("images", "running", "begun"):
        (folder / name).mkdir()
    path = folder / "buildah"
    path.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)), encoding="utf-8")
    path.chmod(0o755)
    return path
