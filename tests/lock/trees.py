"""A small checkout of its own: one vendor target whose downloads come from a test's servers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from trainworks.facts.rows import TABLES

ROOT = Path(__file__).resolve().parents[2]

TARGET = "pytorch-2.13.0-cpu-py311-debian12-vendor"
"""The only target of the tree."""

PARTS = ("system", "builder", "cmake", "cpython", "metis", "manifest")
"""Its components, and one more that they name; their rows and recipes are the real ones."""

PACKAGES_TARGET = "pytorch-2.13.0-cpu-py311-debian12"
"""The only target of a tree with ``sources="packages"``."""

PACKAGES_PARTS = ("system", "builder", "manifest")
"""Its components, to which a test adds its own."""


def make_tree(
    root: Path,
    *,
    base_image: str = "",
    sources: Literal["packages", "vendor"] = "vendor",
    **row: object,
) -> Path:
    """Write the facts of one target: of a vendor target METIS with CMake, and no Python but the one
    that builds.

    Args:
        root: Where.
        base_image: Name of the image that the build stages stand on; default: the base.
        sources: The target's.
        row: Further keys of the base image's row.
    """
    parts, others = (PARTS, "packages") if sources == "vendor" else (PACKAGES_PARTS, "vendor")
    images = root / "images"
    (images / "lock").mkdir(parents=True)
    shutil.copytree(ROOT / "templates", root / "templates")
    shutil.copytree(ROOT / "launcher" / "entrypoint", root / "launcher" / "entrypoint")
    shutil.copy(ROOT / "launcher" / "pyproject.toml", root / "launcher")
    for name in (table.name for table in TABLES.values()):
        # Rows that name other rows would need them all.
        content = (
            (ROOT / "images" / f"{name}.toml").read_text(encoding="utf-8")
            if name in ("bases", "cuda")
            else ""
        )
        # A lock would ask Debian's own archive for its state.
        content = re.sub(r"^(archives|snapshot) = .*\n", "", content, flags=re.MULTILINE)
        content = content or "# None of these.\n"
        (images / f"{name}.toml").write_text(content, encoding="utf-8")
    blocks = (
        (ROOT / "images" / "components.toml").read_text(encoding="utf-8").split("[[component]]")[1:]
    )
    chosen = [
        block
        for block in blocks
        if block.split('name = "')[1].split('"')[0] in parts
        and f'sources = ["{others}"]' not in block
    ]
    assert len(chosen) == len(parts)
    # The names in the parts have to exist, and nothing more does.
    text = "".join(f"[[component]]{block}" for block in chosen)
    (images / "components.toml").write_text(text, encoding="utf-8")
    recipes = {*parts, "metis-source"} - {"metis"} if sources == "vendor" else {*parts}
    for path in (root / "templates" / "components").glob("*.j2"):
        if path.stem not in recipes:
            path.unlink()
    vendor_rows = 'metis = "5.1.0"\ncmake = "3.31.0"\n' if sources == "vendor" else ""
    (images / "stacks.toml").write_text(
        "[[stack]]\n"
        'name = "the-stack"\n'
        f'sources = "{sources}"\n'
        'source = "the tests"\n'
        "[stack.components]\n"
        'builder = "0.13.8"\n' + vendor_rows,
        encoding="utf-8",
    )
    builder_row = f'builder_image = "{base_image}"\n' if base_image else ""
    (images / "pytorch.toml").write_text(
        'framework = "pytorch"\nsummary = "PyTorch"\n\n'
        '[[target]]\nversion = "2.13.0"\ncuda = "cpu"\nbase = "debian12"\n'
        + builder_row
        + 'stack = "the-stack"\nversions = {}\nsize_budget_megabytes = 1000\nsource = "the'
        ' tests"\n',
        encoding="utf-8",
    )
    if base_image:
        add_row(root, "base-images", "base_image", {"name": base_image, "base": "debian12", **row})
    return root


def add_row(root: Path, file: str, key: str, values: Mapping[str, object]) -> None:
    """Append a row to ``images/FILE.toml``."""
    lines = "".join(
        f"{name} = {_toml(value)}\n" for name, value in {"source": "the tests", **values}.items()
    )
    with (root / "images" / f"{file}.toml").open("a", encoding="utf-8") as stream:
        stream.write(f"\n[[{key}]]\n{lines}")


def add_artifact(root: Path, name: str, version: str, **values: object) -> None:
    """Append a row to ``images/artifacts.toml``."""
    add_row(root, "artifacts", "artifact", {"name": name, "version": version, **values})


def add_component(root: Path, name: str, version: str, recipe: str, **values: object) -> None:
    """Append a component with its version and its recipe's stage.

    ``values`` are further keys of its row.
    """
    add_row(root, "components", "component", {"name": name, "summary": name, **values})
    with (root / "images" / "stacks.toml").open("a", encoding="utf-8") as stream:
        stream.write(f'{name} = "{version}"\n')
    (root / "templates" / "components" / f"{name}.j2").write_text(
        f"{{#\n#}}\n{{% block stage %}}\n{recipe}\n{{% endblock %}}\n", encoding="utf-8"
    )


def add_python_lock(root: Path, *packages: Mapping[str, object], target: str = TARGET) -> None:
    """Write the lock of the target's Python files."""
    rows = ""
    for package in packages:
        rows += "\n[[package]]\n"
        rows += "".join(f"{name} = {_toml(value)}\n" for name, value in package.items())
    (root / "images" / "lock" / f"{target}.toml").write_text(
        rows or "# No package.\n", encoding="utf-8"
    )


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    # Strings, numbers, truth values and lists of them are written alike in both languages.
    return json.dumps(value)
