"""A tiny image and its proof, and the standards' own readers, which accept or
refuse our documents.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2

from image.here import Here
from trainworks.attestation.components import (
    BillOfMaterials,
    LauncherRelease,
    TargetBuild,
    make_target_bill,
)
from trainworks.attestation.prove import PROVENANCE_FILE, make_documents
from trainworks.attestation.provenance import Builder, Checkout, make_provenance
from trainworks.engine.protocol import BuiltImage, EngineInformation
from trainworks.facts.rows import Artifact, Facts, LockedPackage, SourceFile
from trainworks.imagetest import probe_request
from trainworks.imagetest.probe import packages
from trainworks.plan.model import Request, Step
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import Rendering

STATUS = """\
Package: libssl3
Status: install ok installed
Architecture: amd64
Source: openssl
Maintainer: Debian OpenSSL Team <team@example.org>
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

BUILDER = Builder(
    identifier="https://ci.example/builder",
    version="0.1.0",
    engine=EngineInformation(name="docker", version="20.10", program="/usr/bin/docker"),
)

METADATA = {
    "torch-2.13.0+cpu": (
        "Name: torch\nVersion: 2.13.0+cpu\nLicense-Expression: BSD-3-Clause AND LicenseRef-Ours\n"
        "Author: The PyTorch\n        Team\n"
    ),
    "Jinja2-3.1.6": (
        "Name: Jinja2\nVersion: 3.1.6\nClassifier: License :: OSI Approved :: BSD License\n"
    ),
    "filelock-3.0": "Name: filelock\nVersion: 3.0\nLicense: MIT\n\nLicense: of the description\n",
    # A copy inside another package, of another version than the locked one.
    "setuptools/_vendor/Jinja2-3.0.0": "Name: Jinja2\nVersion: 3.0.0\n",
}


@dataclass(frozen=True, kw_only=True)
class Proven:
    """The bill of materials of a tiny image, and the writer of its proof's files."""

    bill: BillOfMaterials
    write: Callable[[], dict[str, str]]

    def texts(self) -> dict[str, str]:
        """Return the files."""
        return self.write()

    def documents(self) -> dict[str, dict[str, Any]]:
        """Return the content of the files, by name."""
        return {name: json.loads(text) for name, text in self.texts().items()}

    def provenance(self) -> dict[str, Any]:
        """Return the predicate of provenance."""
        return self.documents()[PROVENANCE_FILE]


def make_tree(root: Path, added: Mapping[str, str] | None = None) -> Path:
    """Make the root folder of a tiny image: the databases of its packages.

    ``added`` are more of Python; return it.
    """
    files = {
        "etc/os-release": 'ID=debian\nVERSION_ID="12"\n',
        "var/lib/dpkg/status": STATUS,
        "usr/share/doc/libssl3/copyright": COPYRIGHT,
        "usr/share/doc/libstdc++6/copyright": (
            "This is the Debian package of GCC. License: prose.\n"
        ),
        "usr/lib/python3/dist-packages/distro-1.0.dist-info/METADATA": (
            "Name: distro\nVersion: 1.0\n"
        ),
    }
    folder = "opt/venv/lib/python3.11/site-packages"
    files |= {
        f"{folder}/{name}.dist-info/METADATA": text
        for name, text in {**METADATA, **(added or {})}.items()
    }
    sboms = f"{folder}/filelock-3.0.dist-info/sboms"
    files |= {f"{sboms}/filelock.{kind}.json": "{}" for kind in ("cdx", "spdx")}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def ask(tree: Path) -> packages.PackagesAnswer:
    """Return an image's answer about itself: the program as it is started in a container, in a
    process of this machine.
    """
    return probe_request.ask(
        Here(), {"root": str(tree), "packages": True}, interpreter=sys.executable
    )["packages"]


ADDRESS = f"r.example.org/team/image@sha256:{'a' * 64}"
"""Where the tiny image is."""


def tiny_proof(facts: Facts, folder: Path, address: str = ADDRESS) -> Proven:
    """Return the proof of a tiny image, whose root folder is made here.

    ``address`` is where a registry has it.
    """
    return prove(facts, ask(make_tree(folder)), address)


def prove(facts: Facts, packages_answer: packages.PackagesAnswer, address: str = ADDRESS) -> Proven:
    """Return the proof of an image that says this of itself."""
    request = Request(framework="pytorch", cuda="cpu")
    torch = LockedPackage(
        name="torch",
        version="2.13.0+cpu",
        file="torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl",
        sha256="1" * 64,
        size=100,
        requires=("jinja2", "not-installed"),
    )
    # The lock has another version than the image: its hash says nothing about the installed one.
    filelock = LockedPackage(
        name="filelock", version="4.0", file="filelock-4.0-py3-none-any.whl", sha256="2" * 64
    )
    archive = Artifact(
        name="open-mpi",
        version="4.1.7",
        source="",
        url="https://vendor.example/openmpi.tar.bz2",
        sha256="3" * 64,
    )
    repository = Artifact(
        name="gdrcopy",
        version="2.4",
        source="",
        git="https://git.example/gdrcopy",
        tag="v2.4",
        commit="4" * 40,
    )
    plan = replace(
        make_plan(request, facts),
        image="nvidia/cuda:12.1.1-base@sha256:" + "5" * 64,
        tags=("trainworks/pytorch-training:tiny",),
        steps=(
            Step(component="torch", version="2.13.0", summary="", python=(torch, filelock)),
            Step(component="open-mpi", version="4.1.7", summary="", artifacts=(archive,)),
            Step(
                component="gdrcopy",
                version="2.4",
                summary="",
                artifacts=(repository,),
                in_image=False,
            ),
        ),
    )
    rendering = Rendering(
        dockerfile="FROM base\n",
        files=(SourceFile(path="launcher/one.py", content=b"pass\n"),),
        stage_components={},
        texts={"torch": "RUN one\n", "open-mpi": "RUN two\n", "gdrcopy": "RUN three\n"},
    )
    image = BuiltImage(
        reference=plan.tags[0],
        identifier=f"sha256:{'c' * 64}",
        size=1,
        labels={},
        environment={},
        digests=(),
    )
    build = TargetBuild(request=request, plan=plan, rendering=rendering)
    launcher = LauncherRelease(version="0.1.0", license="Apache-2.0")
    base_identifier = "sha256:" + "6" * 64
    bill = make_target_bill(
        build, image, packages_answer, base_identifier=base_identifier, launcher=launcher
    )
    bill = replace(bill, address=address)
    checkout = Checkout(commit="7" * 40, changed=True, files={"images/lock/tiny.toml": "8" * 64})
    return Proven(
        bill=bill,
        write=lambda: make_documents(
            bill,
            lambda run: make_provenance(build, bill, checkout=checkout, run=run),
            builder=BUILDER,
            time=0,
        ),
    )


# The standards' own libraries take two seconds to load: only the tests that ask them wait for that.


def cyclonedx_problems(text: str) -> object:
    """Return the problems that the standard's JSON schema, in its strict form, finds in a document:
    nothing, or an error.
    """
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


def cyclonedx_packages(text: str) -> set[str]:
    """Return the package URLs that CycloneDX's own library reads."""
    from cyclonedx.model.bom import Bom

    # The library builds this method with a class decorator.
    bom = Bom.from_json(json.loads(text))  # type: ignore[attr-defined]
    return {str(component.purl) for component in bom.components}


def read_provenance(predicate: Mapping[str, Any]) -> provenance_pb2.Provenance:
    """Read a predicate with in-toto's own types, which refuse every field that they do not know."""
    return json_format.ParseDict(dict(predicate), provenance_pb2.Provenance())
