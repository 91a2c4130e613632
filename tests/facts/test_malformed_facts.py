"""Malformed rows and recipes: each is reported with its file, row and key, and all of them at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainworks.errors import FactsError, OutputError
from trainworks.facts.load import load
from trainworks.facts.rows import Facts


@dataclass(frozen=True)
class Damage:
    """One thing that a person may do to a file, and what must be said about it."""

    name: str
    file: str
    old: str
    new: str
    said: str


def appended(name: str, file: str, text: str, said: str) -> Damage:
    return Damage(name, file, "", text, said)


LOCK = "images/lock/pytorch-2.4.1-cu121-py311-debian12.toml"


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """Give a checkout with one target's lock: to copy and read fifty more of the same would take most of the time."""
    shutil.copytree(root / "images", tmp_path / "images", ignore=lambda *_: ["lock"], copy_function=shutil.copy)
    shutil.copytree(root / "templates", tmp_path / "templates", copy_function=shutil.copy)
    shutil.copytree(root / "launcher" / "entrypoint", tmp_path / "launcher" / "entrypoint", copy_function=shutil.copy)
    (tmp_path / LOCK).parent.mkdir()
    shutil.copy(root / LOCK, tmp_path / LOCK)
    return tmp_path


DAMAGES = (
    Damage(
        "a number for a text",
        "images/cuda.toml",
        'version = "12.1"',
        "version = 12.1",
        "images/cuda.toml: cuda 5 (name = 'cu121', version = 12.1): key 'version': must be a string, got 12.1",
    ),
    Damage(
        "a text for a number",
        "images/instances.toml",
        "gpus = 8",
        'gpus = "8"',
        "(name = 'ml.g5.48xlarge'): key 'gpus': must be an integer, got '8'",
    ),
    Damage(
        "an answer to advice that nobody gives",
        "templates/components/aws-ofi-nccl-source.j2",
        'answers = ["aws-ofi-nccl-gpudirect"]',
        'answers = ["gdrcopy-prefix"]',
        "templates/components/aws-ofi-nccl-source.j2: answers unknown advice 'gdrcopy-prefix'",
    ),
    Damage(
        "a text for a flag",
        "images/instances.toml",
        "efa_rdma = true",
        'efa_rdma = "yes"',
        "(name = 'ml.g6.8xlarge'): key 'efa_rdma': must be true or false, got 'yes'",
    ),
    Damage(
        "a text for a list",
        "images/components.toml",
        'needs = ["torch"]',
        'needs = "torch"',
        "(name = 'torchvision'): key 'needs': must be an array, got 'torch'",
    ),
    Damage(
        "an unknown key",
        "images/stacks.toml",
        'sources = "packages"',
        'sources = "packages"\nflavour = "sweet"',
        "images/stacks.toml: stack 1 (name = 'packages-2026.11'): unknown key 'flavour'",
    ),
    Damage(
        "a word that is no choice",
        "images/stacks.toml",
        'sources = "packages"',
        'sources = "parcels"',
        "key 'sources': must be 'packages' or 'vendor', got 'parcels'",
    ),
    Damage(
        "a missing key",
        "images/pytorch.toml",
        "size_budget_megabytes = 6300\n",
        "",
        "images/pytorch.toml: target 2 (version = '2.4.1', cuda = 'cu121', base = 'debian12'): "
        "key 'size_budget_megabytes' is missing",
    ),
    Damage(
        "a row without a source",
        "images/components.toml",
        'source = "https://docs.aws.amazon.com/sagemaker/latest/dg/model-parallel.html"',
        "",
        "(name = 'smp'): key 'source' is missing",
    ),
    Damage(
        "a hash that is too short",
        LOCK,
        'sha256 = "',
        'sha256 = "abc"  # ',
        f"{LOCK}: package 1 (name = 'absl-py', version = '2.5.1'): key 'sha256': 'abc' is not 64 hexadecimal digits",
    ),
    Damage(
        "an unknown base",
        "images/pytorch.toml",
        'cuda = "cu121"\nbase = "debian12"',
        'cuda = "cu121"\nbase = "debian11"',
        "images/pytorch.toml: target 2.4.1 cu121 debian11: key 'base': no row 'debian11' in images/bases.toml",
    ),
    Damage(
        "an unknown CUDA",
        "images/pytorch.toml",
        'cuda = "cu121"',
        'cuda = "cu122"',
        "images/pytorch.toml: target 2.4.1 cu122 debian12: key 'cuda': no row 'cu122' in images/cuda.toml",
    ),
    Damage(
        "an unknown stack",
        "images/pytorch.toml",
        'cuda = "cu121"\nbase = "debian12"\nstack = "packages-2026.11"',
        'cuda = "cu121"\nbase = "debian12"\nstack = "packages-2026.12"',
        "key 'stack': no row 'packages-2026.12' in images/stacks.toml",
    ),
    Damage(
        "a version of an unknown component",
        "images/pytorch.toml",
        'cudnn = "9.1.0.70"',
        'cudn = "9.1.0.70"',
        "target 2.4.1 cu121 debian12: key 'versions': unknown component 'cudn'",
    ),
    Damage(
        "a need of an unknown component",
        "images/components.toml",
        'needs = ["rmm"]',
        'needs = ["rnm"]',
        "images/components.toml: component 'rmm-python': needs unknown 'rnm'",
    ),
    Damage(
        "another framework in the file",
        "images/pytorch.toml",
        'framework = "pytorch"',
        'framework = "tensorflow"',
        "images/pytorch.toml: key 'framework' must be 'pytorch', got 'tensorflow'",
    ),
    Damage(
        "another framework in a row",
        "images/pytorch.toml",
        'version = "2.4.1"',
        'version = "2.4.1"\nframework = "tensorflow"',
        "images/pytorch.toml: target 2 (version = '2.4.1', cuda = 'cu121', base = 'debian12'): unknown key 'framework'",
    ),
    Damage(
        "broken TOML",
        "images/instances.toml",
        "[[instance]]",
        "[[instance]",
        "images/instances.toml: not TOML: ",
    ),
    appended(
        "a row of the wrong kind",
        "images/cuda.toml",
        '[[target]]\nname = "cu999"\n',
        "images/cuda.toml: unknown key 'target'; this file has [[cuda]] rows",
    ),
    Damage(
        "a text where a row should be",
        "images/jax.toml",
        "",
        'framework = "jax"\ntarget = ["0.9"]\n',
        "images/jax.toml: target 1: must be a table of keys, got '0.9'",
    ),
    appended(
        "two rows of one name",
        "images/cuda.toml",
        '[[cuda]]\nname = "cu124"\nsource = "copied by mistake"\n',
        "images: cuda 'cu124' is in two rows",
    ),
    appended(
        "two targets of one name",
        "images/pytorch.toml",
        '[[target]]\nversion = "2.4.1"\ncuda = "cu121"\nbase = "debian12"\nstack = "packages-2026.11"\n'
        'versions = {}\nsize_budget_megabytes = 1\nsource = "copied by mistake"\n',
        "images: target pytorch-2.4.1-cu121-py311-debian12 is in two rows",
    ),
    appended(
        "two files of one distribution",
        LOCK,
        f'[[package]]\nname = "torch"\nversion = "2.4.1"\nfile = "torch.whl"\nsha256 = "{"0" * 64}"\n',
        f"{LOCK}: package 'torch' is in two rows",
    ),
    Damage(
        "a lock of no target",
        "images/lock/pytorch-1.0.0-cu121-py311-debian12.toml",
        "",
        "package = []\n",
        "images/lock/pytorch-1.0.0-cu121-py311-debian12.toml: no target of this name",
    ),
    Damage(
        "a recipe without front matter",
        "templates/components/nccl.j2",
        "{#\n",
        "",
        "templates/components/nccl.j2: must start with a front matter",
    ),
    Damage(
        "a front matter that is not TOML",
        "templates/components/metis.j2",
        "[[check]]",
        "[[check",
        "templates/components/metis.j2: not TOML: ",
    ),
    Damage(
        "an unknown key in a front matter",
        "templates/components/ssh.j2",
        "[programs]",
        "[program]",
        "templates/components/ssh.j2: unknown key 'program'",
    ),
    Damage(
        "a number for a program",
        "templates/components/ssh.j2",
        'ssh = "/usr/bin/ssh"',
        "ssh = 22",
        "templates/components/ssh.j2: key 'programs.ssh': must be a string, got 22",
    ),
    Damage(
        "one check where a list of them should be",
        "templates/components/rmm.j2",
        "[[check]]",
        "[check]",
        "templates/components/rmm.j2: key 'check': must be an array",
    ),
    Damage(
        "a recipe of no component",
        "templates/components/horovod.j2",
        "",
        "{#\n#}\n",
        "templates/components/horovod.j2: no row of this name in images/components.toml",
    ),
    Damage(
        "a rule about nothing that exists",
        "images/compatibility.toml",
        'when = { gdrcopy = "<2.2" }',
        'when = { gdrcopi = "<2.2" }',
        "compatibility.toml: rule 'gdrcopy-prefix': key 'when': unknown property 'gdrcopi'; did you mean gdrcopy?",
    ),
    Damage(
        "a rule that refers to nothing that exists",
        "images/compatibility.toml",
        'require = { "image.base" = "{base}" }',
        'require = { "image.base" = "{bass}" }',
        "rule 'image-is-of-base': key 'require': unknown property 'bass'; did you mean base?",
    ),
    Damage(
        "a pattern that cannot be read",
        "images/dockerfiles.toml",
        r"openmpi-(\d+\.\d+\.\d+)\.tar",
        r"openmpi-(\d+\.\d+\.\d+\.tar",
        " is not a regular expression: missing ), unterminated subpattern",
    ),
    Damage(
        "a form with a group that the pattern has not",
        "images/dockerfiles.toml",
        'form = "debian{0}"',
        'form = "debian{1}"',
        "dockerfiles.toml: part 'base': key 'form': 'debian{1}' asks for more groups than",
    ),
    Damage(
        "a range that cannot be read",
        "images/compatibility.toml",
        'require = { nccl = ">=2.4.8" }',
        'require = { nccl = "=>2.4.8" }',
        "rule 'aws-ofi-nccl-nccl-2.4.8': key 'require': nccl: '=>2.4.8' is not a condition; write one of: >= <=",
    ),
    Damage(
        "a rule about every plan",
        "images/compatibility.toml",
        'when = { smp = ">=2", sources = "vendor" }',
        "when = {}",
        "rule 'smp-2': key 'when' is empty: it must say which plans it speaks about",
    ),
    appended(
        "an artifact that requires what cannot be read",
        "images/artifacts.toml",
        """
[[artifact]]
name = "bost"
version = "1"
url = "https://example.com/bost"
requires = { python = "3.8 or 3.9" }
source = "test"
""",
        "images/artifacts.toml: artifact bost 1: key 'requires': python: '3.8 or 3.9' is not a condition",
    ),
    appended(
        "an artifact whose file is in another folder",
        "images/artifacts.toml",
        """
[[artifact]]
name = "boost"
version = "1"
url = "https://example.com/..%2F..%2Fetc%2Fpasswd"
source = "test"
""",
        "images/artifacts.toml: artifact boost 1: the file of its `url` is '../../etc/passwd', which is not the name",
    ),
    Damage(
        "a circle of components that build with each other",
        "images/components.toml",
        'name = "cmake"',
        'name = "cmake"\nbuilds_with = ["metis"]',
        "images/components.toml: component 'cmake': builds_with in a circle: cmake -> metis -> cmake",
    ),
    Damage(
        "a negative size of a file",
        LOCK,
        "size = ",
        "size = -",
        f"{LOCK}: package 1 (name = 'absl-py', version = '2.5.1'): key 'size': -137673 is negative",
    ),
    Damage(
        "a negative budget",
        "images/pytorch.toml",
        "size_budget_megabytes = ",
        "size_budget_megabytes = -",
        "key 'size_budget_megabytes': -",
    ),
    Damage(
        "no budget",
        "images/pytorch.toml",
        "size_budget_megabytes = 7000",
        "size_budget_megabytes = 0",
        "key 'size_budget_megabytes': 0 is not from 1 to 1000000",
    ),
    Damage(
        "a copy of itself",
        "images/generated-files.toml",
        'copy_of = "/usr/share/base-files/profile"',
        'copy_of = "/etc/profile"',
        "key 'copy_of': /etc/profile would be compared with itself",
    ),
    Damage(
        "a text that is written from right to left",
        "images/components.toml",
        "NVIDIA's",
        "\u202eNVIDIA's",
        "cuDNN from \\u202eNVIDIA's wheel",
    ),
    Damage(
        "digits of another script",
        "images/pytorch.toml",
        'version = "2.10.0"',
        'version = "2.1\uff10.0"',
        "key 'version': '2.1\uff10.0' is not a version",
    ),
    Damage(
        "arrays that are nested too deeply for a row",
        "images/families.toml",
        'source = "',
        f'increment_gib = {"[" * 300}{"]" * 300}\nsource = "',
        "images/families.toml: ",
    ),
)

