"""Completion: what can follow, by grammar and facts; and real shells on a terminal in which TAB is pressed."""

from __future__ import annotations

import os
import pty
import resource
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from trainworks.cli.commands import COMMANDS, grammar_of
from trainworks.cli.complete import Answer, complete
from trainworks.cli.grammar import CPU_TARGET, TARGET
from trainworks.engine import ENGINES
from trainworks.facts.rows import Facts
from trainworks.facts.skim import skim

SECONDS = 20
"""How long a shell may take to answer on a busy machine."""


def words_of(answer: Answer) -> list[str]:
    return [candidate.word for candidate in answer.candidates]


# What can follow.


def test_commands_come_first(root: Path) -> None:
    answer = complete([""], root)
    assert tuple(words_of(answer)) == COMMANDS
    assert [each.note for each in answer.candidates] == [grammar_of(name).summary for name in COMMANDS]
    assert words_of(complete(["pr"], root)) == ["promote", "prove"]
    assert words_of(complete(["help", "pr"], root)) == ["promote", "prove"]


def test_options_that_are_given_are_not_offered_again(root: Path) -> None:
    offered = words_of(complete(["push", TARGET, "--engine", "docker", "--repository", "a", "--"], root))
    assert "--engine" not in offered
    assert {"--repository", "--tag", "--format"} <= set(offered), "which may be repeated, or are still to come"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--framework", "pytorch", "--cuda", ""], ["cpu", "cu121", "cu124", "cu126", "cu128", "cu130", "cu132"]),
        (["--cuda", "cu125", "--framework", ""], ["tensorflow"]),
        (["--cuda=cu125", "--framework=t"], ["--framework=tensorflow"]),
        (["--framework", "mxnet", "--sources", "vendor", "--cuda", ""], ["cu112"]),
        (["build", "--framework", "pytorch", "--cuda", "cu121", "--python", ""], ["3.11"]),
        (["--until", "p"], ["plan"]),
        (["report", "--engine", ""], list(ENGINES)),
        (["report", "--engine=d"], ["--engine=docker"]),
        (["report", CPU_TARGET[:-3]], [CPU_TARGET]),
        (["check", "--only", CPU_TARGET, "--only", CPU_TARGET[:-3]], []),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["--", "--fr"], []),
        (["nonsense", ""], []),
    ],
)
def test_values(words: Sequence[str], expected: Sequence[str], root: Path) -> None:
    answer = complete(words, root)
    assert [word for word in words_of(answer) if not word.startswith("--") or "=" in word] == list(expected)


def test_components_are_those_that_the_target_lacks_or_has(root: Path, facts: Facts) -> None:
    words = ["--framework", "pytorch", "--cuda", "cu121"]
    optional, present = (
        {row.name for row in facts.components if not row.required and row.default == default}
        for default in (False, True)
    )
    added, left = (set(words_of(complete([*words, option, ""], root))) for option in ("--with", "--without"))
    assert "rmm-python" in added <= optional
    assert "open-mpi" in left <= present


@pytest.mark.parametrize(
    ("words", "paths"),
    [
        (["lint", ""], "files"),
        (["mirror", ""], "folders"),
        (["--junit", ""], "files"),
        (["push", "x", "--tag", ""], "none"),
    ],
)
def test_paths_are_the_shells_own(words: Sequence[str], paths: str, root: Path) -> None:
    assert complete(words, root) == Answer(paths=paths)  # type: ignore[arg-type]


def test_the_names_are_those_of_the_facts(root: Path, facts: Facts) -> None:
    seen = skim(root)
    assert list(map(seen.name_of, seen.targets)) == list(map(facts.name_of, facts.targets))
    assert [each.name for each in seen.components] == [each.name for each in facts.components]


def test_spoiled_facts_are_left_out(checkout: Path) -> None:
    (checkout / "images" / "tensorflow.toml").write_text("framework = \n", encoding="utf-8")
    (checkout / "images" / "mxnet.toml").write_text(
        'framework = "mxnet"\ntarget = [7, {cuda = "cpu"}]\n', encoding="utf-8"
    )
    assert {row.framework for row in skim(checkout).targets} == {"pytorch"}
    assert complete(["--framework", ""], checkout / "nowhere") == Answer()


# Time.


