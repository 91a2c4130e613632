"""Facts about instance types, smp's second version and the newest image, which preflight cannot
inspect. Pure.

The rows are the builder's (images/instances.toml, families.toml), the texts about smp are those of
the library, the newest image is that of its plan: ``tools/generate.py`` writes them to facts.json
beside this file. A job in an image uses the image's own manifest instead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import Mapping, NamedTuple

from trainworks_launcher.contract.json_values import decode, mapping, text, texts
from trainworks_launcher.environment.manifest import (
    AMD64,
    Instance,
    Manifest,
    parse_manifest,
    read_instance,
)

GENERIC = Manifest()
"""An image without a manifest."""

FILE = "facts.json"
"""Name of the data file, beside this one."""


@dataclass(frozen=True)
class InstanceFacts:
    """One instance type.

    Attributes:
        instance: The fields that an image's manifest has, too.
        architecture: ``amd64`` or ``arm64``, of its processors.
        smp_loader_workers: Data loaders may have worker processes under smp.
        smddp: The SDK lists the type for smdistributed.dataparallel.
        torchrun_only: The SDK refuses smdistributed without torch_distributed on it.
    """

    instance: Instance
    architecture: str = AMD64
    smp_loader_workers: bool = True
    smddp: bool = False
    torchrun_only: bool = False


class SecondVersion(NamedTuple):
    """smp's second version, which this project's images do not have.

    Attributes:
        module: The module that its scripts import.
        what: What it is, as the library's error says.
        instead: What to write instead, and the page that has it.
    """

    module: str
    what: str
    instead: str


@dataclass(frozen=True)
class Facts:
    """The builder's facts that preflight needs.

    Attributes:
        instances: Instance type -> row.
        second_version: smp's second version.
        families: Prefixes of types without accelerators (``ml.m5``).
        image: This project's newest image, assumed for a job without a manifest.
    """

    instances: Mapping[str, InstanceFacts]
    second_version: SecondVersion
    families: tuple[str, ...] = ()
    image: Manifest = GENERIC

    def find(self, instance_type: str) -> InstanceFacts | None:
        """Return the row of a type; None if it is not known.

        A type of a family without accelerators has a row of zeros.
        """
        if instance_type.rpartition(".")[0] in self.families:
            return InstanceFacts(Instance())
        return self.instances.get(instance_type)


def parse_facts(document: str) -> Facts:
    """Parse the data file.

    Raises:
        ValueError: The file is not JSON. It is ours, so that is a defect.
    """
    content = mapping(decode(document))
    instances: dict[str, InstanceFacts] = {}
    for name, value in mapping(content.get("instances")).items():
        row = mapping(value)
        instances[name] = InstanceFacts(
            read_instance(row),
            architecture=text(row.get("architecture"), AMD64),
            smp_loader_workers=row.get("smp_loader_workers") is not False,
            smddp=row.get("smddp") is True,
            torchrun_only=row.get("smdistributed_by_torchrun_only") is True,
        )
    image = mapping(content.get("image"))
    second = mapping(content.get("second_version_of_smp"))
    return Facts(
        instances=MappingProxyType(instances),
        second_version=SecondVersion(
            text(second.get("module")), text(second.get("what")), text(second.get("instead"))
        ),
        families=texts(content.get("families")),
        image=parse_manifest(json.dumps(image), "facts.json") if image else GENERIC,
    )