REACH_A_DOCKERFILE = (
    ("components", 'summary = "', "\\nRUN curl evil", "key 'component.summary': '\\nRUN curl evil"),
    ("components", 'debian = ["', "evil; curl evil ", "key 'debian': 'evil; curl evil "),
    ("components", 'debian = ["', '-o", "', "key 'debian': '-o' is not the name of a package"),
    ("components", 'build_debian = ["', "a b", "key 'build_debian': 'a b"),
    ("components", 'python = ["', "--index-url http://evil ", "key 'python': '--index-url"),
    ("components", 'recipe = "', "../../x", "key 'recipe': '../../x"),
    ("artifacts", 'flags = ["', "-y; curl evil ", "key 'flags': '-y; curl evil "),
    ("artifacts", 'version = "', "1; curl evil ", "key 'version': '1; curl evil "),
    ("bases", 'suite = "', "bookworm,target=/evil --mount=type=bind", "key 'suite': 'bookworm,target=/evil"),
    ("bases", 'image = "', "debian:x\\nRUN curl evil", "key 'base.image': 'debian:x\\nRUN"),
    ("bases", 'image = "', "debian x", "key 'image': 'debian x"),
    ("base-images", 'name = "', "evil AS x ", "key 'name': 'evil AS x "),
    ("cuda", 'architectures = ["', "80;evil", "key 'architectures': '80;evil"),
    ("cuda", 'wheel_suffix = "', "evil ", "key 'wheel_suffix': 'evil "),
    ("stacks", 'open-mpi = "', "5 evil", "key 'components': '5 evil"),
    ("pytorch", 'torch = "', "2; evil ", "key 'versions': '2; evil "),
    ("components", 'debian = ["', 'evil-", "', "key 'debian': 'evil-' is not the name of a package"),
    ("cuda", 'minimum_driver = "', "450; evil ", "key 'minimum_driver': '450; evil "),
    ("bases", 'archive = "', "https://a/$(touch /evil)?", "key 'archive': 'https://a/$(touch /evil)?"),
    ("artifacts", 'url = "', "https://a/`evil`?", "key 'url': 'https://a/`evil`?"),
    ("artifacts", 'git = "', "https://a/';evil;'", "key 'git': \"https://a/"),
    ("fabric", 'name = "', "A=1 ", "key 'name': 'A=1 FI_PROVIDER'"),
    ("fabric", 'value = "', "efa -x LD_PRELOAD=/evil ", "key 'value': 'efa -x LD_PRELOAD=/evil "),
    ("generated-files", 'paths = ["', '/**", "', "key 'paths': '/**' is not an absolute path"),
    ("generated-files", 'paths = ["', '/usr/**", "', "key 'paths': '/usr/**' is not an absolute path"),
    ("generated-files", 'paths = ["', '/*/a", "', "key 'paths': '/*/a' is not an absolute path"),
    ("generated-files", 'paths = ["', '/etc/../**", "', "key 'paths': '/etc/../**' is not an absolute path"),
    ("privileged-files", 'paths = ["', '/usr/bin/../bin/chage", "', "key 'paths': '/usr/bin/../bin/chage' is not"),
    ("privileged-files", 'paths = ["', '/usr/*/chage", "', "key 'paths': '/usr/*/chage' is not an absolute path"),
    ("instances", "gpus = ", "100000000", "key 'gpus': 100000000"),
    ("built", 'date = "20', '26-99-99"  # ', "2026-99-99 is not a day of the calendar"),
    ("lock/pytorch-2.4.1-cu121-py311-debian12", 'name = "', "bcrypt --index-url ", "key 'name': 'bcrypt --index-url"),
    ("lock/pytorch-2.4.1-cu121-py311-debian12", 'file = "', "../../../../etc/cron.d/", "key 'file': '../../../../etc"),
    ("lock/pytorch-2.4.1-cu121-py311-debian12", 'file = "', "/etc/", "key 'file': '/etc/"),
)
"""A file of ``images``, what stands there, what is put behind it, and what must be said about it."""


