"""Find the modules that a training script imports, without running it.

Only files are read. The modules of the code directory that the script imports are read, too.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator, NamedTuple


class Import(NamedTuple):
    """An import that runs, and whose failure ends the script.

    Attributes:
        module: The module, such as ``torch.sagemaker``. ``from a import b`` is ``a`` and ``a.b``.
        file: The file, as its path in the code directory.
        line: The line, from 1 on.
    """

    module: str
    file: str
    line: int


def find_imports(folder: Path, entry: str, *, whole_folder: bool) -> list[Import]:
    """Return the imports of a script, file by file.

    A file that is not Python, or of a newer Python than this one, has no imports.

    Args:
        folder: The code directory.
        entry: The script in it, such as ``src/train.py``.
        whole_folder: Whether the job has the other files of the code directory, too.
    """
    script = folder / entry
    imports: list[Import] = []
    files = [script]
    for path in files:  # grows, while modules of the code directory are found
        for module, line in _imports_of(path):
            imports.append(Import(module, path.relative_to(folder).as_posix(), line))
            if not whole_folder:
                continue
            local = _local_file(script.parent, module)
            if local is not None and local not in files:
                files.append(local)
    return imports


def _local_file(root: Path, module: str) -> Path | None:
    """Return the file of a module below a folder; None if the module is not there."""
    base = root.joinpath(*module.split("."))
    for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each module that a file imports, and the line; relative imports are left out."""
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    statements: list[ast.AST] = [tree]
    for statement in statements:  # grows by the statements inside of each one
        if isinstance(statement, (ast.Try, ast.If)):
            # The script goes on without the module, or may not import it in this job.
            continue
        statements.extend(ast.iter_child_nodes(statement))
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.name, statement.lineno
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module, statement.lineno
            for alias in statement.names:
                yield f"{statement.module}.{alias.name}", statement.lineno