def test_an_answer_comes_at_once(root: Path) -> None:
    """0.3 s from the key to the answer; processor time, because other tests may keep this machine busy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    argv = [sys.executable, "-P", str(root / "build.py"), "completion", "bash", "--"]
    words = ["--framework", "pytorch", "--cuda", ""]
    done = subprocess.run([*argv, *words], capture_output=True, text=True, check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "cu121\tCUDA 12.1\n" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_only_what_an_answer_needs_is_loaded(root: Path) -> None:
    program = "import sys; from trainworks.cli import main; main(sys.argv[1:]); sys.stderr.write(' '.join(sys.modules))"
    argv = [sys.executable, "-c", program, "completion", "--root", str(root), "bash", "--", "push", ""]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert f"{TARGET}\t" in done.stdout
    assert {"pydantic", "jinja2", "docker", "requests", "subprocess"}.isdisjoint(done.stderr.split())


# Real shells.


class Shell:
    """A shell on a terminal of its own."""

    def __init__(self, argv: Sequence[str], folder: Path) -> None:
        # Programs of the tests come first: what is typed is never ours, and says with which words it was started.
        variables = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb", "LC_ALL": "C.UTF-8"}
        self.terminal, end = pty.openpty()
        self.process = subprocess.Popen(
            ("setsid", "--ctty", *argv), cwd=folder, env=variables, stdin=end, stdout=end, stderr=end
        )
        os.close(end)
        self.seen = b""

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def read(self, until: str) -> str:
        """Return what comes until a text does, which ends it."""
        end = time.monotonic() + SECONDS
        while until.encode() not in self.seen:
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {until!r} after {SECONDS} s: {self.seen.decode()!r}"
            self.seen += os.read(self.terminal, 65536)
        found, _, self.seen = self.seen.partition(until.encode())
        return found.decode()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


PROGRAM = '#!/bin/sh\nprintf "<%s>" started "$@"\nprintf "<ended>\\n"\n'

BASH_COMPLETION = Path("/usr/share/bash-completion/bash_completion")

STARTS = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "bash-completion": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
    "fish": ("fish", "--no-config", "--interactive"),
}
SET_UP = {
    "bash": "PS1='rea''dy> '; bind 'set enable-bracketed-paste off'; source script\n",
    "bash-completion": f"PS1='rea''dy> '; source {BASH_COMPLETION}; source script; source script\n",
    "zsh": "PROMPT='rea''dy> '; unset zle_bracketed_paste; source ./script\n",
    "fish": "function fish_prompt; echo -n rea'dy> '; end; source script\n",
}


@pytest.fixture(scope="module", params=STARTS)
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Shell]:
    """Give a shell that has our script, in a folder that looks like a checkout and has other programs of our names."""
    name: str = request.param
    started = STARTS[name][0]
    if shutil.which(started) is None or (name == "bash-completion" and not BASH_COMPLETION.exists()):
        pytest.skip(f"no {name} here; `make peers` installs it")
    folder = tmp_path_factory.mktemp(name)
    for part in ("images", "templates"):
        (folder / part).symlink_to(root / part)
    for program in ("python", "trainworks", "build.py"):
        (folder / program).write_text(PROGRAM, encoding="utf-8")
        (folder / program).chmod(0o755)
    for file in ("Dockerfile", "other.py"):
        (folder / file).touch()
    argv = [sys.executable, str(root / "build.py"), "completion", started]
    script = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    (folder / "script").write_text(script, encoding="utf-8")
    shell = Shell(STARTS[name], folder)
    try:
        shell.type(SET_UP[name])
        shell.read("ready> ")
        yield shell
    finally:
        shell.end()


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        pytest.param("python build.py pu\t", "build.py push", id="command"),
        pytest.param("./build.py push x --rep\t", "push x --repository", id="option"),
        pytest.param(f"./build.py report {TARGET[:-3]}\t", f"report {TARGET}", id="target"),
        pytest.param("python ./build.py --framework tens\t", "./build.py --framework tensorflow", id="framework"),
        pytest.param("trainworks --cuda cu125 --framework t\t", "--cuda cu125 --framework tensorflow", id="cell"),
        pytest.param("trainworks --until pl\t", "--until plan", id="choice"),
        pytest.param("python -m trainworks --engine=d\t", "-m trainworks --engine=docker", id="value behind ="),
        pytest.param("trainworks lint Docke\t", "lint Dockerfile", id="file"),
        pytest.param("python oth\t", "other.py", id="no command line of ours"),
        pytest.param("python build.py help prov\t", "build.py help prove", id="ours after one that is not"),
    ],
)
def test_tab(shell: Shell, typed: str, words: str) -> None:
    shell.type(f"{typed}\n")
    shell.read("<started>")
    assert shell.read("<ended>") == "".join(f"<{word}>" for word in words.split())
    shell.read("ready> ")


def test_the_script_of_bash_is_clean(root: Path) -> None:
    script = root / "src" / "trainworks" / "cli" / "shells" / "trainworks.bash"
    checker = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([checker, str(script)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
