"""Test breaks of an image, each in a layer of its own, and the line of `check --image --only
static` for each.

The machine has not tested the image. Where the image's label still names the layers that were
built, every break is named. Where the label is gone, as in an image whose layers were made into
one, each file is asked where it comes from.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand
from trainworks.render.dockerfile import LAYERS_LABEL

pytestmark = pytest.mark.engine

SITE = "/opt/venv/lib/python3.11/site-packages"
LIB = "/usr/lib/x86_64-linux-gnu"

SWAPPED = f"""/usr/bin/python3 -c 'import base64, hashlib, pathlib, re; \\
path = pathlib.Path("{SITE}/filelock/_api.py"); data = path.read_bytes() + b"x = 1"; \\
path.write_bytes(data); \\
digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("="); \\
row = "filelock/_api.py,sha256=" + digest + "," + str(len(data)); \\
record = next(path.parents[1].glob("filelock-*/RECORD")); \\
record.write_text(re.sub("^filelock/_api.py,.*", row, record.read_text(), flags=re.M))'"""
"""Another file in a wheel, with a RECORD that fits it."""

FOREIGN = f"""/usr/bin/python3 -c 'import importlib.util as u, marshal, pathlib; \\
source = pathlib.Path("{SITE}/yaml/loader.py"); path = pathlib.Path(u.cache_from_source(source)); \\
path.parent.mkdir(exist_ok=True); code = marshal.dumps(compile("x = 1", str(source), "exec")); \\
head = u.MAGIC_NUMBER + bytes([1, 0, 0, 0]) + u.source_hash(source.read_bytes()); \\
path.write_bytes(head + code)'"""
"""Bytecode of other code, with the hash of its source."""


def python(program: str) -> str:
    """Return a command that runs a program with the image's own Python."""
    packed = base64.b64encode((HELPERS + program).encode()).decode()
    return f"echo {packed} | base64 -d | /usr/bin/python3 -"


HELPERS = f"""
import base64, hashlib, pathlib, re
site = pathlib.Path("{SITE}")

def row(path):
    data = (site / path).read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    return f"{{path}},sha256={{digest}},{{len(data)}}"
"""

PATCHED = python("""
program = pathlib.Path("/usr/bin/which.debianutils")
sums = pathlib.Path("/var/lib/dpkg/info/debianutils.md5sums")
before = hashlib.md5(program.read_bytes()).hexdigest()
program.write_bytes(program.read_bytes() + b"# x")
sums.write_text(sums.read_text().replace(before, hashlib.md5(program.read_bytes()).hexdigest()))
""")
"""Another file in a Debian package, with sums that fit it."""

EXTRA = python("""
(site / "extra.py").write_text("x = 1")
folder = site / "extra-1.dist-info"
folder.mkdir()
(folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: extra\\nVersion: 1\\n")
rows = [row("extra.py"), row("extra-1.dist-info/METADATA"), "extra-1.dist-info/RECORD,,"]
(folder / "RECORD").write_text("\\n".join(rows))
""")
"""A distribution that no plan has, with a RECORD of its own."""

PROGRAM = python("""
path = "../../../bin/tqdm"
with (site / path).open("a") as program:
    program.write("import os")
record = next(site.glob("tqdm-*/RECORD"))
record.write_text(re.sub("^" + re.escape(path) + ",.*", row(path), record.read_text(), flags=re.M))
""")
"""A program of a distribution with a line more, and a RECORD that fits it."""

NEEDLESS = (
    "printf 'Package: evil\\nStatus: install ok installed\\nVersion:"
    " 1\\n\\n' >> /var/lib/dpkg/status"
)
"""A Debian package that nothing of the plan needs."""

ACL = python("""
import os, struct
everyone, reader = 0xFFFFFFFF, 1000
rows = [(1, 6, everyone), (2, 4, reader), (4, 4, everyone), (16, 4, everyone), (32, 0, everyone)]
packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each) for each in rows)
os.setxattr("/etc/shadow", "system.posix_acl_access", packed)
""")
"""One user more who may read a file: its mode is the same."""

ATTRIBUTE = python("import os; os.setxattr('/usr/bin/env', 'user.more', b'1')")

