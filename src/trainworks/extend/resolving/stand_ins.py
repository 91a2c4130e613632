"""What stands in for uv's surroundings: an image's distributions as wheels, and a Python in which nothing is built."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from trainworks.extend.kept import fulfilled
from trainworks.extend.requirements import BaseDistribution, ExtendedBase
from trainworks.extend.resolving.answers import EXTRA


def no_builds(folder: Path) -> None:
    """Make an environment in which uv can build nothing: source archives run no code on this machine.

    uv takes it for an interpreter, and asks it for its version in isolated mode. Builds do not run in that mode, and
    end before they have begun.
    """
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    executable = Path(sys.executable).resolve()
    (folder / "bin" / "python").symlink_to(executable)
    (folder / "pyvenv.cfg").write_text(f"home = {executable.parent}\n", encoding="utf-8")
    (packages / "no_builds.pth").write_text("import sys; sys.flags.isolated or sys.exit(77)\n", encoding="utf-8")


def stand_in(row: BaseDistribution, folder: Path, base: ExtendedBase) -> str:
    """Write a wheel with nothing but the metadata of an installed distribution, and return its pin.

    What it requires and the base lacks is left out: it is as it is, and nobody asked to mend it.
    """
    name, version = canonicalize_name(row.name), str(Version(row.version))
    stem = f"{name.replace('-', '_')}-{version}"
    there: dict[str, str] = {canonicalize_name(each.name): each.version for each in base.distributions}
    requires = [text for text in row.requires if EXTRA.search(text) or fulfilled(text, there, base)]
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {text}\n" for text in requires)
    extras = {found for text in requires for found in EXTRA.findall(text)}
    metadata += "".join(f"Provides-Extra: {extra}\n" for extra in sorted(extras))
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return f"{name}=={version}"
