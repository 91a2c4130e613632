"""Make a base image from the distribution's package archive, without an image registry.

The same state of the archive gives the same bytes: times are set to one moment, logs and this
machine's names are removed. Packages come from the archive of this machine's apt, of its release
alone: updates of the release are in the first layer on the base, and leave the base's bytes as they
are. The image has the distribution's default archive.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path

from trainworks.engine.archive import ImageConfiguration, write_archive
from trainworks.engine.subprocesses import own_environment, stream
from trainworks.engine.temporary_folders import private_folder
from trainworks.errors import HostError
from trainworks.facts.rows import MACHINES
from trainworks.host.apt import apt_configuration, make_source_lines
from trainworks.host.archives import RECORD, format_state, parse_release_file
from trainworks.host.settings import HostSettings
from trainworks.plan.own_base import INCLUDED_PACKAGES, OwnBase

TOOL = "mmdebstrap"

MERGED_USR_HOOKS = Path("/usr/share/mmdebstrap/hooks/merged-usr")
"""Makes /bin, /lib and /sbin links, as in Debian's own images, without the
conversion package and its Perl.
"""

EPOCH = 1_700_000_000
"""Time of all files and of the image, in seconds since 1970: a fixed moment
before the packages are installed.
"""

SLIM = (
    # A step that fails is thrown away, and an image is written once: waiting
    # for the disk protects nothing.
    "force-unsafe-io",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    # Default archives; CLEAN makes the image's own list of them.
    "path-include=/usr/share/doc/apt/examples/*.list",
    "path-include=/usr/share/doc/apt/examples/*.sources",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
)
"""dpkg options, kept in the image: no manuals and translations, but licences
(as in ``debian:*-slim``).
"""

CLEAN = r"""
set -eu
root=$1
# Read before they are removed: they say of which day the packages are.
cp "$root"/var/lib/apt/lists/*Release "${0%/*}"/
examples=$root/usr/share/doc/apt/examples
rm -f "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/*
if [ -e "$examples/debian.sources" ]; then
    cp "$examples/debian.sources" "$root/etc/apt/sources.list.d/debian.sources"
else
    cp "$examples/sources.list" "$root/etc/apt/sources.list"
fi
mv "$root"/etc/dpkg/dpkg.cfg.d/99mmdebstrap "$root"/etc/dpkg/dpkg.cfg.d/slim
rm -rf "$root"/var/log/* "$root"/var/cache/ldconfig/*
rm -rf "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old
rm -f "$root"/etc/apt/apt.conf.d/99mmdebstrap "$root"/etc/machine-id
# Packages must not start their services while an image is built:
# with some engines nothing would end them.
printf '#!/bin/sh\nexit 101\n' > "$root"/usr/sbin/policy-rc.d
chmod 755 "$root"/usr/sbin/policy-rc.d
echo localhost > "$root"/etc/hostname
: > "$root"/etc/resolv.conf
"""
"""Runs after the installation: replaces this machine's mirror and names by
defaults, and removes logs.
"""


def bootstrap(
    base: OwnBase, archive: Path, settings: HostSettings, on_line: Callable[[str], None]
) -> str:
    """Make a base image with mmdebstrap, and write it as a ``docker save`` archive.

    It downloads packages, and needs the rights to make a root folder. Its temporary folder is
    deleted.

    Args:
        base: The base image, with the locked states of the package archive.
        archive: The file to write.
        settings: This machine's settings: its mirror, proxies and CA are used.
        on_line: Receives each line that the tool prints.

    Returns:
        The image's identifier.

    Raises:
        HostError: The tool is not installed, or fails; has its last lines.
        OutputError: The archive cannot be written.
    """
    row = base.row
    tool = shutil.which(TOOL)
    if tool is None:
        raise HostError(
            f"no registry gives the base image {row.image}, and {TOOL} is not installed to make it",
            hint=(
                "where a registry answers,"
                " `build.py lock --upgrade system` records the digest to pull; else install"
                f" {TOOL} with `make engine` (`apt-get install {TOOL}` on Debian and Ubuntu)"
            ),
        )
    # Without updates of the release, so that they do not change the base's bytes.
    release = [source for source in settings.apt.sources if source.suite == settings.suite]
    sources = make_source_lines(row.suite, release, settings.suite)
    if not sources:
        sources = (f"deb {row.archive} {row.suite} main",)
    last_lines: deque[str] = deque(maxlen=15)

    def note(line: str) -> None:
        last_lines.append(line)
        on_line(line)

    with private_folder() as folder:
        # apt drops its privileges for downloads, and must still reach the folders below.
        folder.chmod(0o755)
        root = folder / "root"
        read = folder / "read"
        read.mkdir(mode=0o755)
        hook = read / "clean"
        hook.write_text(f"#!/bin/sh\n{CLEAN}", encoding="utf-8")
        hook.chmod(0o755)
        certificate = folder / "ca.pem"
        certificate.write_bytes(settings.ca)
        configuration = folder / "apt.conf"
        ca_path = str(certificate) if settings.ca else ""
        configuration.write_text(apt_configuration(settings.apt, ca_path=ca_path), encoding="utf-8")
        # The mode that it would choose itself may run Debian's scripts as this user, without a
        # namespace.
        mode = "root" if os.geteuid() == 0 else "unshare"
        argv = [tool, f"--mode={mode}", "--variant=minbase"]
        argv += [f"--aptopt={configuration}", f"--customize-hook={hook}"]
        argv += [f"--dpkgopt={option}" for option in SLIM]
        argv += [f"--include={','.join(INCLUDED_PACKAGES)}", f"--architectures={row.architecture}"]
        if MERGED_USR_HOOKS.is_dir():
            argv.append(f"--hook-dir={MERGED_USR_HOOKS}")
        argv += [row.suite, str(root), *sources]
        environment = {
            **own_environment(),
            **settings.proxies,
            "SOURCE_DATE_EPOCH": str(EPOCH),
            "LC_ALL": "C.UTF-8",
        }
        try:
            status = stream(tuple(argv), note, environment=environment)
            if status != 0:
                hint = (
                    "it needs root (or unprivileged user namespaces) and the archive that this"
                    " machine's apt uses"
                )
                if MACHINES[row.architecture] != os.uname().machine:
                    hint += (
                        f", and qemu to run {row.architecture} programs (tools/set-up-emulation)"
                    )
                lines = "\n  ".join(last_lines)
                raise HostError(
                    f"{TOOL} {row.suite} ended with status {status}:\n  {lines}", hint=hint
                )
            record = root / RECORD.removeprefix("/")
            record.parent.mkdir(mode=0o755)
            lines_of_states = set()
            for path in read.glob("*Release"):
                text = path.read_text(encoding="utf-8", errors="replace")
                state = parse_release_file(text, base.states)
                lines_of_states.add(format_state(state))
            record.write_text("".join(sorted(lines_of_states)), encoding="utf-8")
            record.chmod(0o644)
            image = ImageConfiguration(
                created=EPOCH,
                environment={"PATH": IMAGE_PATH},
                command=("bash",),
                architecture=row.architecture,
            )
            return write_archive(root, archive, name=base.name, configuration=image)
        finally:
            # A killed tool may leave mounts of /dev; removing files through one
            # would remove this machine's.
            unmount_below(root)


IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def unmount_below(root: Path) -> None:
    """Detach everything that is mounted below a folder, deepest first.

    Nothing is detached on a system without ``/proc``, and a mount that cannot be detached stays.
    """
    mounts = Path("/proc/self/mounts")
    if not mounts.is_file():
        return
    points = []
    for line in mounts.read_text(encoding="utf-8").splitlines():
        # The kernel writes a blank in a path as ``\040``.
        point = line.split(" ")[1].replace("\\040", " ")
        if point.startswith(f"{root}/"):
            points.append(point)
    # In this order a mount inside of another one comes before it.
    for point in sorted(points, reverse=True):
        with contextlib.suppress(OSError):
            stream(("umount", "--lazy", point), lambda _line: None)
