"""``build.py check DOCKERFILE`` on small files: where a rule must speak, on which line, and where it must not."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainworks.facts.rows import Facts
from trainworks.inspect.dockerfile_check import check_text

CUDA_12_4 = "FROM nvidia/cuda:12.4.1-cudnn-devel-ubuntu22.04\n"
CUDA_13 = "FROM nvidia/cuda:13.0.1-devel-ubuntu22.04\n"
AMAZON = "FROM nvidia/cuda:12.9.1-devel-amzn2023\n"
EFA = "RUN tar xf /aws-efa-installer-{}.tar.gz && ./efa_installer.sh -y{}"
PLUGIN = "RUN git clone -b v{}-aws https://github.com/aws/aws-ofi-nccl.git && make -C aws-ofi-nccl"
OLD_FOLDER = "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu"
WHEEL = "RUN pip install smdistributed_{}-cp310.whl"

# Rule, lines of a Dockerfile after `FROM debian:12` (which is line 1), lines on which the rule finds something.
# A text with a FROM of its own is the whole file.
VERSIONS: list[tuple[str, str, list[int]]] = [
    ("torch-python-3.13", "FROM python:3.13\nRUN pip install torch==2.4.1", [2]),
    ("tensorflow-2.5-cuda", f"{CUDA_12_4}RUN pip install tensorflow==2.10.0", [2]),
    (
        "tensorflow-cudnn-9",
        "FROM nvidia/cuda:12.5.1-cudnn8-devel-ubuntu22.04 AS a\nFROM a\nRUN pip install tensorflow==2.18.0",
        [3],
    ),
    ("tensorflow-cudnn-8", "FROM nvidia/cuda:12.3.1-cudnn9-devel-ubuntu22.04\nRUN pip install tensorflow==2.16.1", [2]),
    ("nccl-build-is-not-newer", f"{CUDA_12_4}RUN apt-get install -y libnccl2=2.27.7-1+cuda12.9", [2]),
    (
        "builder-cuda-is-image-cuda",
        "FROM nvidia/cuda:12.8.0-devel-ubuntu22.04 AS a\nFROM nvidia/cuda:12.8.1-base-ubuntu22.04\nCOPY --from=a /u /u",
        [3],
    ),
    (
        "wheel-cuda-12",
        f"{CUDA_13}RUN pip install ./flash_attn-2.8.3+cu12torch2.9cxx11abiTRUE-cp312-linux_x86_64.whl",
        [2],
    ),
    (
        "efa-installer-ubuntu20.04",
        "FROM ubuntu:20.04\nARG EFA_VERSION=1.43.1\nRUN curl -fO https://a.example/e-$EFA_VERSION",
        [2],
    ),
    ("efa-installer-debian12", EFA.format("1.34.0", ""), [2]),
    ("efa-installer-ngc", AMAZON + EFA.format("1.48.0", ""), [2]),
    ("efa-installer-1.47.0", EFA.format("1.47.0", ""), [2]),
    ("aws-ofi-nccl-broadcast-hang", EFA.format("1.47.0", ""), [2]),
    ("aws-ofi-nccl-broadcast-hang", PLUGIN.format("1.18.0"), [2]),
    (
        "aws-ofi-nccl-broadcast-hang",
        "ADD https://github.com/aws/aws-ofi-nccl/releases/download/v1.19.0/a.tar.gz /a",
        [2],
    ),
    (
        "aws-ofi-nccl-broadcast-hang",
        "ARG OFI_NCCL_VER=v1.19.0\nRUN git clone https://github.com/aws/aws-ofi-nccl && git checkout $OFI_NCCL_VER",
        [2],
    ),
    ("aws-ofi-nccl-broadcast-hang", "RUN V=1.19.0 && \\\n wget -q https://a.example/aws-ofi-nccl-$V.tar.gz", [2]),
    (
        "aws-ofi-nccl-nccl-2.17.1",
        f"RUN git clone -b v2.12.10-1 https://github.com/NVIDIA/nccl\n{PLUGIN.format('1.13.2')}",
        [3],
    ),
    (
        "aws-ofi-nccl-libfabric-1.18",
        f"ENV LIBFABRIC_VERSION=1.15.2\nRUN curl -fO https://a.example/l-$LIBFABRIC_VERSION\n{PLUGIN.format('1.9.1')}",
        [4],
    ),
    (
        "efa-installer-plugin-folder",
        f"RUN tar xf aws-efa-installer-1.46.0.tar.gz\nENV A=1 LD_LIBRARY_PATH={OLD_FOLDER}:/b",
        [3],
    ),
    (
        "efa-installer-plugin-folder",
        f"RUN tar xf aws-efa-installer-1.44.0.tar.gz \\\n && export LD_LIBRARY_PATH={OLD_FOLDER}",
        [2],
    ),
    ("nccl-2.19-sync-memops", "RUN apt-get install libnccl2=2.26.2-1\nRUN tar xf aws-efa-installer-1.27.0.tar.gz", [3]),
    ("smddp-open-mpi", f"RUN tar xf openmpi-5.0.3.tar.gz\n{WHEEL.format('dataparallel-2.3.0')}", [3]),
    ("smp-torch", f"RUN pip install torch==2.1.0\n{WHEEL.format('modelparallel-1.15.0')}", [3]),
    ("smp-cuda", f"{CUDA_12_4}{WHEEL.format('modelparallel-1.15.0')}", [2]),
    ("smddp-tensorflow", f"RUN pip install tensorflow==2.12.0\n{WHEEL.format('dataparallel-1.8.0')}", [3]),
    ("smp-tensorflow", f"RUN pip install tensorflow==2.7.0\n{WHEEL.format('modelparallel-1.8.0')}", [3]),
    ("smddp-openssl", f"FROM ubuntu:22.04\n{WHEEL.format('dataparallel-2.3.0')}", [2]),
]

STEPS: list[tuple[str, str, list[int]]] = [
    ("aws-ofi-nccl-broadcast-hang", f"ARG PLUGIN=1.19.0\n{step}", [3])
    for step in (
        "RUN <<EOT\nset -e\ngit clone -b v1.19.0-aws https://github.com/aws/aws-ofi-nccl\nEOT",
        "RUN bash -ec 'set -x; git clone -b v1.19.0-aws https://github.com/aws/aws-ofi-nccl'",
        'RUN ["bash", "-c", "git clone -b v1.19.0-aws https://github.com/aws/aws-ofi-nccl"]',
        "ONBUILD RUN git clone -b v1.19.0-aws https://github.com/aws/aws-ofi-nccl",
        "RUN git version \\\n # why\n\n && git clone -b 'v1.19.0-aws' https://github.com/aws/aws-ofi-nccl && true",
        "RUN git clone -b v$PLUGIN-aws https://github.com/aws/aws-ofi-nccl",
    )
]
"""How steps are written."""

GOOD: list[str] = [
    "RUN pip install torch==2.6.0+cu124 torchvision==0.21.0 && echo torch==2.6.0+cu121",
    # the wheels bring their own CUDA and cuDNN
    "FROM nvidia/cuda:12.6.3-cudnn8-devel-ubuntu22.04\nRUN pip install torch==2.4.1",
    f"{CUDA_12_4}RUN pip install 'tensorflow[and-cuda]==2.20.0'",
    f"{CUDA_12_4}RUN pip install torch==2.6.0 --index-url https://download.pytorch.org/whl/cu124",
    f"{CUDA_12_4}RUN apt-get install -y libnccl2=2.21.5-1+cuda12.4",
    f"{CUDA_12_4}RUN apt-get install -y libnccl2=2.20.5-1+cuda12.2",
    f"{CUDA_12_4}RUN pip install ./flash_attn-2.8+cu12torch2.6.whl",
    # two versions of one part: it is not known which one counts
    "FROM ubuntu:20.04\nRUN a efa/aws-efa-installer-1.43.0.tar.gz || a efa/aws-efa-installer-1.42.0.tar.gz",
    AMAZON + EFA.format("1.49.0", " -n --disable-ngc"),
    # the installer runs in a script of the build context
    "FROM nvidia/cuda:12.9.1-devel-amzn2023\nARG EFA_VERSION=1.49.0\nCOPY efa.sh /\nRUN bash /efa.sh $EFA_VERSION",
    # the plugin of the installer is replaced
    f"{EFA.format('1.47.0', '')}\n{PLUGIN.format('1.20.0')}",
    # versions of another stage
    "FROM python:3.13 AS a\nRUN python -V\nFROM python:3.11\nRUN pip install torch==2.4.1",
    f"RUN tar xf aws-efa-installer-1.50.0.tar.gz\nENV LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:{OLD_FOLDER}",
    f"RUN tar xf aws-efa-installer-1.43.1.tar.gz\nENV LD_LIBRARY_PATH={OLD_FOLDER}",
    "FROM nvidia/cuda:12.8.1-base\nARG CUDA_VERSION=12.8\nRUN apt-get install -y cuda-nvcc-$CUDA_VERSION",
    # a torch wheel brings its own CUDA, whatever the base image has
    "FROM nvidia/cuda:12.4.1-runtime-ubuntu22.04\nRUN pip install torch==2.9.0 --index-url https://download.pytorch.org/whl/cu130",
    "FROM nvidia/cuda:11.8.0-runtime-ubuntu22.04\nRUN pip install torch==2.5.1",
    # text that a quote without its partner ends
    "RUN cat <<EOF > /motd\ndon't install torch==1.0\nEOF",
]


def found(text: str, facts: Facts) -> list[tuple[int, str]]:
    whole = f"{text}\n" if "FROM " in text else f"FROM debian:12\n{text}\n"
    return [(finding.line, finding.rule) for finding in check_text(whole, facts)]


def without_advice(text: str, facts: Facts) -> list[tuple[int, str]]:
    """Leave out the table's advice, which is given wherever a plugin or smddp is installed."""
    advice = {rule.name for rule in facts.rules if rule.severity == "advise"}
    return [(line, rule) for line, rule in found(text, facts) if rule not in advice]


