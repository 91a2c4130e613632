"""Requirements files as people have them, and what they become: the same that pip makes of them in a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from pip._internal.network.session import PipSession
from pip._internal.req import req_file

from trainworks.extend.reading.lines import OptionLine, RequirementLines, read_requirements
from trainworks.extend.reading.options import Choice, choice_of, settings_with, without_vendor
from trainworks.extend.requirements import BaseDistribution, ExtendedBase
from trainworks.extend.wheels.files import misfits
from trainworks.host.pip import PipSettings

FLASH = (
    "https://github.com/Dao-AILab/flash-attention/releases/download/v2.7.3/"
    "flash_attn-2.7.3+cu12torch2.6cxx11abiTRUE-cp310-cp310-linux_x86_64.whl"
)
SETS = {
    "one index line and pins": "--extra-index-url https://download.pytorch.org/whl/cu130\ndatasets\ntorch==2.9.1\n"
    "torchaudio==2.9.1\ntorchvision==0.24.1\ntransformers==4.57.6\n\n",
    "blanks, extras and a wheel of the network": f"wheel \npackaging \nninja\ntorch==2.8.0\n{FLASH}\ndeepspeed\n"
    "accelerate==1.8.1\ntransformers==5.3.0\nhuggingface_hub[cli]\n",
    "pins of one year": "torch==2.9.0\nhuggingface-hub==0.27.1\nnumpy==1.26.4\npython-json-logger==2.0.7\n",
    "ranges and git": "wheel\ntransformers>=4.48.0,<5.0\ntrl[vllm]<1.0\nmath_verify>=0.9.0,<1.0\nprotobuf\n"
    "git+https://huggingface.co/spaces/someone/wordle@77bdfedb9144b341db1c37449328709ccbed7da3\n",
    "names in two spellings": "huggingface_hub>=0.13.0,<0.14.0\nhydra-core>=1.2.0,<1.3\nimg2dataset\n",
    "options of every kind": "-i https://a.example/simple --extra-index-url https://b.example/simple\n--pre\n"
    "-f https://c.example/files\n--trusted-host d.example\n--no-binary one,two\n--only-binary=:all:\n--prefer-binary\n",
    "joined lines and markers": "# head\nsix \\\n  >=1.0  # why\npandas>=2 ; python_version > '3.8'\n#\\\nx\n",
    "editable": "-e git+https://h.example/a.git@v1#egg=a\n--editable=./lib[x]\n-e .\n",
}


def by_pip(path: Path) -> tuple[list[str], dict[str, list[str]]]:
    """What pip reads: requirements, and the options that change where packages come from."""
    parser = req_file.RequirementsFileParser(PipSession(), req_file.get_line_parser(None))
    wanted: list[str] = []
    options: dict[str, list[str]] = {}
    for line in parser.parse(str(path), constraint=False):
        if line.requirement is not None:
            wanted.append(line.requirement)
            continue
        for name, value in vars(line.opts).items():
            if name in ("index_url", "extra_index_urls", "find_links", "trusted_hosts") and value:
                options.setdefault(name, []).extend([value] if isinstance(value, str) else value)
    return wanted, options


def names_of(read: RequirementLines) -> list[str]:
    return sorted(
        [each.name for each in read.requirements]
        + [f"git+{each.url}" for each in read.sources]
        + [each.path for each in read.folders]
    )


def name_of(line: str) -> str:
    if line.startswith("git+"):
        return line.partition("#")[0].partition("@")[0]
    if line.startswith("."):
        return line.partition("[")[0]
    return (
        parse_wheel_filename(line.rsplit("/", 1)[1])[0] if "://" in line else canonicalize_name(Requirement(line).name)
    )


@pytest.mark.parametrize("name", SETS)
def test_files_of_real_projects_are_read_as_pip_reads_them(name: str, tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(SETS[name])
    read = read_requirements(SETS[name], str(path))
    assert read.problems == ()
    wanted, options = by_pip(path)
    assert names_of(read) == sorted(map(name_of, wanted))
    settings = settings_with(PipSettings(), read.options)
    assert settings == PipSettings(
        index_url="".join(options.get("index_url", [])),
        extra_index_urls=tuple(options.get("extra_index_urls", [])),
        find_links=tuple(options.get("find_links", [])),
        trusted_hosts=tuple(options.get("trusted_hosts", [])),
    )


def test_one_index_line_hides_nothing() -> None:
    read = read_requirements("--extra-index-url https://a.example\npandas=2\nsix\n--user\n", "r.txt")
    assert [problem.partition(": ")[0] for problem in read.problems] == ["r.txt line 2", "r.txt line 4"]
    assert [each.name for each in read.requirements] == ["six"]


def test_an_index_replaces_those_before_it_and_extends_those_of_this_machine() -> None:
    mine = PipSettings(index_url="https://mine.example", extra_index_urls=("https://more.example",))
    read = read_requirements("--extra-index-url https://b.example\n", "r").options
    assert settings_with(mine, read).extra_index_urls == ("https://more.example", "https://b.example")
    read = read_requirements("--extra-index-url https://b.example\n-i https://c.example\n--no-index", "r").options
    assert settings_with(mine, read) == PipSettings(index_url="https://c.example", no_index=True)


def test_a_password_may_come_from_a_variable_and_is_in_no_message() -> None:
    line = "--index-url https://me:${TOKEN}@packages.example/simple\n"
    read = read_requirements(line, "r", {"TOKEN": "hunter2"})
    assert settings_with(PipSettings(), read.options).index_url == "https://me:hunter2@packages.example/simple"
    assert "hunter2" not in repr(read)
    (problem,) = read_requirements("--index-url https://me:hunter2@packages.example/simple", "r").problems
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("six", Choice()),
        ("--pre", Choice(prereleases=True)),
        ("--no-binary a,B_c\n--only-binary d", Choice(no_binary=("a", "b-c"), only_binary=("d",))),
        ("--no-binary a\n--only-binary a", Choice(only_binary=("a",))),
        ("--no-binary a\n--only-binary :all:", Choice(only_binary=(":all:",))),
        ("--no-binary a,b\n--no-binary :none:", Choice()),
    ],
)
def test_which_files_count(text: str, expected: Choice) -> None:
    assert choice_of(read_requirements(text, "r").options) == expected


BASE = ExtendedBase(
    reference="my/base:1",
    identifier="sha256:" + "b" * 64,
    python="/usr/bin/python3",
    version="3.11",
    glibc="2.36",
    machine="x86_64",
    environment={},
    distributions=(BaseDistribution(name="torch", version="2.13.0+cpu"),),
)


@pytest.mark.parametrize(
    ("address", "torch", "kept"),
    [
        ("https://vendor.example/whl/cu130", "2.13.0+cpu", False),
        ("https://vendor.example/whl/cpu", "2.13.0+cpu", True),
        ("https://vendor.example/whl/cu130", "2.15.0", False),
        ("https://vendor.example/whl/cu130", "", True),
        ("https://packages.example/cu130", "2.13.0+cpu", True),
    ],
)
def test_the_index_of_another_build_of_torch_is_a_note(address: str, torch: str, kept: bool) -> None:
    rows = (BaseDistribution(name="torch", version=torch),) if torch else ()
    option = OptionLine(place="r line 1", name="--extra-index-url", value=address)
    found, notes = without_vendor((option,), replace(BASE, distributions=rows), {"vendor.example"})
    assert found == ((option,) if kept else ())
    assert notes == ([] if kept else [f"r line 1: not needed: torch {torch} is the image's own"])


@pytest.mark.parametrize(
    ("file", "made_for"),
    [
        ("x-1-py3-none-any.whl", ""),
        ("x-1-py2.py3-none-any.whl", ""),
        ("x-1-cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", ""),
        ("x-1-cp311-cp311-linux_x86_64.whl", ""),
        ("x-1-py3-none-manylinux_2_36_x86_64.whl", ""),
        ("x-1-cp310-cp310-linux_x86_64.whl", "cp310 on linux_x86_64"),
        ("x-1-cp311-cp311-win_amd64.whl", "cp311 on win_amd64"),
        ("x-1-cp311-cp311-manylinux_2_39_x86_64.whl", "cp311 on manylinux_2_39_x86_64"),
        ("x-1-py3-none-manylinux2014_aarch64.whl", "py3 on manylinux2014_aarch64"),
    ],
)
@pytest.mark.parametrize("where", ["https://h.example/v1/", "./dist/"])
def test_a_wheel_for_another_python_or_platform_is_refused(file: str, made_for: str, where: str) -> None:
    read = read_requirements(f"{where}{file}", "r")
    assert read.problems == ()
    found = misfits(read.requirements, BASE)
    assert len(found) == bool(made_for)
    assert made_for in "".join(found)
    assert not found or "the base has Python 3.11 on x86_64 with glibc 2.36" in found[0]


def test_a_wheel_for_another_torch_is_refused_where_its_version_says_so() -> None:
    for local, wrong in (("cu12torch2.6cxx11abiTRUE", True), ("cu12torch2.13cxx11abiTRUE", False), ("cpu", False)):
        read = read_requirements(f"https://h.example/flash_attn-2.7.3+{local}-cp311-cp311-linux_x86_64.whl", "r")
        found = misfits(read.requirements, BASE)
        assert [problem.endswith("is made for torch 2.6, and the base has 2.13.0+cpu") for problem in found] == [
            True
        ] * wrong


def test_the_tags_of_a_base_are_in_pips_order() -> None:
    tags = [str(tag) for tag in BASE.tags]
    expected = [
        "cp311-cp311-manylinux_2_36_x86_64",
        "cp311-cp311-manylinux2014_x86_64",
        "cp311-cp311-linux_x86_64",
        "cp311-abi3-manylinux_2_36_x86_64",
        "py311-none-manylinux_2_36_x86_64",
        "py3-none-manylinux_2_31_x86_64",
        "py3-none-any",
    ]
    assert sorted(expected, key=tags.index) == expected


def test_a_folder_keeps_what_the_line_says_of_it() -> None:
    (found,) = read_requirements("mine @ file:///home/me/a%20b#egg=mine ; python_version > '3'", "r").folders
    assert (found.path, found.name, found.marker) == ("/home/me/a b", "mine", "python_version > '3'")
