"""Parses the image manifest: the image's components, programs and instance types. Pure.

The builder writes the manifest into the image, as /opt/trainworks/image.json; ``environment.py``
reads the file. All versions, instance types and program paths that the launcher knows come from the
manifest. An image without a manifest has the generic one, with programs from PATH.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.json_values import Json, decode, mapping, number, text, texts

AMD64 = "amd64"
"""The architecture of images and instance types that name none."""

_FRAMEWORK_COMPONENTS: Mapping[str, str] = MappingProxyType({"pytorch": "torch"})
"""Name of a framework in the builder's targets -> name of its component, where the two differ."""


class Instance(NamedTuple):
    """A row of the instance table: the devices of one host. A count of 0 may mean "not known".

    Attributes:
        gpus: Number of GPUs.
        neuron_cores: Number of Neuron cores.
        efa: Whether the type has EFA.
        efa_rdma: Whether its EFA devices read the memory of other hosts (RDMA read).
        efa_devices: Number of EFA devices.
        network_gigabits: Bandwidth of the network in Gbit/s, each way.
    """

    gpus: int = 0
    neuron_cores: int = 0
    efa: bool = False
    efa_rdma: bool = False
    efa_devices: int = 0
    network_gigabits: int = 0


class FabricVariable(NamedTuple):
    """A variable that processes need on a host with EFA.

    Attributes:
        name: Name of the variable, for example ``FI_PROVIDER``.
        value: Its value.
        rdma: Whether only hosts with RDMA read need the variable.
        why: The reason.
    """

    name: str
    value: str
    rdma: bool
    why: str


GENERIC_FABRIC = (
    FabricVariable("FI_PROVIDER", "efa", False, "libfabric uses EFA, not its TCP provider"),
    FabricVariable(
        "FI_EFA_USE_DEVICE_RDMA", "1", True, "device memory of another host is read directly"
    ),
    FabricVariable(
        "RDMAV_FORK_SAFE",
        "1",
        False,
        "data loaders fork; without it a fork may corrupt registered memory",
    ),
)
"""Variables for an image that does not list its own: every version of libfabric accepts them.

Source: SageMaker developer guide, custom_mpi_options on EFA instances.
"""


class Missing(NamedTuple):
    """A component that this image was built without.

    Attributes:
        component: Name of the component.
        cost: The disadvantage for the user, in words.
    """

    component: str
    cost: str


class Manifest(NamedTuple):
    """The parts of the manifest that decide how a job is started.

    Attributes:
        name: Name of the image.
        architecture: ``amd64`` or ``arm64``, the CPU of the image's programs; ``amd64`` for a
            manifest of an older builder, which does not name it.
        framework: Component of the image's framework (``torch``); ``""`` if the manifest names
            none.
        components: Component -> version.
        missing: Components that the image was built without.
        instances: Instance type -> devices of its hosts.
        families: Prefixes of instance types without accelerators (``ml.m5``); may be empty.
        programs: Program -> absolute path.
        fabric: Variables that hosts with EFA need, for this image's versions.
        hostname_shim: Path of the shared library that replaces gethostname(); ``""`` for none.
        protected: Python distribution that a job's requirements must not
            replace -> version; may be empty.
        minimum_driver: Oldest NVIDIA driver that runs the image's CUDA, for example ``525.60.13``;
            ``""`` for an image without CUDA, or if the manifest does not name one.
        document: Text of the manifest; ``""`` for the generic one.
    """

    name: str = "generic"
    architecture: str = AMD64
    framework: str = ""
    components: Mapping[str, str] = MappingProxyType({})
    missing: tuple[Missing, ...] = ()
    instances: Mapping[str, Instance] = MappingProxyType({})
    families: tuple[str, ...] = ()
    programs: Mapping[str, str] = MappingProxyType({})
    fabric: tuple[FabricVariable, ...] = GENERIC_FABRIC
    hostname_shim: str = ""
    protected: Mapping[str, str] = MappingProxyType({})
    minimum_driver: str = ""
    document: str = ""

    def lacks(self, instance_type: str) -> bool:
        """Return whether a type of SageMaker (``ml.FAMILY.SIZE``) is missing in the table.

        False for a manifest of an older builder: without families its table is incomplete.
        """
        if not self.families or not instance_type.startswith(names.PLATFORM_TYPES):
            return False
        family, _, _ = instance_type.rpartition(".")
        return instance_type not in self.instances and family not in self.families