@pytest.mark.parametrize(("rule", "text", "lines"), VERSIONS + STEPS)
def test_found_on_its_line(rule: str, text: str, lines: list[int], facts: Facts) -> None:
    assert rule in {each.name for each in facts.rules}
    assert sorted({line for line, name in found(text, facts) if name == rule}) == lines


@pytest.mark.parametrize("text", GOOD)
def test_nothing_where_nothing_is_wrong(text: str, facts: Facts) -> None:
    assert without_advice(text, facts) == []


def test_every_part_is_asked_about_and_its_patterns_give_a_value(facts: Facts) -> None:
    asked = {name for rule in facts.rules for name in (*rule.when, *rule.require)}
    asked |= {
        name for rule in facts.rules for each in rule.require.values() for name in re.findall(r"\{([\w.]+)\}", each)
    }
    assert {part.name for part in facts.dockerfile_parts} <= asked
    assert all(re.compile(pattern).groups for part in facts.dockerfile_parts for pattern in part.patterns)


# A version counts where something installs it.

HANGS = "ARG AWS_OFI_NCCL_VERSION=v1.19.0\n"


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (f"{HANGS}ENV NCCL_DEBUG=WARN", set()),
        (f"{HANGS}RUN echo $AWS_OFI_NCCL_VERSION > /version && apt-get update", set()),
        (
            f"{HANGS}RUN wget -q https://a.example/p-$AWS_OFI_NCCL_VERSION && tar xf p",
            {"aws-ofi-nccl-broadcast-hang"},
        ),
        # What nothing reads does not hide what is installed, nor the other way round.
        (f"ARG OFI_NCCL_VERSION=1.20.0\n{PLUGIN.format('1.19.0')}", {"aws-ofi-nccl-broadcast-hang"}),
        (f"{HANGS}{PLUGIN.format('1.20.0')}", set()),
    ],
)
def test_a_variable_that_nothing_reads_installs_nothing(text: str, rules: set[str], facts: Facts) -> None:
    assert {rule for _, rule in without_advice(text, facts)} == rules


