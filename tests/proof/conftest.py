"""A tiny image: a folder with the databases of its packages, asked by the script that is sent into real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from proof.support import Proven
from trainworks.engine.protocol import BuiltImage, EngineInformation
from trainworks.facts.rows import Artifact, Facts, LockedPackage, SourceFile
from trainworks.imagetest import packages
from trainworks.imagetest.questions import command_of
from trainworks.plan.model import Request, Step
from trainworks.plan.resolve import make_plan
from trainworks.proof.components import Contents, contents_of
from trainworks.proof.envelope import PrivateKey
from trainworks.proof.provenance import Checkout, provenance, statement
from trainworks.proof.verify import DOCUMENTS
from trainworks.render.dockerfile import Rendering

from trainworks.proof.cyclonedx import cyclonedx  # isort: skip
from trainworks.proof.spdx import spdx  # isort: skip

STATUS = """\
Package: libssl3
Status: install ok installed
Architecture: amd64
Source: openssl
Version: 3.0.17-1~deb12u2
Description: Secure Sockets Layer toolkit
 Version: of what this line says, no package is

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0

Package: libstdc++6
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Source: gcc-12 (12.2.0-14+deb12u1)
Version: 2:12.2.0-14+deb12u1+b1
"""

COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: OpenSSL
License: not-the-files-own

Files: *
Copyright: 1998 The Project
License: Apache-2.0

Files: one.c
 two.c
Copyright: Somebody
License: GPL-2+ or Artistic
 The text.

Files: debian/*
Copyright: The packager
License: BSD-3-clause

License: MIT
 A text that no file refers to.
"""

METADATA = {
    "torch-2.13.0+cpu": "Name: torch\nVersion: 2.13.0+cpu\nLicense-Expression: BSD-3-Clause AND LicenseRef-Ours\n",
    "Jinja2-3.1.6": "Name: Jinja2\nVersion: 3.1.6\nClassifier: License :: OSI Approved :: BSD License\n",
    "filelock-3.0": "Name: filelock\nVersion: 3.0\nLicense: MIT\n\nLicense: of the description\n",
}


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the image's root folder."""
    root = tmp_path_factory.mktemp("image")
    files = {
        "etc/os-release": 'ID=debian\nVERSION_ID="12"\n',
        "var/lib/dpkg/status": STATUS,
        "usr/share/doc/libssl3/copyright": COPYRIGHT,
        "usr/share/doc/libstdc++6/copyright": "This is the Debian package of GCC. License: prose.\n",
        "usr/lib/python3/dist-packages/distro-1.0.dist-info/METADATA": "Name: distro\nVersion: 1.0\n",
    }
    folder = "opt/venv/lib/python3.11/site-packages"
    files |= {f"{folder}/{name}.dist-info/METADATA": text for name, text in METADATA.items()}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def found(tree: Path) -> packages.Answer:
    """Give what the image says of itself: the packed script as it is started in a container, in a process here."""
    command = command_of({"root": str(tree)}, script="packages.py", interpreter=sys.executable)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    answer: packages.Answer = json.loads(done.stdout.removeprefix(packages.MARKER))
    return answer


@pytest.fixture(scope="session")
def proven(facts: Facts, found: packages.Answer) -> Proven:
    """Give the documents of the tiny image."""
    request = Request(framework="pytorch", cuda="cpu")
    torch = LockedPackage(
        name="torch",
        version="2.13.0+cpu",
        file="torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl",
        sha256="1" * 64,
        size=100,
        requires=("jinja2", "not-installed"),
    )
    # Locked is another version than the image has: its hash says nothing of what is installed.
    filelock = LockedPackage(name="filelock", version="4.0", file="filelock-4.0-py3-none-any.whl", sha256="2" * 64)
    archive = Artifact(
        name="open-mpi", version="4.1.7", source="", url="https://vendor.example/openmpi.tar.bz2", sha256="3" * 64
    )
    repository = Artifact(
        name="gdrcopy", version="2.4", source="", git="https://git.example/gdrcopy", tag="v2.4", commit="4" * 40
    )
    plan = replace(
        make_plan(request, facts),
        image="nvidia/cuda:12.1.1-base@sha256:" + "5" * 64,
        tags=("trainworks/pytorch-training:tiny",),
        steps=(
            Step(component="torch", version="2.13.0", summary="", python=(torch, filelock)),
            Step(component="open-mpi", version="4.1.7", summary="", artifacts=(archive,)),
            Step(component="gdrcopy", version="2.4", summary="", artifacts=(repository,), in_image=False),
        ),
    )
    rendering = Rendering(
        dockerfile="FROM base\n",
        files=(SourceFile(path="launcher/one.py", content=b"pass\n"),),
        stage_components={},
        texts={"torch": "RUN one\n", "open-mpi": "RUN two\n", "gdrcopy": "RUN three\n"},
    )
    image = BuiltImage(
        reference=plan.tags[0], identifier=f"sha256:{'a' * 64}", size=1, labels={}, environment={}, digests=()
    )
    contents = contents_of(
        plan,
        rendering,
        image,
        found,
        base_identifier="sha256:" + "6" * 64,
        launcher_version="0.1.0",
        launcher_license="Apache-2.0",
    )
    predicates = {
        "https://cyclonedx.org/bom": cyclonedx(contents, builder_version="0.1.0", time=0),
        "https://spdx.dev/Document": spdx(contents, builder_version="0.1.0", time=0),
        "https://slsa.dev/provenance/v1": provenance(
            plan,
            request,
            rendering,
            contents,
            checkout=Checkout(commit="7" * 40, changed=True, locks={"images/lock/tiny.toml": "8" * 64}),
            engine=EngineInformation(name="docker", version="20.10", program="/usr/bin/docker"),
            builder="https://ci.example/builder",
            builder_version="0.1.0",
            documents={"sbom.cdx.json": "9" * 64},
        ),
    }
    return Proven(
        contents=contents,
        statements={name: statement(contents, kind, predicates[kind]) for kind, name in DOCUMENTS.items()},
    )


@pytest.fixture(scope="session", params=["Ed25519", "ECDSA P-256"])
def key(request: pytest.FixtureRequest) -> PrivateKey:
    """Give a private key of each kind."""
    if request.param == "Ed25519":
        return ed25519.Ed25519PrivateKey.generate()
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture(scope="session")
def contents(proven: Proven) -> Contents:
    """Give what the bills of materials are made of."""
    return proven.contents
