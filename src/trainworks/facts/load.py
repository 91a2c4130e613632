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
    tables = {field: _read_rows(reader, images, table) for field, table in TABLES.items()}
    targets = _read_targets(reader, images)
    recipes = _read_recipes(reader, templates)
    macros = {path.name: reader.text(path) for path in sorted(templates.glob("*.j2"))}
    copied_folders = {
        "files": templates / "files",
        "launcher": launcher,
        "smdistributed": smdistributed,
    }
    facts = Facts(
        **tables,
        targets=targets,
        recipes=recipes,
        templates=macros,
        files=_read_files(reader, copied_folders),
        locks=lockfile.read_locks(reader, images),
        locked_artifacts=lockfile.read_shared(reader, images, lockfile.ARTIFACTS, LockedArtifact),
        locked_base_images=lockfile.read_shared(
            reader, images, lockfile.BASE_IMAGES, LockedBaseImage
        ),
        locked_archives=lockfile.read_shared(reader, images, lockfile.ARCHIVES, LockedArchive),
    )
    # Files directly in images/ have the tables. If one is unreadable, each row that names a row
    # of that file would be blamed.
    unreadable_tables = [name for name in reader.unreadable if name.count("/") == 1]
    if not unreadable_tables:
        reader.problems += relate(facts, reader.malformed)
    if reader.problems:
        raise FactsError(reader.problems)
    return facts


def _read_rows(reader: Reader, images: Path, table: Table) -> tuple[Any, ...]:
    """Read the rows of one table of ``images``; the reader gets the problems.

    Rows that are malformed are left out.
    """
    path = images / f"{table.name}.toml"
    if table.optional and not path.exists():
        return ()
    return tuple(reader.rows(table.row_type, table.key, reader.toml(path), reader.name(path)))


def _read_targets(reader: Reader, images: Path) -> tuple[TargetRow, ...]:
    """Read the targets of each framework: the files of ``images`` that are not in ``TABLES``.

    The reader gets the problems. Rows that are malformed are left out.
    """
    tables = {table.name for table in TABLES.values()}
    targets: list[TargetRow] = []
    for path in sorted(images.glob("*.toml")):
        if path.stem in tables:
            continue
        where = reader.name(path)
        content = reader.toml(path)
        framework = content.pop("framework", None)
        summary = content.pop("summary", "")
        if not isinstance(summary, str):
            reader.problems.append(f"{where}: key 'summary' must be a string, got {short(summary)}")
        # An unreadable file has no keys; it is a problem already.
        if framework != path.stem and where not in reader.unreadable:
            reader.problems.append(
                f"{where}: key 'framework' must be {path.stem!r}, got {framework!r}"
            )
        targets += reader.rows(TargetRow, "target", content, where, framework=path.stem)
    return tuple(targets)


def _read_recipes(reader: Reader, templates: Path) -> dict[str, Recipe]:
    """Read the recipes of ``templates/components`` by their names; the reader gets the problems.

    A malformed recipe is in the result, too, so that no row seems to lack its recipe.
    """
    recipes: dict[str, Recipe] = {}
    for path in sorted((templates / "components").glob("*.j2")):
        where = f"templates/components/{path.name}"
        text = reader.text(path)
        front_matter = FRONT_MATTER.match(text)
        if "\r" in text:
            reader.problems.append(
                f"{where}: has line ends of Windows (CR LF); save it with those of Unix (LF)"
            )
        elif front_matter is None and where not in reader.unreadable:
            reader.problems.append(
                f"{where}: must start with a front matter: {{#, lines of TOML, #}}"
            )
        table = {}
        if front_matter is not None:
            table = reader.parse(front_matter["toml"], where)
        row, problems = shape_of(FrontMatter).read(table)
        # A recipe with a malformed front matter has an empty one, so that other problems are
        # reported too.
        content = row or FrontMatter()
        for name in content.environment:
            if not field_types.VARIABLE.match(name):
                problems.append(
                    f"key 'environment': {short(name)} is not the name of a variable: letters,"
                    " digits and underscores"
                )
        reader.problems += [f"{where}: {problem}" for problem in problems]
        recipes[path.stem] = Recipe(
            name=path.stem, text=text, checks=checks_of(content), **vars(content)
        )
    return recipes


def _read_files(reader: Reader, folders: Mapping[str, Path]) -> tuple[SourceFile, ...]:
    """Read the files that recipes copy, with their bytes and permission bits.

    A link would carry a file of this machine from outside of the folder into an image, so links
    are refused.

    Args:
        reader: Gets the problems.
        folders: The folders, by their places in a build context: ``launcher``.
    """
    files: list[SourceFile] = []
    for place, folder in folders.items():
        for path in (folder, *sorted(folder.rglob("*"))):
            relative = path.relative_to(folder)
            if not _is_shipped(relative):
                continue
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                continue
            if not stat.S_ISREG(mode):
                kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
                where = path.relative_to(folder.parent).as_posix()
                reader.problems.append(
                    f"{where}: is {kind}: put the file itself there, it goes into images"
                )
                continue
            # Git stores one permission bit, executable or not; the others depend on a umask.
            permissions = 0o755 if mode & 0o100 else 0o644
            file = SourceFile(
                path=f"{place}/{relative.as_posix()}", content=path.read_bytes(), mode=permissions
            )
            files.append(file)
    return tuple(files)


def _is_shipped(relative: Path) -> bool:
    """Return whether a file of a package goes into images: no tests, and no leftovers of tools."""
    if relative.parts[:1] == ("tests",):
        return False
    for part in relative.parts:
        # Caches, and the metadata of an editable install.
        if part.startswith(".") or part == "__pycache__" or ".egg-info" in part:
            return False
    return True