# Comments that ignore a rule.

IGNORE = "# trainworks: ignore=efa-installer-plugin-folder,aws-ofi-nccl-broadcast-hang "
HANG = PLUGIN.format("1.19.0")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"{IGNORE}a test image\n# another comment\nRUN true \\\n && {HANG[4:]}\n", []),
        (f"RUN true \\\n {IGNORE}a test image\n && {HANG[4:]}", []),
        (f"{IGNORE}\n{HANG}", [3]),
        (f"# trainworks: ignore=efa-installer-plugin-folder why\n{HANG}", [3]),
        (f"{HANG}\n{IGNORE}no instruction follows", [2]),
    ],
)
def test_a_comment_ignores_rules_in_the_next_instruction_and_needs_a_reason(
    text: str, lines: list[int], facts: Facts
) -> None:
    assert [line for line, _ in without_advice(text, facts)] == lines


# Texts of every kind.

WORDS = st.sampled_from(
    [
        *("FROM", "RUN", "ARG", "ENV", "COPY", "ADD", "ONBUILD", "SHELL", "LABEL", "from", "AS", "a", "scratch"),
        *("\\\n", "\n", "\n\n", "\r\n", "<<EOF", "EOF\n", "<<-'X'", "X\n", "# c\n", "# escape=`\n", "`\n", "\t", " "),
        *("--from=a:latest", "--mount=type=bind,from=b", "--mount=", '["a"', '"]', '["a", "-c", "b>=1"]', "$(", ")"),
        *("$V", "${V:-", "}", "V=1", "'", '"', "\\", "`", "[[", "]]", "((", ">", ">=1", "<", "|", "||", "&&", ";"),
        *("if", "then", "fi", "{", "sh -c", "bash -ec '", "pip install", "git clone", "curl", "-o", "-", "--"),
        *("https://a/b", "sudo -u", "env", "xargs", "é", "\0", "\ud800", "\u2028", "# trainworks: ignore=", "x"),
    ]
)
TEXTS = st.one_of(st.lists(WORDS, max_size=25).map(" ".join), st.lists(WORDS, max_size=25).map("".join), st.text())


