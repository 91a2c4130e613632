"""Public Dockerfiles on our image, by their own apt and pip lines: none
replaces torch without a word.

The lines are those of November 2026; clones and copies of code are left out. pip and uv resolve for
real, with this machine's package index: its state of today decides which fit, and torch stays in
any case.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand
from trainworks.engine.protocol import BuildRequest, Job, Secret
from trainworks.host.settings import HostSettings, read_host_settings

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Public:
    """Installations of a Dockerfile: Debian packages, and words of pip.

    ``wants``: another torch, by the words' own.
    """

    pip: str
    apt: str = ""
    wants: str = ""


TORCHX = (
    "aiobotocore ax-platform[mysql]==0.2.3 black==23.3.0 boto3 captum>=0.4.0 flake8==3.9.0"
    " fsspec[s3]==2023.1.0 google-api-core google-cloud-batch>=0.5.0 google-cloud-logging>=3.0.0"
    " google-cloud-runtimeconfig>=0.33.2 hydra-core ipython kfp==1.8.22 mlflow-skinny moto==4.1.6"
    " protobuf==3.20.3 pyre-extensions pyre-check pytest pytorch-lightning==1.5.10"
    " torch-model-archiver>=0.4.2 torch>=1.10.0 torchmetrics<0.11.0 torchserve>=0.4.2"
    " torchtext>=0.11.0 torchvision>=0.11.1 ts==0.5.1 usort==1.0.2 ray[default]"
)
FARM = (
    "setuptools wheel torch>=1.4.0 tqdm boto3 requests scipy>=1.3.2 sklearn seqeval mlflow==1.0.0"
    " transformers==2.7.0 dotmap==1.3.0 Werkzeug==0.16.1 flask flask-restplus flask-cors dill"
)
YOLO = (
    "gitpython>=3.1.30 matplotlib>=3.3 numpy>=1.23.5 opencv-python>=4.1.1 pillow>=10.3.0 psutil"
    " PyYAML>=5.3.1 requests>=2.32.2 scipy>=1.4.1 thop>=0.1.1 torch>=1.8.0 torchvision>=0.9.0"
    " tqdm>=4.66.3 ultralytics>=8.2.64 pandas>=1.1.4 seaborn>=0.11.0 packaging setuptools>=70.0.0"
    " albumentations wandb gsutil notebook Pillow>=9.1.0"
)
F5 = (
    "wget curl man git less openssl libssl-dev unzip unar build-essential aria2 tmux vim"
    " openssh-server sox libsox-fmt-all libsox-fmt-mp3 libsndfile1-dev ffmpeg librdmacm1 libibumad3"
    " librdmacm-dev libibverbs1 libibverbs-dev ibverbs-utils ibverbs-providers"
)
RLHF = (
    "accelerate aiohttp bitsandbytes datasets einops flash-attn==2.8.3"
    " grpcio>=1.74.0 isort jsonlines optimum optree>=0.13.0 packaging"
    " pynvml>=12.0.0 ray[default]==2.48.0 tensorboard torch torchdata torchmetrics"
    " tqdm transformers==4.57.3 transformers_stream_generator wandb wheel"
)
NANOVLM = (
    "torch numpy torchvision pillow datasets huggingface-hub transformers wandb einops accelerate"
    " loguru lmms_eval sagemaker-mlflow"
)
VJEPA = (
    "torch>=2 torchvision tensorboard wandb iopath pyyaml numpy opencv-python submitit braceexpand"
    " webdataset timm transformers peft decord2 pandas einops beartype psutil h5py fire python-box"
    " scikit-image ftfy jupyter"
)
BEND = (
    "biopython>=1.81 pandas>=2.0.2 scikit-learn>=1.2.2 torch>=2.0.1"
    " tqdm>=4.65.0 transformers>=4.30.1 hydra-core>=1.3.1"
    " wandb==0.13.5 einops torchvision hydra-joblib-launcher webdataset"
)
OPENEXR = (
    "build-essential git python3-dev python3-pip libopenexr-dev libxi-dev libglfw3-dev libglew-dev"
    " libomp-dev libxinerama-dev libxcursor-dev gdb gosu sudo tzdata"
)
OF_EFA = (
    "apt-utils autoconf automake build-essential cmake curl gcc gdb git kmod libtool openssh-client"
    " openssh-server vim"
)
DOCKERFILES = {
    "OpenRLHF": Public("vllm==0.15.1", OPENEXR, "2.9"),
    "OpenRLHF requirements": Public(RLHF),
    "torchx": Public(TORCHX),
    "stylegan3": Public("imageio-ffmpeg==0.4.4 pyspng==0.1.0"),
    "yolov5": Public(YOLO, "zip htop screen libgl1-mesa-glx"),
    "F5-TTS": Public("vocos transformers torchdiffeq x_transformers pydub soundfile", F5),
    "dlrm": Public("future numpy onnx pydot torch torchviz scikit-learn tqdm"),
    "FARM": Public(FARM, "python3-pip git"),
    "MONAI": Public("itk nibabel tensorboard openslide-python monai", "libopenslide0"),
    "trl": Public("trl[liger,peft,vlm] hf_transfer trackio kernels"),
    "LLaMA-Factory base": Public(
        "--upgrade pip packaging wheel setuptools", "systemd wget git vim gcc g++ libibverbs-dev"
    ),
    "LLaMA-Factory": Public("--upgrade pip packaging wheel setuptools editables hatchling>=1.18.0"),
    "BERT": Public(
        "tqdm boto3 requests six ipdb h5py html2text nltk progressbar", "pbzip2 pv bzip2 cabextract"
    ),
    "nnU-Net": Public(
        "nibabel==3.2.1 joblib==1.0.1 pytorch-lightning==1.3.8 scikit-learn==1.0"
        " scikit-image==0.18.3 pynvml==11.0.0"
    ),
    "TFT": Public("pandas==1.3.4 pynvml==11.0.0"),
    "koyeb-fun-training": Public(
        "torch>=2.2.0 transformers==4.40.0 datasets accelerate huggingface_hub", "git"
    ),
    "therabot-training": Public(
        "bitsandbytes peft accelerate datasets trl safetensors wandb tokenizers transformers"
    ),
    "Depth-Anything": Public("torch torchvision opencv-python"),
    "torchtune of Kubeflow": Public(
        "torchao==0.15.0 torchtune==0.6.1 bitsandbytes>=0.50.0 kagglehub<2.0.0"
    ),
    "picotron": Public("torch==2.1.0", "software-properties-common", "2.1.0"),
    "nanoVLM": Public(NANOVLM, "nvtop"),
    "grpo": Public(
        "torch==2.6.0 transformers datasets accelerate peft deepspeed wandb math_verify",
        "",
        "2.6.0",
    ),
    "ColossalAI": Public(
        "awscli pynvml numpy<2.0 transformers==4.52.4 math-verify==0.7.0 tqdm",
        "libaio-dev libhwloc-dev",
    ),
    "DeepSpeed": Public(
        "transformers==4.44.2 sentencepiece python-etcd deepspeed accelerate",
        f"{OF_EFA} libhwloc-dev",
    ),
    "ddp": Public("mlflow==2.13.2 sagemaker-mlflow==0.1.0"),
    "FSDP": Public(
        "datasets torch==2.7.0 torchaudio==2.7.0 torchvision==0.22.0 transformers==4.53.0",
        "nvtop",
        "2.7.0",
    ),
    "V-JEPA 2": Public(VJEPA, "libnccl-dev"),
    "BEND": Public(BEND),
}
NOT_THERE = {"libnccl-dev", "nvtop"}
"""Words of docs/extend.md: the advice for these."""

TRY = """
import concurrent.futures, json, subprocess, sys

