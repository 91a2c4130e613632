"""The image manifest: what the image consists of, as the builder wrote it down.

Pure: text in, a frozen value out. ``environment`` does the reading. The launcher itself has no
version, no instance
type and no program path: they all come from the manifest. In an image without a manifest, the
generic one is used, and programs are looked up on PATH.
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
"""Framework as the builder's targets name it -> the component that is it, where
the two names differ.
"""


class Instance(NamedTuple):
    """What the instance table says of one instance type, per host.

    A count of 0 may mean that it is not known.

    ``network_gigabits`` is what its network carries in a second, each way.
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
        name: Its name.
        value: Its value.
        rdma: Only where the host's devices read remote memory.
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
"""For an image that does not say what its versions need: what every version takes, needed or not.

Source: SageMaker developer guide, custom_mpi_options on EFA instances.
"""


class Missing(NamedTuple):
    """A component that this image was built without, and what that costs its user, in words."""

    component: str
    cost: str


class Manifest(NamedTuple):
    """The parts of the manifest that decide how a job is started.

    Attributes:
        name: Name of the image.
        architecture: ``amd64`` or ``arm64``: what its programs run on; older
            images, which do not say it, are amd64.
        framework: Component that the image is made for (``torch``); ``""`` if not given.
        components: Component -> version.
        missing: Components that the image was built without.
        instances: Instance type -> what its hosts have.
        families: Prefixes of instance types without accelerators (``ml.m5``); empty if not given.
        programs: Program -> absolute path.
        fabric: Variables that hosts with EFA need, for this image's versions.
        hostname_shim: Path of the shared library; ``""`` for none.
        protected: Python distribution that a job's requirements must not
            replace -> version; empty if not given.
        minimum_driver: Oldest NVIDIA driver that runs the image's CUDA; ``""``
            if it has none, or does not say.
        document: The manifest's own text, which names every part of the image;
            ``""`` for the generic one.
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
        """Return whether the table has all types of the platform, and not this one.

        It is False for an older image's table.
        """
        return (
            bool(self.families)
            and instance_type.startswith(names.PLATFORM_TYPES)
            and instance_type not in self.instances
            and instance_type.rpartition(".")[0] not in self.families
        )


def parse_manifest(document: str, where: str) -> Manifest:
    """Read a manifest; unknown keys are ignored so that a newer builder can add to the schema.

    Raises RefusalError when the text is not JSON, not an object, or of another schema number.
    """
    try:
        content = decode(document)
    except ValueError as error:
        advice = "rebuild the image, or unset the variable"
        problem = Problem(f"the image manifest is not JSON: {error}", where, advice)
        raise RefusalError([problem]) from error
    if not isinstance(content, dict):
        raise RefusalError(
            [Problem("the image manifest is not a JSON object", where, "rebuild the image")]
        )
    if content.get("schema") != names.IMAGE_MANIFEST_SCHEMA:
        what = (
            f"the image manifest has schema {content.get('schema')!r},"
            f" this launcher reads schema {names.IMAGE_MANIFEST_SCHEMA}"
        )
        advice = "builder and launcher in the image are of different releases; rebuild the image"
        raise RefusalError([Problem(what, where, advice)])
    components = mapping(content.get("components"))
    target = mapping(content.get("target"))
    framework = text(target.get("framework"))
    versions = {name: text(mapping(row).get("version")) for name, row in components.items()}
    listed = content.get("missing")
    rows = [mapping(entry) for entry in listed] if isinstance(listed, list) else []
    missing = [Missing(text(row.get("component")), text(row.get("cost"))) for row in rows]
    instances = {}
    for name, instance in mapping(content.get("instances")).items():
        instances[name] = read_instance(mapping(instance))
    fabric: tuple[FabricVariable, ...] = GENERIC_FABRIC
    variables = content.get("fabric")
    if isinstance(variables, list):
        fabric = tuple(map(_fabric_variable, variables))
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
    """Return what a row of an instance table says; what it does not say is 0."""
    return Instance(
        gpus=number(row.get("gpus")),
        neuron_cores=number(row.get("neuron_cores")),
        efa=row.get("efa") is True,
        efa_rdma=row.get("efa_rdma") is True,
        efa_devices=number(row.get("efa_devices")),
        network_gigabits=number(row.get("network_gigabits")),
    )


def _texts_by_name(value: Json) -> Mapping[str, str]:
    """Return the texts of an object, by name."""
    return MappingProxyType(
        {name: entry for name, entry in mapping(value).items() if isinstance(entry, str)}
    )


def _fabric_variable(value: Json) -> FabricVariable:
    row = mapping(value)
    return FabricVariable(
        text(row.get("name")), text(row.get("value")), row.get("rdma") is True, text(row.get("why"))
    )