def parse_manifest(document: str, where: str) -> Manifest:
    """Parse a manifest. Unknown keys are ignored, so that a newer builder can add to the schema.

    Args:
        document: Text of the manifest.
        where: Path of the manifest, for messages.

    Raises:
        RefusalError: The text is not JSON, not an object, or of another schema number.
    """
    try:
        content = decode(document)
    except ValueError as error:
        advice = "rebuild the image, or unset the variable"
        problem = Problem(f"the image manifest is not JSON: {error}", where, advice)
        raise RefusalError([problem]) from error
    if not isinstance(content, dict):
        problem = Problem("the image manifest is not a JSON object", where, "rebuild the image")
        raise RefusalError([problem])
    if content.get("schema") != names.IMAGE_MANIFEST_SCHEMA:
        mistake = (
            f"the image manifest has schema {content.get('schema')!r},"
            f" this launcher reads schema {names.IMAGE_MANIFEST_SCHEMA}"
        )
        advice = "builder and launcher in the image are of different releases; rebuild the image"
        raise RefusalError([Problem(mistake, where, advice)])

    target = mapping(content.get("target"))
    framework = text(target.get("framework"))
    versions = {}
    for name, component in mapping(content.get("components")).items():
        versions[name] = text(mapping(component).get("version"))
    missing = []
    missing_rows = content.get("missing")
    if isinstance(missing_rows, list):
        for entry in missing_rows:
            row = mapping(entry)
            missing.append(Missing(text(row.get("component")), text(row.get("cost"))))
    instances = {}
    for name, instance in mapping(content.get("instances")).items():
        instances[name] = read_instance(mapping(instance))
    fabric: tuple[FabricVariable, ...] = GENERIC_FABRIC
    fabric_rows = content.get("fabric")
    if isinstance(fabric_rows, list):
        fabric = tuple(map(_fabric_variable, fabric_rows))
    return Manifest(
        name=text(content.get("name"), "unnamed"),
        architecture=text(target.get("architecture"), AMD64),
        framework=_FRAMEWORK_COMPONENTS.get(framework, framework),
        components=MappingProxyType(versions),
        missing=tuple(missing),
        instances=MappingProxyType(instances),
        families=texts(content.get("families")),
        programs=_texts_by_name(content.get("programs")),
        fabric=fabric,
        hostname_shim=text(content.get("hostname_shim")),
        protected=_texts_by_name(content.get("protected")),
        minimum_driver=text(content.get("minimum_driver")),
        document=document,
    )


def read_instance(row: Mapping[str, Json]) -> Instance:
    """Return a row of an instance table; a field that the row does not have is 0 or False."""
    return Instance(
        gpus=number(row.get("gpus")),
        neuron_cores=number(row.get("neuron_cores")),
        efa=row.get("efa") is True,
        efa_rdma=row.get("efa_rdma") is True,
        efa_devices=number(row.get("efa_devices")),
        network_gigabits=number(row.get("network_gigabits")),
    )


def _texts_by_name(value: Json) -> Mapping[str, str]:
    """Return the members of an object that are texts."""
    members = mapping(value)
    texts_by_name = {name: entry for name, entry in members.items() if isinstance(entry, str)}
    return MappingProxyType(texts_by_name)


def _fabric_variable(value: Json) -> FabricVariable:
    """Return a row of ``fabric``; a field that the row does not have is "" or False."""
    row = mapping(value)
    return FabricVariable(
        text(row.get("name")), text(row.get("value")), row.get("rdma") is True, text(row.get("why"))
    )
