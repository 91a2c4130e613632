"""The same requirements at both doors: what `extend` resolves for an image is what pip resolves in it, for a job.

pip has the launcher's constraints. What of the image would lose its requirements by that is the business of other tests
(`tests/launcher/test_launcher_requirements.py`, `test_extension.py`): no line here takes anything from it.
"""

from __future__ import annotations

import json
import os
import shlex
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand
from trainworks.engine.protocol import BuildRequest, Secret
from trainworks.extend.base import find_base
from trainworks.extend.requirements import ExtendedBase, Wheel
from trainworks.extend.resolving.releases import Archive, Resolvable
from trainworks.extend.resolving.search import resolve
from trainworks.facts.load import load
from trainworks.host.settings import read_host_settings

pytestmark = pytest.mark.engine

CORPUS = (
    "requests==2.32.3 tqdm==4.66.3 pyyaml==6.0.2 packaging==24.2 boto3==1.35.0",
    "datasets==3.2.0",
    "datasets transformers==4.57.6",
    "deepspeed",
    "langdetect zstandard==0.15.2",
    "mlflow<3",
    "numpy<2 pandas scikit-learn",
    "transformers==4.48.0 accelerate==1.2.1 tokenizers==0.21.0 numpy==1.26.4",
    "wandb",
    "accelerate peft safetensors sentencepiece trl",
    "diffusers timm torchmetrics sentence-transformers",
    "lightning hydra-core omegaconf",
    "pytorch-lightning==2.4.0 einops",
    "evaluate sacrebleu nltk rouge-score jsonlines",
    "spacy tiktoken orjson",
    "opencv-python-headless albumentations scikit-image imageio",
    "xgboost lightgbm optuna",
    "matplotlib seaborn plotly",
    "pyarrow polars duckdb fastparquet",
    "h5py numba librosa soundfile",
    "torch-geometric networkx statsmodels",
    "bitsandbytes huggingface-hub",
    "ray openai",
)
"""Sixty packages, from the top of the download lists and from public training projects; some of 2024."""

DOCKERFILE = """\
FROM {base} AS asked
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem --mount=type=secret,id=netrc \\
    export PIP_CONFIG_FILE=/run/secrets/pip.conf NETRC=/run/secrets/netrc; \\
    if [ -s /run/secrets/ca.pem ]; then export PIP_CERT=/run/secrets/ca.pem; fi; \\
    mkdir /answers && printf '%s\\n' {kept} > /run/kept.txt{asking}
"""
ASKING = """ \\
    && {{ python -m pip install --quiet --dry-run --constraint /run/kept.txt --report /answers/{number} {words} \\
    || exit 1; }}"""


def by_pip(image: BuiltByCommand, base: ExtendedBase, folder: Path) -> list[dict[str, tuple[str, list[str]]]]:
    """Return what pip would install in the image for each line: name to version, and to what that requires."""
    kept = " ".join(shlex.quote(f"{name}=={version}") for name, version in base.kept.items())
    asking = "".join(
        ASKING.format(number=number, words=" ".join(map(shlex.quote, text.split())))
        for number, text in enumerate(CORPUS)
    )
    (folder / "Dockerfile").write_text(DOCKERFILE.format(base=image.reference, kept=kept, asking=asking))
    settings = read_host_settings(os.environ)
    tag = f"trainworks-test/doors:{uuid.uuid4().hex[:12]}"
    secrets = settings.secrets("", "")
    request = BuildRequest(
        name="both doors",
        context=folder,
        tags=(tag,),
        secrets=tuple(Secret(identifier=name, content=content) for name, content in secrets.items()),
        arguments=settings.proxies,
    )
    image.engine.build(request, lambda _event: None)
    program = (
        "import json, pathlib; rows = {int(path.name): {each['metadata']['name'].lower().replace('_', '-')"
        ".replace('.', '-'): (each['metadata']['version'], each['metadata'].get('requires_dist', [])) "
        "for each in json.loads(path.read_text())['install']} "
        "for path in pathlib.Path('/answers').iterdir()}; print(json.dumps([rows[key] for key in sorted(rows)]))"
    )
    try:
        answer = image.engine.run(tag, ("python", "-c", program), timeout=120)
    finally:
        image.engine.remove(tag)
    found: list[dict[str, tuple[str, list[str]]]] = json.loads(answer.output.splitlines()[-1])
    return found


def test_extend_and_a_job_resolve_alike(docker_image: BuiltByCommand, tmp_path: Path) -> None:
    _, base = find_base(docker_image.reference, docker_image.engine, load(ROOT))
    settings = read_host_settings(os.environ)

    theirs = by_pip(docker_image, base, tmp_path)
    known = {(name, version): requires for found in theirs for name, (version, requires) in found.items()}

    def build(archives: Sequence[Archive]) -> Sequence[Wheel]:
        """Give wheels that require what pip found in the same archives."""
        return [
            Wheel(
                file=f"{each.name.replace('-', '_')}-{each.version}-py3-none-any.whl",
                content=b"",
                requires=tuple(known[each.name, each.version]),
                built=True,
            )
            for each in archives
        ]

    ours = []
    for text in CORPUS:
        wanted = Resolvable(lines=tuple(text.split()))
        releases = resolve(wanted, base, settings, os.environ, where=text, build=build).releases
        ours.append({each.name: each.version for each in releases})
    assert ours == [{name: version for name, (version, _) in found.items()} for found in theirs]
