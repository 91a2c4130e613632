"""The command line's grammar."""

from __future__ import annotations

import argparse
from pathlib import Path

STAGES = ("plan", "render", "build", "test")
"""How far ``--until`` goes; each includes those before it."""

DESCRIPTION = """\
Builds a container image for training on Amazon SageMaker and clusters like it, and proves what is in it.

  python build.py --list                                     what can be built
  python build.py --framework pytorch --cuda cu121           build and test the newest PyTorch for CUDA 12.1
  python build.py --framework pytorch --cuda cu121 --until plan        show what it would be made of
  python build.py --framework pytorch --cuda cpu --until render --output context   write its Dockerfile and files
  python build.py extend --help                              an image with your requirements and your code
"""

EPILOG = """\
Results go to stdout, progress and errors to stderr. Exit status: 0 done, 2 wrong command line, 3 malformed facts,
4 unknown name, 5 recipe, 6 no engine, 7 build failed, 8 image tests failed, 9 output, 10 this machine, 11 lock,
12 extension, 13 incompatible parts, 14 findings of lint, 130 interrupted.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py``."""
    parser = argparse.ArgumentParser(
        prog="build.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to build")
    what.add_argument("--framework", metavar="NAME", help="for example pytorch")
    what.add_argument("--cuda", metavar="CELL", help="cpu, or for example cu121")
    what.add_argument("--framework-version", metavar="VERSION", help="default: the newest for this CUDA")
    what.add_argument("--python", metavar="VERSION", help="for example 3.13; default: the oldest of the target")
    what.add_argument(
        "--sources",
        choices=("packages", "vendor"),
        default="packages",
        help="packages: Debian and Python packages only (default); vendor: the vendors' own installers",
    )
    what.add_argument(
        "--with", dest="with_components", action="append", default=[], metavar="COMPONENT", help="add an optional one"
    )
    what.add_argument(
        "--without", dest="without_components", action="append", default=[], metavar="COMPONENT", help="leave one out"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--list", action="store_true", help="show every target, and which were built for real")
    how.add_argument("--until", choices=STAGES, default="test", help="stop after this stage (default: test)")
    how.add_argument("--engine", metavar="NAME", help="docker or buildah; default: the first that answers")
    how.add_argument("--output", type=Path, metavar="DIR", help="leave the build context in this folder")
    how.add_argument("--format", choices=("text", "json"), default="text", help="of the result on stdout")
    how.add_argument("--junit", type=Path, metavar="FILE", help="write the image tests' results as JUnit XML")
    how.add_argument(
        "--mirror", metavar="DIR|URL", help="take every download from here, and from nowhere else (`build.py mirror`)"
    )
    how.add_argument("--no-cache", action="store_true", help="build every step again")
    how.add_argument("--verbose", action="store_true", help="show every line that the build prints")
    how.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return parser


def lock_parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py lock``."""
    parser = argparse.ArgumentParser(
        prog="build.py lock",
        description=(
            "Records in images/lock what targets are made of: their Python files, resolved and pinned by hash; hash "
            "and size of everything else that is downloaded, signatures checked; digests of base images."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--only", action="append", default=[], metavar="TARGET", help="default: every target")
    parser.add_argument(
        "--check", action="store_true", help="write nothing: hold every lock against the rows, and say what is unlocked"
    )
    parser.add_argument("--strict", action="store_true", help="with --check: what is unlocked is a failure too")
    parser.add_argument(
        "--mirror", type=Path, metavar="DIR", help="take files that lie here, and leave here what is downloaded"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return parser


def extend_parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py extend``."""
    parser = argparse.ArgumentParser(
        prog="build.py extend",
        description="Makes an image of a base image, requirements and code, and proves what is in it.",
        allow_abbrev=False,
    )
    parser.add_argument("--base", required=True, metavar="IMAGE", help="an image of ours, or a registry's")
    parser.add_argument("--tag", required=True, metavar="IMAGE", help="name of the new image, such as my/train:1")
    parser.add_argument("--requirements", type=Path, metavar="FILE", help="to install; resolved and hashed if needed")
    parser.add_argument("--source", type=Path, metavar="DIR", help="copied to /opt/ml/code")
    parser.add_argument("--entry-point", metavar="FILE", help="below --source; default: the job names it")
    parser.add_argument("--until", choices=STAGES[1:], default="test", help="stop after this stage (default: test)")
    parser.add_argument("--engine", metavar="NAME", help="docker or buildah; default: the first that answers")
    parser.add_argument("--output", type=Path, metavar="DIR", help="leave the build context in this folder")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the result on stdout")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the image tests' results as JUnit XML")
    parser.add_argument("--no-cache", action="store_true", help="build every step again")
    parser.add_argument("--verbose", action="store_true", help="show every line that the build prints")
    parser.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return parser


def mirror_parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py mirror``."""
    parser = argparse.ArgumentParser(
        prog="build.py mirror",
        description=(
            "Fills a folder with everything that targets download: the files of their components, git commits as "
            "bundles, their Python files; each verified. `--mirror DIR`, or its address, builds from it."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="new, or filled before: only what is missing comes")
    parser.add_argument("--only", action="append", default=[], metavar="TARGET", help="default: every target")
    parser.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return parser


def schema_parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py schema``."""
    parser = argparse.ArgumentParser(
        prog="build.py schema",
        description="Writes the JSON schemas of the files in images/ to images/schema, from the types of the rows.",
        allow_abbrev=False,
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return parser


def check_parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py check``."""
    parser = argparse.ArgumentParser(
        prog="build.py check",
        description="Plans targets without building anything, and says which parts do not go together, and why; "
        "see docs/compatibility.md.",
        epilog="Exit status: 0 all fit, 3 malformed facts, 4 unknown name, 11 a lock does not fit, 13 parts do not.",
        allow_abbrev=False,
    )
    parser.add_argument("--only", action="append", default=[], metavar="TARGET", help="default: every target")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the result on stdout")
    parser.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return parser


def lint_parser() -> argparse.ArgumentParser:
    """Return the parser of ``build.py lint``."""
    parser = argparse.ArgumentParser(
        prog="build.py lint",
        description="Finds defects in Dockerfiles, and shows hadolint's findings beside them; see docs/lint.md.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a Dockerfile, ours or any other")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the findings on stdout")
    parser.add_argument("--root", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    return parser