def spoil(checkout: Path, damage: Damage) -> None:
    path = checkout / damage.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    assert damage.old in text, "the damage must hit something"
    path.write_text(text.replace(damage.old, damage.new, 1) if damage.old else text + damage.new, encoding="utf-8")


@pytest.fixture
def problems_of(checkout: Path) -> Callable[[], tuple[str, ...]]:
    def find() -> tuple[str, ...]:
        with pytest.raises(FactsError) as caught:
            load(checkout)
        return caught.value.problems

    return find


def test_an_untouched_copy_is_sound(checkout: Path) -> None:
    assert load(checkout).targets


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name.replace(" ", "-"))
def test_one_problem_is_one_line_that_names_file_row_and_key(
    damage: Damage, checkout: Path, problems_of: Callable[[], tuple[str, ...]]
) -> None:
    spoil(checkout, damage)
    problems = problems_of()
    assert damage.said in problems[0]
    assert len(problems) == 1, "nobody is blamed for somebody else's problem"


@pytest.mark.parametrize(("name", "behind", "added", "said"), REACH_A_DOCKERFILE)
def test_what_reaches_a_dockerfile_cannot_bring_words_of_its_own(
    name: str, behind: str, added: str, said: str, checkout: Path, problems_of: Callable[[], tuple[str, ...]]
) -> None:
    path = checkout / "images" / f"{name}.toml"
    text = path.read_text(encoding="utf-8")
    assert behind in text
    path.write_text(text.replace(behind, behind + added, 1), encoding="utf-8")
    assert [problem for problem in problems_of() if problem.startswith(f"images/{name}.toml") and said in problem]


