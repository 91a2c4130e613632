"""Command lines that are refused before anything begins: all that is wrong is
said at once, in golden sentences.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainworks.cli import main
from trainworks.facts.load import load

REFUSED = """\

build
pytorch
images
list
reprot
pusch
push --enigne docker --format xml a
report a b
help extand
--list -r
--list -j 2 --all --cuda cu999
--list --until plan
--list --engine docker
--list --push
--list --with metis
--list -j 2
--list --cuda 12.1
--list --framework mxnet --cuda cu121
--list --only *cu121* --cuda cpu
--list --root /nonexistent
--frame=pytorch -j 0
--framework pytorch
--cuda cpu
--framework torch
--cuda cu12
--framework pytorch --cuda cpu --until tomorrow
--framework pytorch --cuda cpu --frame x
--framework pytorch --cuda cpu --with nonsense --until plan
--framework pytorch --cuda cpu --engine dokcer
--framework pytorch --cuda cpu --push
--framework pytorch --cuda cpu --tag 1
--framework pytorch --cuda cu121 --version 2.4.1
--framework pytorch --cuda cu121 --tags 1
--framework pytorch --cuda cu121 --nonsense
--framwork torch --cuda 12.1 --version 2.4 --sources vender
--framework torch --cuda cu999 --python 2 --with nonsense --engine dokcer
--offline --push
--framework pytorch --cuda cu999
--framework pytorch --cuda 12.1
--framework pytorch --cuda cu113
--framework pytorch --cuda neuron
--framework pytorch --cuda cu118 --framework-version 2.0.1
--framework pytorch --cuda cu124 --framework-version 2.5.1
--framework pytorch --cuda cu121 --sources vendor
--framework tensorflow --cuda cu121
--framework pytorch --cuda cu121 --framework-version 2.4
--framework pytorch --cuda cu121 --python 3.13
--framework torch --cuda cpu
--framework pytroch --cuda cu121
--framework pytorch --cuda cu112
--framework pytorch --cuda cu124 --framework-version 2.6.0 --python 2.7
--framework pytorch --cuda cu121 --sources vendor
--framework pytorch --cuda cu113 --framework-version 1.11.0 --sources vendor
--framework pytorch --cuda cu121 --until plan --with mpi4pi
--framework pytorch --cuda cu121 --until plan --without open_mpi
--framework pytorch --cuda cu121 --until plan --with gdrcopi
--framework pytorch --cuda cu121 --until plan --with efa-installer
--framework pytorch --cuda cpu --until plan --with rmm
--framework pytorch --cuda cu121 --until plan --without torch
--framework pytorch --cuda cu121 --until plan --with metis --without metis
--framework pytorch --cuda cu121 --until plan --without open-mpi
--framework pytorch --cuda cu121 --until plan --without smp
--framework pytorch --cuda cu121 --until plan --with rmm-python --without rmm
--framework pytorch --cuda cpu --until plan --with nonsense --with rmm --with gdrcopy \
--without torch --without nothing
--framework keras --cuda cpu
--only pytorch
--only torch
--only tf*
--only cpu
--only 2.4
check --only pytorch-2.4.1
check --only nothing --only nobody
lock --only pytorch-2.4.1
push pytorch-2.4.1 --repository h.example/a
build pytorch-2.4.1-cu121-py311-debian11 --until plan
build pytorch-2.4.1-cu121-py311-debian12 --cuda cpu --until plan
build pytorch-2.4.1-cu121-py311-debian12 --all --until plan
build nothing --until plan
prove nothing --output proof
prove my/train:1 --output proof
--framework pytorch --cuda cuda121
--framework pytorch --cuda 121
--framework pytorch --cuda cu121 --python 311
--framework pytorch --cuda cu121 --base debain12 --until plan
--framework pytorch --cuda cu121 --os debian12
--framework pytorch --cuda cu121 --build-arg X=1
--framework pytorch --cuda cu121 --until plan --with ray,deepspeed
--framework pytorch --cuda cu121,cu124 --until plan
--framework pytorch cu121
--framework pytorch --cuda cu121 --until plan --output out --junit out.xml
lock --requirements requirements.txt
push my/train:1 --repository https://h.example/a
push my/train:1 --repository h.example/a:1
--os pytorch-2.4.1-cu121-py311-debian12 --until plna
""".splitlines()


@pytest.fixture
def refuse(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """Run a command line that fails without an engine; return its exit status and its stderr."""
    # The rows are read once for all of them.
    monkeypatch.setattr("trainworks.facts.load.load", functools.cache(load))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")

    def call(words: str) -> str:
        status = main(words.split(), root)
        output, errors = capsys.readouterr()
        assert output == ""
        return f"$ build.py {words}\n{errors}exit status {status}\n"

    return call


def test_golden_refusals(refuse: Callable[[str], str], golden: Callable[[str, str], None]) -> None:
    golden("cli/refusals.txt", "\n".join(map(refuse, REFUSED)))


def test_programs_get_the_same(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(
        ["--framework", "pytorch", "--cuda", "cu120", "--until", "plan", "--format", "json"], root
    )
    output, errors = capsys.readouterr()
    content = json.loads(output)
    assert content.keys() == {"error", "message", "hint", "exit_status"}
    assert (content["error"], content["exit_status"], status) == ("UnknownNameError", 4, 4)
    assert content["message"] in errors
    assert content["hint"] in errors
