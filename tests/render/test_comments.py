"""What counts as words of a file, and what does not: a record of a build outlives a change of words."""

from __future__ import annotations

import ast
import re

import pytest

from trainworks.facts.rows import Facts
from trainworks.render.comments import without_comments

SAME = {
    "a comment": ("a.py", "x = 1\n", "# Why.\nx = 1  # So.\n"),
    "a comment within brackets": ("a.py", "x = (\n    1,\n)\n", "x = (  # So.\n    # Why.\n    1,\n)\n"),
    "a comment that ends a file": ("a.py", "x = 1\n", "x = 1\n# The end."),
    "a comment that ends a block": ("a.py", "if x:\n    y\nz\n", "if x:\n    y\n    # So.\n# And.\nz\n"),
    "a docstring": ("a.py", '"""One."""\nx = 1\n', '"""Two.\n\nMore.\n"""\n\nx = 1\n'),
    "a docstring that is new": ("a.py", "def f():\n    return 1\n", "def f():\n    'So.'\n    return 1\n"),
    "a docstring of a value": ("a.py", "X = 1\nY = 2\n", 'X = 1\n"""What it is."""\nY = 2\n'),
    "a docstring in two parts": ("a.py", "x = 1\n", "'a' \\\n'b'\nx = 1\n"),
    "blank lines": ("a.py", "x = 1\ny = 2\n", "x = 1\n\n\ny = 2\n"),
    "a program without an ending": ("bin/a", "#!/usr/bin/python3 -I\nx = 1\n", "#!/usr/bin/python3 -I\n# A.\nx = 1\n"),
    "a shell script": ("bin/a", "#!/bin/sh\nset -e\n", "#!/bin/sh\n# What it does.\n\n  # So.\nset -e\n"),
    "before a heredoc": ("a.sh", "cat <<E\n# a\nE\n", "# Why.\ncat <<E\n# a\nE\n"),
    "a file of settings": ("etc/nccl.conf", "A=1\n", "# Why.\nA=1\n"),
    "a distribution": ("pyproject.toml", "a = 1\n[b]\nc = 2\n", "# Why.\na = 1 # so\n\n[b]\nc = 2\n"),
    "settings of a linter": ("pyproject.toml", "[tool.ruff]\na = 1\n", "[tool.ruff]\na = 2\n[tool.mypy]\nb = 1\n"),
    "C": ("a.c", '#include "b.h"\nint x;\n', '/* Why,\n   and how. */\n#include "b.h"\n\nint x; // so\n'),
    "a Dockerfile": (
        "Dockerfile",
        "FROM a AS b\nRUN a \\\n && b\n",
        "# b: so\n\nFROM a AS b\nRUN a \\\n # so\n && b\n",
    ),
}

OTHER = {
    "a value": ("a.py", "x = 1\n", "x = 2\n"),
    "a text": ("a.py", "x = 'a'\n", "x = 'a # b'\n"),
    "an f-string": ("a.py", "x = f'{a} # {b}'\n", "x = f'{a} # {c}'\n"),
    "the text of an f-string": ("a.py", "x = f'{a}  {{ü'\n", "x = f'{a} {{ü'\n"),
    "an f-string that calls": ("a.py", "f'{a()}'\n", "f'{b()}'\n"),
    "a text of several lines": ("a.py", 'x = """\n\n# a\n"""\n', 'x = """\n# a\n"""\n'),
    "a text that is handed over": ("a.py", "f(\n    '''a'''\n)\n", "f(\n    '''b'''\n)\n"),
    "a block": ("a.py", "if x:\n    y\nz\n", "if x:\n    y\n    z\n"),
    "a docstring that is read": ("a.py", '"""One."""\nprint(__doc__)\n', '"""Two."""\nprint(__doc__)\n'),
    "what cannot be read": ("a.py", "x = (\n", "x = (  # So.\n"),
    "what is not text": ("a.py", "# \udcff\n", "# \udcfe\n"),
    "the interpreter": ("bin/a", "#!/bin/sh\n", "#!/bin/sh -e\n"),
    "a parameter of a shell": ("a.sh", "echo ${a#b}\n", "echo ${a#c}\n"),
    "a heredoc": ("a.sh", "cat <<E\n# a\nE\n", "cat <<E\n# b\nE\n"),
    "a setting": ("etc/nccl.conf", "A=1\n", "A=2\n"),
    "a distribution": ("pyproject.toml", "a = '# b'\n", "a = '# c'\n"),
    "settings of what builds it": ("pyproject.toml", "[tool.setuptools]\na = 1\n", "[tool.setuptools]\na = 2\n"),
    "settings of a plug-in that builds": (
        "pyproject.toml",
        "build-system.requires = ['setuptools-scm>=8']\ntool.setuptools_scm.a = 1\n",
        "build-system.requires = ['setuptools-scm>=8']\ntool.setuptools_scm.a = 2\n",
    ),
    "a directive of C": ("a.c", "#define A 1\n", "#define A 2\n"),
    "a text of C": ("a.c", 'char *a = "/* b */";\n', 'char *a = "/* c */";\n'),
    "an instruction": ("Dockerfile", "RUN a '#b'\n", "RUN a '#c'\n"),
    "data": ("requirements/a.txt", "# a\n", "# b\n"),
}


@pytest.mark.parametrize("what", SAME)
def test_words_do_not_count(what: str) -> None:
    path, one, other = SAME[what]
    assert without_comments(path, one.encode()) == without_comments(path, other.encode())


@pytest.mark.parametrize("what", OTHER)
def test_everything_else_does(what: str) -> None:
    path, one, other = OTHER[what]
    found = [without_comments(path, text.encode(errors="surrogateescape")) for text in (one, other)]
    assert found[0] != found[1]


def tree(text: str | bytes) -> str:
    """Return a program as Python's parser sees it, without the statements that are only a string."""
    program = ast.parse(text)
    for node in ast.walk(program):
        for name, body in ast.iter_fields(node):
            if isinstance(body, list):
                setattr(node, name, [each for each in body if not is_string(each)])
    return ast.dump(program)


def is_string(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def laid_out(words: str) -> str:
    """Return what is left of a program as one that Python reads: a block of which only a string was has one again."""
    lines: list[str] = []
    line: list[str] = []
    depth = 0
    for word in words.replace("\1\0\2", "\1\0''\0\n\0\2").split("\0"):
        if word == "\1":
            depth += 1
        elif word == "\2":
            depth -= 1
        elif word == "\n":
            lines.append(f"{' ' * depth}{' '.join(line)}")
            line = []
        else:
            line.append(word)
    return "\n".join(lines)


def test_of_every_program_in_an_image_the_code_is_left(facts: Facts) -> None:
    programs = [file for file in facts.files if file.path.endswith(".py")]
    assert len(programs) > 100
    for file in programs:
        words = without_comments(file.path, file.content).decode()
        assert tree(laid_out(words)) == tree(file.content), file.path


def test_no_program_in_an_image_reads_docstrings_of_another(facts: Facts) -> None:
    """If one did, leaving docstrings out would be wrong."""
    programs = [file for file in facts.files if "/tests/" not in file.path]
    read = re.compile(rb"getdoc|__doc__(?! = f)")  # what a program writes there is no statement that was left out
    assert [file.path for file in programs if read.search(file.content)] == []