@pytest.mark.parametrize(
    ("front", "said"),
    [
        (
            '[environment]\nA = "x\\nRUN curl evil"\n',
            "key 'environment.A': 'x\\nRUN curl evil' has a control character",
        ),
        ('[environment]\n"EVIL=1 B" = "x"\n', "key 'environment': 'EVIL=1 B' is not the name of a variable"),
        ('path = ["/opt/x:/evil"]\n', "key 'path': '/opt/x:/evil' is not the absolute path of a folder"),
        ('imports = ["os; evil"]\n', "key 'imports': 'os; evil' is not the name of a Python module"),
        ('owns = ["evil"]\n', "key 'owns': 'evil' is not an absolute path"),
        ('owns = ["/**"]\n', "key 'owns': '/**' is not an absolute path"),
        ('removes = ["evil"]\n', "key 'removes': 'evil' is not an absolute path"),
        ('path = ["/opt/../evil"]\n', "key 'path': '/opt/../evil' is not the absolute path of a folder"),
        ('[programs]\nssh = "ssh"\n', "key 'programs': 'ssh' is not the absolute path of a program"),
    ],
)
def test_what_a_front_matter_says_cannot_bring_words_of_its_own_either(
    front: str, said: str, checkout: Path, problems_of: Callable[[], tuple[str, ...]]
) -> None:
    (checkout / "templates" / "components" / "ssh.j2").write_text(f"{{#\n{front}#}}\n", encoding="utf-8")
    (problem,) = problems_of()
    assert problem.startswith(f"templates/components/ssh.j2: {said}")


