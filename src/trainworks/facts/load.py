"""Reads ``images/`` and ``templates/`` into ``Facts``.

Every problem of every file is reported at once, each with its file, row and key.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainworks.errors import FactsError
from trainworks.facts import field_types, lockfile
from trainworks.facts.consistency import relate
from trainworks.facts.data import FOLDERS, data_folder
from trainworks.facts.reader import Reader
from trainworks.facts.rows import (
    TABLES,
    Facts,
    FrontMatter,
    LockedArchive,
    LockedArtifact,
    LockedBaseImage,
    Recipe,
    SourceFile,
    Table,
    TargetRow,
    checks_of,
)
from trainworks.facts.schema import shape_of, short

BUILT = f"{TABLES['built'].name}.toml"
"""File of ``images`` that ``build.py --record`` writes.

A checkout in which nothing was built may lack it.
"""

FRONT_MATTER = re.compile(r"\A\{#\n(?P<toml>.*?)#\}\n", re.DOTALL)
"""A recipe starts with one Jinja comment; its text is TOML."""


def load(root: Path) -> Facts:
    """Read and validate all facts.

    Args:
        root: The checkout: the folder with ``images``, ``templates``, ``launcher`` and
            ``smdistributed``. The package's own folder stands in for one that is missing.

    Raises:
        FactsError: With every malformed row, dangling name and missing recipe, all at once.
        OutputError: ``root`` has none of these folders.
    """
    images, templates, launcher, smdistributed = (data_folder(root, name) for name in FOLDERS)
    reader = Reader(images, templates)
    facts = Facts(
        **{field: _rows(reader, images, table) for field, table in TABLES.items()},
        targets=_targets(reader, images),
        recipes=_recipes(reader, templates),
        templates={path.name: reader.text(path) for path in sorted(templates.glob("*.j2"))},
        files=_files(
            reader,
            {"files": templates / "files", "launcher": launcher, "smdistributed": smdistributed},
        ),
        locks=lockfile.read_locks(reader, images),
        locked_artifacts=lockfile.read_shared(reader, images, lockfile.ARTIFACTS, LockedArtifact),
        locked_base_images=lockfile.read_shared(
            reader, images, lockfile.BASE_IMAGES, LockedBaseImage
        ),
        locked_archives=lockfile.read_shared(reader, images, lockfile.ARCHIVES, LockedArchive),
    )
    # Each row that names a row of an unreadable file would be blamed for it.
    if not any(name.count("/") == 1 for name in reader.unreadable):
        reader.problems += relate(facts, reader.malformed)
    if reader.problems:
        raise FactsError(reader.problems)
    return facts


def _rows(reader: Reader, images: Path, table: Table) -> tuple[Any, ...]:
    path = images / f"{table.name}.toml"
    if table.optional and not path.exists():
        return ()
    return tuple(reader.rows(table.row_type, table.key, reader.toml(path), reader.name(path)))


def _targets(reader: Reader, images: Path) -> tuple[TargetRow, ...]:
    """Read the targets of each framework: every file of ``images`` that is not
    one of ``TABLES``.
    """
    tables = {table.name for table in TABLES.values()}
    targets: list[TargetRow] = []
    for path in sorted(images.glob("*.toml")):
        if path.stem not in tables:
            where, content = reader.name(path), reader.toml(path)
            framework = content.pop("framework", None)
            summary = content.pop("summary", "")
            if not isinstance(summary, str):
                reader.problems.append(
                    f"{where}: key 'summary' must be a string, got {short(summary)}"
                )
            if framework != path.stem and where not in reader.unreadable:
                reader.problems.append(
                    f"{where}: key 'framework' must be {path.stem!r}, got {framework!r}"
                )
            targets += reader.rows(TargetRow, "target", content, where, framework=path.stem)
    return tuple(targets)


def _recipes(reader: Reader, templates: Path) -> dict[str, Recipe]:
    recipes: dict[str, Recipe] = {}
    for path in sorted((templates / "components").glob("*.j2")):
        where, text = f"templates/components/{path.name}", reader.text(path)
        match = FRONT_MATTER.match(text)
        if "\r" in text:
            reader.problems.append(
                f"{where}: has line ends of Windows (CR LF); save it with those of Unix (LF)"
            )
        elif match is None and where not in reader.unreadable:
            reader.problems.append(
                f"{where}: must start with a front matter: {{#, lines of TOML, #}}"
            )
        front = reader.parse(match["toml"], where) if match else {}
        read, problems = shape_of(FrontMatter).read(front)
        content = read or FrontMatter()
        reader.problems += [f"{where}: {problem}" for problem in problems]
        reader.problems.extend(
            f"{where}: key 'environment': {short(name)} is not the name of a variable: letters,"
            " digits and underscores"
            for name in content.environment
            if not field_types.VARIABLE.match(name)
        )
        recipes[path.stem] = Recipe(
            name=path.stem, text=text, checks=checks_of(content), **vars(content)
        )
    return recipes


def _files(reader: Reader, folders: Mapping[str, Path]) -> tuple[SourceFile, ...]:
    """Read the files that recipes copy; ``folders`` has their places in a build context.

    A link would carry whatever it leads to on this machine into an image, so links are refused.
    """
    found: list[SourceFile] = []
    for place, folder in folders.items():
        for path in (folder, *sorted(folder.rglob("*"))):
            relative = path.relative_to(folder)
            # The tests of a package stay here.
            if relative.parts[:1] == ("tests",):
                continue
            # What tools leave behind: caches, and the metadata of an editable install.
            if any(
                part.startswith(".") or part == "__pycache__" or ".egg-info" in part
                for part in relative.parts
            ):
                continue
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                what = "a link" if path.is_symlink() else "not a regular file"
                where = path.relative_to(folder.parent).as_posix()
                reader.problems.append(
                    f"{where}: is {what}: put the file itself there, it goes into images"
                )
            elif stat.S_ISREG(status.st_mode):
                # Git keeps one permission bit, executable or not; the rest depends on a umask.
                mode = 0o755 if status.st_mode & 0o100 else 0o644
                found.append(
                    SourceFile(
                        path=f"{place}/{relative.as_posix()}", content=path.read_bytes(), mode=mode
                    )
                )
    return tuple(found)