rows = json.load(open("/asked.json"))

def tried(name, tool):
    words = {
        "uv": ("uv", "pip", "install", "--dry-run", "--output-format", "json"),
        "pip": ("pip", "install", "--dry-run", "--quiet", "--report", "-"),
    }[tool]
    try:
        done = subprocess.run(
            (*words, *rows[name].split()), capture_output=True, text=True, timeout=600
        )
    except subprocess.TimeoutExpired:
        return [name, tool, 124, {}, "a build of theirs does not end"]
    changes = {}
    if done.returncode == 0 and tool == "uv":
        changes = {
            each["name"]: each.get("version", "") for each in json.loads(done.stdout)["changes"]
        }
    elif done.returncode == 0:
        changes = {
            each["metadata"]["name"].lower(): each["metadata"]["version"]
            for each in json.loads(done.stdout)["install"]
        }
    return [name, tool, done.returncode, changes, done.stderr[-3000:]]

with concurrent.futures.ThreadPoolExecutor(4) as pool:
    jobs = [pool.submit(tried, name, tool) for name in rows for tool in json.loads(sys.argv[1])]
    print(json.dumps([job.result() for job in jobs]))
"""


def inside(
    image: BuiltByCommand, folder: Path, settings: HostSettings, *words: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in the image with this machine's settings for packages, in
    the places of a build.
    """
    secrets = folder / "secrets"
    secrets.mkdir(exist_ok=True)
    for name, text in {**settings.secrets("bookworm", "")}.items():
        (secrets / name).write_bytes(text)
    uv = 'index-strategy = "unsafe-best-match"\n'
    (secrets / "uv.toml").write_text((secrets / "uv.toml").read_text() or uv)
    variables = {
        "PIP_CONFIG_FILE": "/run/secrets/pip.conf",
        "NETRC": "/run/secrets/netrc",
        "APT_CONFIG": "/run/secrets/apt.conf",
        **settings.proxies,
    }
    if settings.ca:
        variables |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), "/run/secrets/ca.pem")
    named = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    mounts = (
        "--volume",
        f"{secrets}:/run/secrets:ro",
        "--volume",
        f"{folder}/asked.json:/asked.json:ro",
    )
    return subprocess.run(
        (
            "docker",
            "run",
            "--rm",
            "--network",
            settings.network.replace("default", "bridge"),
            *mounts,
            *named,
            image.reference,
            *words,
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
    )


def test_no_public_dockerfile_replaces_torch_in_silence(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    """uv for all Dockerfiles.

    Pip for those that plain pip once let replace it, and for some that fit.
    """
    settings = read_host_settings(os.environ)
    outcomes = []
    by_pip = ("picotron", "grpo", "FSDP", "koyeb-fun-training", "therabot-training", "ddp", "dlrm")
    for names, tool in ((DOCKERFILES, "uv"), (by_pip, "pip")):
        (tmp_path / "asked.json").write_text(
            json.dumps({name: DOCKERFILES[name].pip for name in names})
        )
        done = inside(docker_image, tmp_path, settings, "python", "-c", TRY, json.dumps([tool]))
        assert done.returncode == 0, done.stderr[-3000:]
        outcomes += json.loads(done.stdout.splitlines()[-1])
    fits = {name for name, _, status, changes, _ in outcomes if status == 0}
    assert [row[:2] for row in outcomes if "torch" in row[3]] == []
    for name, tool, status, _, output in outcomes:
        if DOCKERFILES[name].wants and status != 124:
            assert status != 0, (name, tool)
            assert "torch" in output, (name, tool, output)
    # The other failures come from releases that are not there for this Python, or that nvcc
    # compiles.
    others = {
        name: output[-300:] for name, _, status, _, output in outcomes if status not in (0, 124)
    }
    assert {
        "koyeb-fun-training",
        "therabot-training",
        "ddp",
        "dlrm",
        "LLaMA-Factory",
    } <= fits, others
    assert len(fits) >= 14, others


def test_their_debian_packages_are_there_or_the_page_says_what_instead(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    (tmp_path / "asked.json").write_text("{}")
    names = {name for dockerfile in DOCKERFILES.values() for name in dockerfile.apt.split()}
    command = (
        'apt-get update >&2 && apt-get install -s -y "$@" > /dev/null;'
        ' shift 2; apt-get install -s -y "$@" >&2'
    )
    available = sorted(names - NOT_THERE)
    assert len(NOT_THERE) == 2
    done = inside(
        docker_image,
        tmp_path,
        read_host_settings(os.environ),
        "sh",
        "-c",
        command,
        "sh",
        *NOT_THERE,
        *available,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(re.findall(r"Unable to locate package (\S+)", done.stderr)) == NOT_THERE
    page = (ROOT / "docs/extend.md").read_text()
    assert [name for name in NOT_THERE if f"apt-get install {name}" not in page] == []


BUILD = """\
FROM {base}
RUN --mount=type=secret,id=apt.conf --mount=type=secret,id=sources.list \\
    --mount=type=secret,id=ca.pem {apt}
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem --mount=type=secret,id=netrc \\
    export PIP_CONFIG_FILE=/run/secrets/pip.conf NETRC=/run/secrets/netrc; \\
    if [ -s /run/secrets/ca.pem ]; then export PIP_CERT=/run/secrets/ca.pem; fi; \\
    pip install --no-cache-dir {pip}
COPY train.py /opt/ml/code/
ENV SAGEMAKER_PROGRAM=train.py
"""


@pytest.mark.parametrize(
    ("name", "module"),
    [("koyeb-fun-training", "transformers"), ("BERT", "nltk"), ("dlrm", "torchviz")],
)
def test_three_are_built_to_their_end_and_train(
    docker_image: BuiltByCommand, tmp_path: Path, name: str, module: str
) -> None:
    row, settings = DOCKERFILES[name], read_host_settings(os.environ)
    quoted = " ".join(f"'{word}'" for word in row.pip.split())
    apt = (
        "APT_CONFIG=/run/secrets/apt.conf; export APT_CONFIG;"
        f" apt-get update && apt-get install -y {row.apt}"
    )
    apt_step = apt if row.apt else "true"
    text = BUILD.format(base=docker_image.reference, apt=apt_step, pip=quoted)
    (tmp_path / "Dockerfile").write_text(text)
    (tmp_path / "train.py").write_text(
        f"import torch, {module}\nprint('TRAINED with', torch.__version__)\n"
    )
    tag = f"trainworks-test/public:{uuid.uuid4().hex[:12]}"
    secrets = settings.secrets("bookworm", "")
    request = BuildRequest(
        name=name,
        context=tmp_path,
        tags=(tag,),
        secrets=tuple(
            Secret(identifier=secret, content=content) for secret, content in secrets.items()
        ),
        arguments=settings.proxies,
    )
    docker_image.engine.build(request, lambda _event: None)
    try:
        done = subprocess.run(
            ("docker", "run", "--rm", "--network", "none", tag, "train"),
            capture_output=True,
            text=True,
            check=False,
        )
        own = docker_image.engine.run(
            docker_image.reference,
            Job(command=("python", "-c", "import torch; print(torch.__version__)"), timeout=120),
        )
    finally:
        docker_image.engine.remove(tag)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"TRAINED with {own.output.splitlines()[-1]}" in done.stdout
