"""Test the same requirements at both doors: `extend` locks for an image the packages that a job of
the image installs.

One program does both. This is the one test that looks at whether it is asked in the same way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand
from trainworks.engine.protocol import BuildRequest, Job, Secret
from trainworks.host.settings import read_host_settings

pytestmark = pytest.mark.engine

CORPUS = (
    "datasets==3.2.0",
    "deepspeed",
    "mlflow<3",
    "numpy<2 pandas scikit-learn",
    "transformers==4.48.0 accelerate==1.2.1 tokenizers==0.21.0 numpy==1.26.4",
    "lightning hydra-core omegaconf",
    "evaluate sacrebleu nltk rouge-score jsonlines",
    "torch==2.4.1 sympy==1.13.1 nvidia-cublas-cu12==12.4.5.8 triton==3.0.0 einops pywin32==306",
    "torch==2.4.1 torchmetrics torch-geometric",
    "awscli==1.36.0 wandb==0.18.0",
)
"""From the top of the download lists, from public training projects, and from
`pip freeze` of another image.
"""

JOB = """\
FROM {base}
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem --mount=type=secret,id=netrc \\
    --mount=type=bind,source=requirements.txt,target=/run/requirements.txt \\
    export PIP_CONFIG_FILE=/run/secrets/pip.conf NETRC=/run/secrets/netrc; \\
    if [ -s /run/secrets/ca.pem ]; then export PIP_CERT=/run/secrets/ca.pem; fi; \\
    cd /run && python -I /opt/trainworks/lib/trainworks_launcher/programs/install.py \\
        -- -r requirements.txt
"""
LISTING = (
    "import json; from importlib import metadata;"
    " print(json.dumps({each.metadata['Name'].lower().replace('_', '-').replace('.', '-'):"
    " each.version for each in metadata.distributions()}))"
)


@pytest.mark.parametrize("line", CORPUS)
def test_extend_and_a_job_install_alike(
    docker_image: BuiltByCommand, tmp_path: Path, line: str
) -> None:
    (tmp_path / "requirements.txt").write_text("".join(f"{word}\n" for word in line.split()))
    (tmp_path / "Dockerfile").write_text(JOB.format(base=docker_image.reference))
    settings = read_host_settings(os.environ)
    tag = f"trainworks-test/doors:{uuid.uuid4().hex[:12]}"
    request = BuildRequest(
        name="a job",
        context=tmp_path,
        tags=(tag,),
        secrets=tuple(
            Secret(identifier=name, content=text) for name, text in settings.secrets("", "").items()
        ),
        arguments=settings.proxies,
    )
    docker_image.engine.build(request, lambda _event: None)
    try:
        before, after = (
            json.loads(
                docker_image.engine.run(
                    image, Job(command=("python", "-c", LISTING), timeout=120)
                ).output.splitlines()[-1]
            )
            for image in (docker_image.reference, tag)
        )
    finally:
        docker_image.engine.remove(tag)
    words = (
        "--base",
        docker_image.reference,
        "--tag",
        tag,
        "--requirements",
        "requirements.txt",
        "--format",
        "json",
    )
    done = subprocess.run(
        (
            sys.executable,
            str(ROOT / "build.py"),
            "extend",
            *words,
            "--root",
            str(ROOT),
            "--until",
            "render",
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    locked = dict(
        requirement.split("==") for requirement in json.loads(done.stdout)["requirements"]
    )
    assert locked == {
        name: version for name, version in after.items() if before.get(name) != version
    }