def test_a_recipe_with_line_ends_of_windows_says_so(checkout: Path, problems_of: Callable[[], tuple[str, ...]]) -> None:
    path = checkout / "templates" / "components" / "ssh.j2"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (problem,) = problems_of()
    assert problem == ("templates/components/ssh.j2: has line ends of Windows (CR LF); save it with those of Unix (LF)")


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return what puts something else into a file's place."""

    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b"\n"), "is empty"),
    "byte order mark": (
        lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
        "cannot be read: it begins with a byte order mark (BOM); save it as plain UTF-8",
    ),
    "UTF-16": (
        lambda path: path.write_bytes(path.read_text(encoding="utf-8").encode("utf-16")),
        "cannot be read: it begins with UTF-16; save it as plain UTF-8",
    ),
    "latin-1": (
        lambda path: path.write_bytes(b"# one\n# caf\xe9\n" + path.read_bytes()),
        "cannot be read: line 2 is not UTF-8 (byte 0xe9); save it as UTF-8",
    ),
    "NUL": (
        lambda path: path.write_bytes(b"# one\n\0" + path.read_bytes()),
        "cannot be read: line 2 has a NUL byte: it is not a text file, or it is damaged",
    ),
    "a half of a header": (lambda path: path.write_bytes(path.read_bytes() + b"[[target"), "not TOML: "),
    "nested arrays": (
        lambda path: path.write_text(f"a = {'[' * 5000}{']' * 5000}\n"),
        "not TOML that can be read: its arrays or tables are nested too deeply",
    ),
    "a long number": (
        lambda path: path.write_text(f"a = {'9' * 6000}\n"),
        "not TOML that can be read: a number has too many digits",
    ),
    "a folder": (instead(Path.mkdir), "cannot be read: it is a folder"),
    "a circle of links": (
        instead(lambda path: path.symlink_to(path.name)),
        "cannot be read: Too many levels of symbolic links",
    ),
    "a pipe": (
        instead(os.mkfifo),
        "cannot be read: it is not a regular file",
    ),
}