FILES = (
    ("chmod 0700 /var/tmp", "/var/tmp "),
    ("chmod 0777 /opt/venv", "/opt/venv "),
    ("chown 1000 /usr/local/bin", "/usr/local/bin "),
    ("chown -R 77:77 /usr/share/zoneinfo/Asia", "/usr/share/zoneinfo/Asia"),
    ("chown -h 1000 /bin", "/bin "),
    (f"ln -sfn libz.so.1 {LIB}/libsndfile.so.1", "libsndfile.so.1 "),
    ("ln -sf /bin/true /usr/bin/ld", "/usr/bin/ld "),
    (
        "rm /usr/bin/gcc && printf '#!/bin/sh\\n' > /usr/bin/gcc && chmod 755 /usr/bin/gcc",
        "/usr/bin/gcc ",
    ),
    ("rm /etc/alternatives/c++", "/etc/alternatives/c\\+\\+ "),
    ("ln -sfn /usr/share/zoneinfo/Asia/Tokyo /etc/localtime", "/etc/localtime "),
    ("echo Asia/Tokyo > /etc/timezone", "/etc/timezone "),
    ("sed -i 's/^nobody:x:/nobody::/' /etc/passwd", "/etc/passwd "),
    ("sed -i '/^_apt:/d' /etc/passwd", "/etc/passwd "),
    ("echo 'evil:x:0:0::/:/bin/sh' >> /etc/passwd", "/etc/passwd "),
    ("sed -i 's/^games:[^:]*/games:/' /etc/shadow", "/etc/shadow "),
    ("sed -i '/^tty:/d' /etc/group", "/etc/group "),
    (
        "echo 'auth sufficient pam_permit.so' > /etc/pam.d/common-account",
        "/etc/pam.d/common-account ",
    ),
    ("chmod u-s /usr/bin/passwd", "/usr/bin/passwd "),
    ("chmod g-s /usr/bin/chage", "/usr/bin/chage "),
    ("chmod u+s /usr/bin/env", "/usr/bin/env "),
    ("chmod 0644 /usr/lib/git-core/git-mergetool", "git-mergetool "),
    ("chmod 0600 /etc/ssl/certs/ca-certificates.crt", "ca-certificates.crt "),
    ("chmod 0711 /usr/share/zoneinfo", "/usr/share/zoneinfo "),
    ("ln -sf /dev/null /etc/ssl/certs/ISRG_Root_X2.pem", "ISRG_Root_X2.pem "),
    (
        "cat /etc/ssl/certs/ISRG_Root_X1.pem >> /etc/ssl/certs/ca-certificates.crt",
        "ca-certificates.crt ",
    ),
    (
        "echo 'print(1)' > /opt/trainworks/lib/trainworks_launcher/command/more.py",
        "command/more.py ",
    ),
    ("echo >> /opt/trainworks/lib/stand-in", "lib/stand-in "),
    ("ln -sfn /bin/true /usr/sbin/sshd", "/usr/sbin/sshd "),
    ("ln -sfn /tmp /opt/amazon/openmpi/lib", "/opt/amazon/openmpi/lib "),
    (
        "rm /opt/venv/bin/python && cp /usr/bin/python3 /opt/venv/bin/python",
        "/opt/venv/bin/python ",
    ),
    (f"echo 'x = 1' >> {SITE}/requests/api.py", "requests/api.py "),
    (f"rm {SITE}/numpy/version.py", "numpy/version.py"),
    (
        (
            f"sed -i 's/^tqdm.std.py,sha256=[^,]*/tqdm\\/std.py,/' {SITE}/tqdm-*/RECORD; echo >>"
            f" {SITE}/tqdm/std.py"
        ),
        "tqdm/std.py ",
    ),
    (f"echo 'import evil' > {SITE}/zz.pth", "zz.pth"),
    (f"truncate -s 1000 {SITE}/torch/lib/libtorch_global_deps.so", "libtorch_global_deps.so "),
    (f"dd if=/dev/zero of={LIB}/libssl.so.3 bs=1 seek=99999 count=9 conv=notrunc", "libssl.so.3 "),
    ("mkfifo /opt/ml/model/pipe", "/opt/ml/model/pipe"),
    ("mknod /etc/null c 1 3", "/etc/null"),
    ("echo /opt/x.so > /etc/ld.so.preload", "/etc/ld.so.preload"),
    ("mkdir -p /etc/profile.d && echo 'cd /' > /etc/profile.d/z.sh", "/etc/profile.d/z.sh"),
    ("sed -i '/^Package: zlib1g$/,/^$/s/ok installed/ok unpacked/' /var/lib/dpkg/status", "zlib1g"),
    ("rm /var/lib/dpkg/info/openssl.md5sums", "openssl.md5sums"),
    ("echo 'PermitEmptyPasswords yes' > /etc/ssh/sshd_config.d/a.conf", "sshd_config.d/a.conf"),
    ("echo 'deb http://mirror.invalid/ x main' > /etc/apt/sources.list", "/etc/apt/sources.list "),
    ("sed -i s/false/true/ /opt/venv/pyvenv.cfg", "/opt/venv/pyvenv.cfg "),
    (": > /opt/venv/bin/activate", "/opt/venv/bin/activate "),
    ("echo LC_ALL=xx > /etc/default/locale", "/etc/default/locale "),
    (SWAPPED, "filelock/_api.py "),
    (FOREIGN, "yaml/__pycache__/loader"),
    (f"chgrp 1000 {SITE}/six.py && chmod g+w {SITE}/six.py", "/six.py "),
    ("chmod 0644 /etc/gshadow", "/etc/gshadow "),
    ("sed -i 's/^shadow:x:42:/&games/' /etc/group", "/etc/group (makes|has)"),
    ("sed -i '1i auth requisite pam_deny.so' /etc/pam.d/common-auth", "/etc/pam.d/common-auth "),
    ("rm /etc/ssl/certs/*.0", "is not found by its hash"),
    ("echo 'export A=1' >> /opt/venv/bin/activate.fish", "/opt/venv/bin/activate.fish "),
    ("mv /usr/share/perl5 /usr/share/perl6 && ln -s perl6 /usr/share/perl5", "/usr/share/perl5 "),
    ("echo 'rm -rf /opt' >> /var/lib/dpkg/info/tzdata.postinst", "info/tzdata.postinst "),
    (PATCHED, "debianutils.md5sums "),
    (EXTRA, "extra-1.dist-info/RECORD"),
    (NEEDLESS, "Debian package evil"),
    (PROGRAM, "/bin/tqdm "),
    ("chgrp 1000 /opt/trainworks/bin/train", "/opt/trainworks/bin/train "),
    ("chmod 2755 /opt/venv/share", "/opt/venv/share "),
    ("rm /var/run && ln -s /tmp /var/run", "/var/run is a link to /tmp"),
    (
        "echo 'root root 4755 /bin/dash' >> /var/lib/dpkg/statoverride",
        "dpkg/statoverride gives /bin/dash",
    ),
    (
        "printf '/usr/bin/id\\n/usr/bin/id.x\\n:\\n' >> /var/lib/dpkg/diversions",
        "dpkg/diversions leads /usr/bin/id",
    ),
    ("echo root:0:65536 >> /etc/subuid", "/etc/subuid lets root"),
    ("sed -i 's/^shadow:.*/shadow:*::games/' /etc/gshadow", "/etc/gshadow has"),
    ("rmdir /opt/ml/input/data", "/opt/ml/input/data is a directory"),
    (ACL, "/etc/shadow has system.posix_acl_access"),
    (ATTRIBUTE, "/usr/bin/env has user.more"),
)
"""Commands that break the image, each in one layer, and the pattern that a line of the answer has
then.
"""


