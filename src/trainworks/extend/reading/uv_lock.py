"""``uv.lock``: what of it a base image gets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import parse_qs, urlsplit

from packaging.markers import Marker
from packaging.pylock import Pylock
from packaging.requirements import Requirement as Specification
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name

from trainworks.extend.reading.selection import Chosen, Lock, Table, add_index, check_names
from trainworks.extend.requirements import PackageRequirement


def select_uv(content: Table, chosen: Chosen) -> None:
    """Choose from a lock what its project needs in the base, edge by edge, but for what only kept packages need."""
    if wanted := content.get("requires-python"):
        chosen.check_python(SpecifierSet(wanted))
    packages = [row for row in content.get("package", ()) if _holds_any(row.get("resolution-markers", ()), chosen)]
    roots = _roots(content, packages)
    if not roots:
        if chosen.lock.extras or chosen.lock.groups:
            chosen.problems.append(f"{chosen.lock.where}: it names no project, whose extras and groups could be chosen")
        for row in packages:
            if chosen.kept.has(canonicalize_name(row["name"])):
                chosen.leave(canonicalize_name(row["name"]), row.get("version", "0"))
            else:
                _add_row(row, chosen)
        return
    for option, names, table in (
        ("extra", chosen.lock.extras, "optional-dependencies"),
        ("group", chosen.lock.groups, "dev-dependencies"),
    ):
        check_names(chosen, option, names, {each for row in roots for each in row.get(table, {})})
    _check_direct(roots, chosen)
    by_name: dict[str, list[Table]] = {}
    for row in packages:
        by_name.setdefault(canonicalize_name(row["name"]), []).append(row)
    done: set[tuple[str, str, str]] = set()
    left: dict[NormalizedName, str] = {}
    waiting: list[tuple[Table, tuple[str, ...], tuple[str, ...]]] = [
        (row, chosen.lock.extras, chosen.lock.groups) for row in roots
    ]
    while waiting:
        row, extras, groups = waiting.pop()
        for part in ("", *extras):
            if (mark := (row["name"], str(row.get("version", "")), part)) in done:
                continue
            done.add(mark)
            if not part:
                _add_row(row, chosen)
            for edge in _edges(row, part, groups if not part else ()):
                if not _holds(edge.get("marker", ""), chosen):
                    continue
                name = canonicalize_name(edge["name"])
                target = _target(edge, by_name.get(name, []))
                if name in chosen.kept.versions:
                    left[name] = str((target or edge).get("version", ""))
                elif target is None:
                    chosen.problems.append(f"{chosen.place(name)}: {row['name']} needs it, and it is not in the lock")
                else:
                    waiting.append((target, tuple(edge.get("extra", ())), ()))
    for name, version in sorted(left.items()):
        if version:
            chosen.leave(name, version)


def _roots(content: Table, packages: Sequence[Table]) -> list[Table]:
    """Return the projects that a lock is for: that of its own folder, or else the members of its workspace."""
    own = [row for row in packages if "." in (row.get("source", {}).get(kind) for kind in _LOCAL)]
    members = content.get("manifest", {}).get("members", ())
    return own or [row for row in packages if row["name"] in members]


_LOCAL = ("editable", "virtual", "directory")


def _edges(row: Table, extra: str, groups: Sequence[str]) -> Iterator[Table]:
    """Yield what a package needs, for an extra or else for itself and its groups."""
    if extra:
        yield from _part(row.get("optional-dependencies", {}), extra)
        return
    yield from row.get("dependencies", ())
    for group in groups:
        yield from _part(row.get("dev-dependencies", {}), group)


def _part(table: Table, name: str) -> Sequence[Table]:
    found = next((rows for each, rows in table.items() if canonicalize_name(each) == canonicalize_name(name)), ())
    return tuple(found)


def _target(edge: Table, rows: Sequence[Table]) -> Table | None:
    """Return the package that an edge leads to; the edge names version and source where there are several."""
    fitting = [
        row
        for row in rows
        if edge.get("version", row.get("version")) == row.get("version")
        and edge.get("source", row.get("source")) == row.get("source")
    ]
    return fitting[-1] if fitting else None


def _check_direct(roots: Iterable[Table], chosen: Chosen) -> None:
    """Add what the project itself asks for of what is kept: a lock that is for another version of it is refused."""
    for row in roots:
        for each in row.get("metadata", {}).get("requires-dist", ()):
            name = canonicalize_name(each["name"])
            if name not in chosen.kept.versions or not _holds(each.get("marker", ""), chosen):
                continue
            text = f"{name}{each.get('specifier', '')}"
            place = f"{chosen.lock.where}: {row['name']} requires {text}"
            chosen.pins[name] = PackageRequirement(
                place=place, specification=Specification(text), text=text, hashed=False
            )


def _add_row(row: Table, chosen: Chosen) -> None:
    name, version, source = row["name"], str(row.get("version", "")), row.get("source", {})
    files = [*row.get("wheels", ()), *((row["sdist"],) if "sdist" in row else ())]
    hashes = [file["hash"] for file in files if file.get("hash", "").startswith("sha256:")]
    match source:
        case {"git": address}:
            parts = urlsplit(address)
            subdirectory = parse_qs(parts.query).get("subdirectory", [""])[0]
            chosen.add_git(name, parts._replace(query="", fragment="").geturl(), parts.fragment, subdirectory)
        case {"url": address} | {"path": address}:
            chosen.add_wheel(name, version, address, hashes)
        case {"editable": path} | {"directory": path}:
            chosen.add_folder(name, path)
        case {"virtual": _}:
            pass
        case _:
            chosen.add_pin(name, version, hashes)
            if "registry" in source:
                add_index(source["registry"], chosen)


def _holds_any(markers: Sequence[str], chosen: Chosen) -> bool:
    return not markers or any(_holds(marker, chosen) for marker in markers)


def _holds(marker: str, chosen: Chosen) -> bool:
    """Whether a marker holds in the base, for any of the extras and groups that are wanted."""
    if not marker:
        return True
    # uv writes extras that exclude each other in this form: extra-LENGTH-PROJECT-EXTRA.
    wanted = ["", *chosen.lock.extras, *_encoded(chosen.lock)]
    return any(Marker(marker).evaluate({**chosen.base.markers, "extra": each}) for each in wanted)


def _encoded(lock: Lock) -> Iterator[str]:
    assert not isinstance(lock.content, Pylock), "only uv writes such markers"
    for row in lock.content.get("package", ()):
        if any(kind in row.get("source", {}) for kind in _LOCAL):
            for kind, names in (("extra", lock.extras), ("group", lock.groups)):
                yield from (f"{kind}-{len(row['name'])}-{row['name']}-{name}" for name in names)
