"""Real shared libraries for the tests of the image tests, made by this machine's compiler."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Tree:
    """A folder that gets real shared libraries, which need nothing but each other (no libc)."""

    root: Path
    compiler: str

    def library(
        self,
        path: str,
        *needed: str,
        rpath: str = "",
        inherited: bool = False,
        auxiliary: str = "",
    ) -> None:
        """Make a library; ``rpath`` is written as RUNPATH, or as RPATH (``inherited``).

        The loader looks for an ``auxiliary`` library, and does without it.
        """
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        stubs = self.root / ".stubs"
        stubs.mkdir(exist_ok=True)
        options = []
        for name in needed:
            if not (stubs / name).exists():
                self._compile(stubs / name, "-Wl,-soname," + name)
            options.append(str(stubs / name))
        if rpath:
            options += [f"-Wl,{'--disable' if inherited else '--enable'}-new-dtags,-rpath,{rpath}"]
        if auxiliary:
            options.append(f"-Wl,--auxiliary,{auxiliary}")
        self._compile(target, f"-Wl,-soname,{target.name}", "-Wl,--no-as-needed", *options)

    def _compile(self, target: Path, *options: str) -> None:
        command = [
            self.compiler,
            "-shared",
            "-nostdlib",
            "-x",
            "c",
            os.devnull,
            "-x",
            "none",
            *options,
            "-o",
            str(target),
        ]
        subprocess.run(command, check=True)

    def distribution(self, name: str, *files: str, requires: tuple[str, ...] = ()) -> None:
        information = self.root / f"opt/site-packages/{name}-1.dist-info"
        information.mkdir(parents=True)
        lines = [f"Name: {name}", *(f"Requires-Dist: {other}>=1" for other in requires), "", "Text"]
        (information / "METADATA").write_text("\n".join(lines))
        (information / "RECORD").write_text("".join(f"{file},,\n" for file in files))