SETTINGS = (
    ('ENTRYPOINT ["/bin/sh"]', "ENTRYPOINT "),
    ("CMD []", "CMD "),
    ("USER nobody", "USER "),
    ("WORKDIR /tmp", "WORKDIR "),
    ("ENV LD_PRELOAD=/x.so", "ENV LD_PRELOAD "),
    ("ENV PATH=/bin", "ENV PATH "),
    ("LABEL more=1", "LABEL more "),
    (
        "LABEL org.opencontainers.image.title=mine",
        "label org.opencontainers.image.title is pytorch-",
    ),
    (
        "LABEL org.opencontainers.image.base.name=mine:1",
        "label org.opencontainers.image.base.name is debian:",
    ),
    ("HEALTHCHECK CMD true", "HEALTHCHECK "),
    ("ONBUILD ENV A=1", "ONBUILD "),
    ("EXPOSE 80/udp", "EXPOSE "),
    ("STOPSIGNAL 9", "STOPSIGNAL "),
    ("VOLUME /opt/ml", "VOLUME "),
    ("MAINTAINER another", "Author "),
    ('SHELL ["/bin/bash", "-c"]', "SHELL "),
)


@pytest.fixture(params=["the label names the layers", "the label is gone"])
def label(request: pytest.FixtureRequest) -> list[str]:
    """Return the last line of a Dockerfile: one that takes the label from the image, or none."""
    return [] if request.param == "the label names the layers" else [f"LABEL {LAYERS_LABEL}="]


def check_output(built: BuiltByCommand, lines: list[str], cache: Path) -> str:
    """Build an image of these lines on another one, check it, and return the
    lines that complain.
    """
    tag = f"trainworks-test/breaks:{uuid.uuid4().hex[:12]}"
    text = "\n".join((f"FROM {built.reference}", *lines))
    # By BuildKit: Docker's older builder drops extended attributes. The first docker on PATH may
    # have none.
    subprocess.run(
        (built.engine.probe().program, "build", "-q", "-t", tag, "-"),
        input=text.encode(),
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
    )
    try:
        command = (
            sys.executable,
            str(ROOT / "build.py"),
            "check",
            "--image",
            tag,
            "--only",
            "static",
        )
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False
        )
    finally:
        subprocess.run(("docker", "rmi", tag), stdout=subprocess.PIPE, check=True)
    assert result.returncode == 8, result.stderr
    return "\n".join(line for line in result.stderr.splitlines() if not line.startswith("ok "))


def test_breaks_of_files_are_named(
    docker_image: BuiltByCommand, label: list[str], tmp_path: Path
) -> None:
    output = check_output(
        docker_image, [f"RUN {command}" for command, _ in FILES] + label, tmp_path
    )
    assert {needle for _, needle in FILES if not re.search(needle, output)} == set(), output


def test_breaks_of_the_configuration_are_named(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    output = check_output(docker_image, [line for line, _ in SETTINGS], tmp_path)
    assert [needle for _, needle in SETTINGS if not re.search(needle, output)] == [], output


def test_a_sound_image_passes_and_its_files_alone_do_not_make_it_known(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    command = (
        sys.executable,
        str(ROOT / "build.py"),
        "check",
        "--image",
        docker_image.reference,
        "--only",
        "static",
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False
        )
        assert result.returncode == 0, result.stderr
        assert "0 failed" in result.stderr, (
            "the second time is not asked: an image of which only files were asked is known"
        )
