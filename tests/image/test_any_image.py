"""`check --image` of images that have no plan: another maker's, and those of a
Dockerfile that starts from ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from image.support import ROOT, BuiltByCommand
from image.test_imagetest import ignore
from trainworks.engine.protocol import BuildRequest
from trainworks.errors import ImageTestError
from trainworks.render.dockerfile import INPUTS_LABEL

PACKAGES = "/opt/venv/lib/python3.11/site-packages"

OF_ANOTHER_MAKER = f"LABEL org.opencontainers.image.title=theirs {INPUTS_LABEL}=\n"

SOUND = (
    # Steps of usual training images: users, code, settings of packages, links, a cache that only
    # costs space.
    "RUN useradd --create-home trainer && mkdir /workspace && chmod 777 /workspace && echo 'x = 1'"
    " > /workspace/t.py && echo '# more' >> /etc/ssh/sshd_config && ln -s python3 /usr/bin/python"
    " && ln -s /workspace/none /workspace/to && mkdir -p /root/.cache/pip && echo cached >"
    " /root/.cache/pip/file\nEXPOSE 22\n"
)

FAULTS = {
    f"rm {PACKAGES}/requests/api.py": (
        f"{PACKAGES}/requests/api.py is missing (distribution requests)"
    ),
    f"echo '#' >> {PACKAGES}/yaml/loader.py": f"{PACKAGES}/yaml/loader.py has ",
    "rm /usr/lib/git-core/git-remote-https": (
        "/usr/lib/git-core/git-remote-https is missing (package git)"
    ),
    "rm /usr/lib/x86_64-linux-gnu/libcurl-gnutls.so.4*": "does not find libcurl-gnutls.so.4",
    "cp /usr/bin/env /usr/local/bin/as-root && chmod u+s /usr/local/bin/as-root": (
        "/usr/local/bin/as-root has setuid"
    ),
    "chmod 0777 /tmp": "/tmp has mode 0777",
    "chmod o+w /etc/profile": "/etc/profile has mode 0646",
    "ln -s /nowhere/libcudart.so.12 /usr/local/lib/libcudart.so.12": (
        "/usr/local/lib/libcudart.so.12"
    ),
    "mkdir -p /root/.ssh && ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519": (
        "/root/.ssh/id_ed25519"
    ),
    (
        "mkdir -p /opt/cuda/lib64/stubs"
        " && cp /usr/lib/x86_64-linux-gnu/libnuma.so.1 /opt/cuda/lib64/stubs/libcuda.so.1"
    ): "/opt/cuda/lib64/stubs/libcuda.so.1",
    f"cp -r {PACKAGES}/six-*.dist-info {PACKAGES}/six-1.0.dist-info": "six: ",
}
"""Steps of a Dockerfile, and the words that the check has for them."""


def checked(
    image: BuiltByCommand, folder: Path, dockerfile: str, *options: str
) -> tuple[int, dict[str, Any], str]:
    """Build an image from the text of a Dockerfile, and check it; return the exit status, the
    result and the messages.
    """
    (folder / "Dockerfile").write_text(f"FROM {image.reference}\n{dockerfile}")
    name = f"localhost/trainworks-any-{uuid.uuid4().hex[:12]}:test"
    command = (
        sys.executable,
        str(ROOT / "build.py"),
        "check",
        "--image",
        name,
        "--engine",
        image.engine.name,
    )
    try:
        image.engine.build(BuildRequest(name="test", context=folder, tags=(name,)), ignore)
        done = subprocess.run(
            (*command, "--format", "json", *options), capture_output=True, text=True, check=False
        )
    finally:
        image.engine.remove(name)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.engine
@pytest.mark.core
def test_a_sound_image_made_from_ours_passes_and_says_what_a_job_finds(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    status, result, output = checked(docker_image, tmp_path, SOUND, "--any")
    assert status == 0, output
    assert all(check["passed"] for check in result["checks"])
    assert "it exposes 22/tcp" in result["notes"]
    assert "1 files of package caches are in its layers: they only cost space" in result["notes"]
    assert not [note for note in result["notes"] if note.startswith("no ")]


@pytest.mark.engine
def test_the_faults_of_another_makers_image_are_named(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    steps = "".join(f"RUN {command}\n" for command in FAULTS)
    path = (
        "ENV LD_LIBRARY_PATH=/opt/cuda/lib64/stubs:$NOT_SET\n"
        "USER 0\n"
        "RUN rm /opt/venv/bin/torchrun\n"
    )
    status, result, output = checked(docker_image, tmp_path, OF_ANOTHER_MAKER + steps + path)
    assert status == ImageTestError.exit_status, output
    details = "\n".join(check["detail"] for check in result["checks"] if not check["passed"])
    for words in (*FAULTS.values(), "an entry is empty, which means the current folder"):
        assert words in details, output
    assert "no torchrun: torch's launcher" in result["notes"]


@pytest.mark.engine
def test_an_image_without_a_python_is_asked_what_a_shell_can_tell(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    without = "RUN rm -r /opt/venv /usr/bin/python3*\nUSER 1000\n"
    status, result, output = checked(docker_image, tmp_path, OF_ANOTHER_MAKER + without)
    assert status == ImageTestError.exit_status, output
    broken = [check["title"] for check in result["checks"] if not check["passed"]]
    assert broken == ["links of programs and libraries have their targets"]
    assert any(note.startswith("its files were not looked at") for note in result["notes"])
    assert any(note.startswith("it runs as user 1000") for note in result["notes"])


@pytest.mark.engine
def test_what_an_image_prints_at_the_end_of_each_python_is_not_its_answer(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    lines = "import atexit; atexit.register(print, 'bye')"
    step = f'RUN echo "{lines}" > {PACKAGES}/zz.pth\n'
    _, result, output = checked(docker_image, tmp_path, OF_ANOTHER_MAKER + step)
    titles = {check["title"]: check["passed"] for check in result["checks"]}
    assert [
        passed for title, passed in titles.items() if title.startswith("import torch succeeds: ")
    ] == [True], output
    assert "all shared libraries under /usr, /opt find what they need" in titles
    assert not [note for note in result["notes"] if "no torch" in note]


@pytest.mark.engine
def test_an_image_whose_python_ends_before_it_answers_has_passed_nothing(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    torch = f"{PACKAGES}/torch"
    step = f"RUN rm -r {torch}/__pycache__ && echo 'import os; os._exit(0)' > {torch}/__init__.py\n"
    status, result, output = checked(docker_image, tmp_path, OF_ANOTHER_MAKER + step)
    assert status == ImageTestError.exit_status
    assert [check["passed"] for check in result["checks"] if check["component"] == "torch"] == [
        False
    ], output