@settings(deadline=None, max_examples=150)
@given(TEXTS)
@example("FROM")
@example("FROM a\nRUN \\")
@example("FROM a\nCOPY --from=\n")
@example("FROM a\nENV\nARG\nADD\nSHELL []\nONBUILD")
@example("FROM a\nENV A\nENV =\nRUN <<EOF\n#!\nEOF\nRUN []")
def test_no_text_is_too_odd(facts: Facts, text: str) -> None:
    last = text.replace("\r\n", "\n").count("\n") + 1
    for finding in check_text(text, facts):
        assert 1 <= finding.line <= last
        assert finding.what


@pytest.mark.parametrize(
    "script",
    [
        " \\\n && ".join(f"step-{number} > log" for number in range(1_200)),
        " | ".join(f"step-{number}" for number in range(1_500)),
        "( " * 1_100 + "step" + " )" * 1_100,
        'echo "$(' * 40 + "step" + ')"' * 40,
        "'" * 5_001 + '"' * 5_001,
    ],
    ids=["and", "pipe", "parentheses", "substitutions", "quotes"],
)
def test_a_long_or_deep_script_ends_nothing(script: str, facts: Facts) -> None:
    text = f"RUN {script}\n{PLUGIN.format('1.19.0')}"
    assert without_advice(text, facts)[-1] == (text.count("\n") + 2, "aws-ofi-nccl-broadcast-hang")