@pytest.mark.parametrize("file", ["images/pytorch.toml", "images/bases.toml", "images/components.toml", LOCK])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_that_cannot_be_read_is_one_problem(
    kind: str, file: str, checkout: Path, problems_of: Callable[[], tuple[str, ...]]
) -> None:
    spoil_file, said = UNREADABLE[kind]
    spoil_file(checkout / file)
    (problem,) = problems_of()
    assert problem.startswith(f"{file}: {said}")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.symlink_to("/etc/hostname"), "is a link: put the file itself there"),
        (lambda path: path.symlink_to("/etc"), "is a link: put the file itself there"),
        (lambda path: path.symlink_to("nowhere"), "is a link: put the file itself there"),
        (os.mkfifo, "is not a regular file: put the file itself there"),
    ],
    ids=["to a file of this machine", "to a folder of this machine", "to nothing", "a pipe"],
)
@pytest.mark.parametrize("folder", ["templates/files/nccl", "launcher/entrypoint"])
def test_what_goes_into_images_is_plain_files(
    folder: str,
    make: Callable[[Path], None],
    said: str,
    checkout: Path,
    problems_of: Callable[[], tuple[str, ...]],
) -> None:
    make(checkout / folder / "data.txt")
    (problem,) = problems_of()
    assert problem.startswith(f"{folder.removeprefix('templates/')}/data.txt: {said}")


def test_a_whole_folder_that_is_a_link_is_refused(checkout: Path, problems_of: Callable[[], tuple[str, ...]]) -> None:
    (checkout / "launcher").rename(checkout / "elsewhere")
    (checkout / "launcher").symlink_to("elsewhere")
    assert problems_of() == ("launcher: is a link: put the file itself there, it goes into images",)


def test_a_table_that_is_missing_is_one_problem(checkout: Path, problems_of: Callable[[], tuple[str, ...]]) -> None:
    (checkout / "images" / "bases.toml").unlink()
    assert problems_of() == ("images/bases.toml: cannot be read: No such file or directory",)


def test_the_packages_own_folder_stands_in_for_one_that_is_missing(checkout: Path, facts: Facts) -> None:
    shutil.rmtree(checkout / "launcher")
    assert load(checkout).files == facts.files


def test_a_component_without_recipe(checkout: Path, problems_of: Callable[[], tuple[str, ...]]) -> None:
    (checkout / "templates" / "components" / "metis.j2").unlink()
    assert problems_of() == ("templates/components/metis.j2 is missing: the component metis has a row",)


def test_a_file_that_is_not_text(checkout: Path, problems_of: Callable[[], tuple[str, ...]]) -> None:
    (checkout / "images" / "instances.toml").write_bytes(b"\x80\x81\x00")
    (problem,) = problems_of()
    assert problem.startswith("images/instances.toml: cannot be read: line 1 is not UTF-8 (byte 0x80)")


def test_all_problems_of_all_files_are_reported_at_once(
    checkout: Path, problems_of: Callable[[], tuple[str, ...]]
) -> None:
    together = [damage for damage in DAMAGES if damage.name not in CANNOT_BE_TOGETHER]
    for damage in together:
        spoil(checkout, damage)
    problems = problems_of()
    unsaid = [damage.name for damage in together if not any(damage.said in problem for problem in problems)]
    assert unsaid == []
    assert len(problems) == len(together), "nobody is blamed for somebody else's problem"


CANNOT_BE_TOGETHER = {
    # They overlap another damage, or change what it would say.
    "broken TOML",
    "arrays that are nested too deeply for a row",
    "a word that is no choice",
    "a missing key",
    "an unknown base",
    "an unknown CUDA",
    "an unknown stack",
    "two targets of one name",
    "another framework in a row",
    "a number for a program",
    # A target whose cell is unknown may be the one that the lock is of.
    "a version of an unknown component",
    # A malformed stack does not say what its sources are, and they are a part of a target's name.
    "a lock of no target",
}


def test_the_error_is_one_paragraph_with_a_count(checkout: Path) -> None:
    for damage in DAMAGES[:2]:
        spoil(checkout, damage)
    with pytest.raises(FactsError, match=r"\A2 problems in the facts:\n  images/\S+: .*\n  images/\S+: .*\Z"):
        load(checkout)


def test_a_folder_without_any_facts_is_not_a_root(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"has no folder images, templates, launcher or smdistributed"):
        load(tmp_path)
