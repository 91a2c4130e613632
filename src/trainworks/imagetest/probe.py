"""Answers the questions of an image's checks from inside the image; runs once for all of them.

The source of this file is sent into a container and run there by the image's ``/usr/bin/python3``, which may be as old
as 3.8 and has only the standard library: import nothing else, and use no newer syntax. It reads a ``ProbeRequest``
and prints one line, ``MARKER`` followed by a ``ProbeAnswer`` as JSON.
"""

# ruff: noqa: PTH110, PTH112, PTH113, PTH114, PTH119, PTH120, PTH123, PTH207, PTH208
# A hundred thousand files are asked about: plain strings and os.path, no object for each.

from __future__ import annotations

import glob
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

MARKER = "trainworks-probe: "
IMPORT_TIMEOUT = 120.0


class ProbeRequest(TypedDict):
    """All questions of one run.

    ``root`` is ``/`` in an image (tests ask about a folder); ``python`` is the interpreter of the image's environment.
    ``checks`` are fields of ``trainworks.plan.checks``, of the kinds in ``QUESTIONS``.
    """

    root: str
    python: str
    checks: list[dict[str, Any]]
    distributions: bool
    sizes: bool


class ProbedDistribution(TypedDict):
    """A Python distribution that the environment finds, under its normalised name."""

    name: str
    version: str
    folder: str


class ProbeAnswer(TypedDict):
    """What is wrong with each check, in their order: lines for people, none where nothing is.

    ``distributions`` and ``sizes`` are there if they were asked for.
    """

    problems: list[list[str]]
    distributions: list[ProbedDistribution]
    distributions_error: str
    sizes: list[tuple[str, int]]


LINE_LIMIT = 20


def told(problems: list[str], advice: str) -> list[str]:
    """Return problems with what to do about them; of many the first ones."""
    more = [f"... and {len(problems) - LINE_LIMIT} more"] if len(problems) > LINE_LIMIT else []
    return [*problems[:LINE_LIMIT], *more, advice] if problems else []


# --- ELF files -------------------------------------------------------------------------------------------------------

PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
ET_EXEC, ET_DYN = 2, 3
DT_NULL, DT_NEEDED, DT_STRTAB, DT_SONAME, DT_RPATH, DT_RUNPATH, DT_FLAGS_1 = 0, 1, 5, 14, 15, 29, 0x6FFFFFFB
DF_1_NODEFLIB = 0x800


class DamagedElfError(Exception):
    """A file starts like an ELF file and is damaged."""


class Elf:
    """The parts of one file that the dynamic loader reads."""

    __slots__ = ("identity", "interpreter", "loadable", "needed", "no_default_folders", "rpath", "runpath", "soname")

    def __init__(self, identity: tuple[int, int, int]) -> None:
        """Start with a file that needs nothing; ``identity`` is class, byte order and machine."""
        self.identity = identity
        self.loadable = False
        self.interpreter = False
        self.needed: list[str] = []
        self.soname = ""
        self.rpath = ""
        self.runpath = ""
        self.no_default_folders = False


def read_elf(path: str) -> Elf | None:
    """Read the dynamic section of a file; ``None`` where it is not an ELF file, an error where it is a broken one."""
    with open(path, "rb") as file:
        head = file.read(64)
        if head[:4] != b"\x7fELF":
            return None
        try:
            wide, order = head[4] == 2, "<" if head[5] == 1 else ">"
            kind, machine = struct.unpack_from(order + "HH", head, 16)
            elf = Elf((head[4], head[5], machine))
            if kind not in (ET_EXEC, ET_DYN):
                return elf
            (table,) = struct.unpack_from(order + ("Q" if wide else "I"), head, 32 if wide else 28)
            entry_size, entries = struct.unpack_from(order + "HH", head, 54 if wide else 42)
            file.seek(table)
            programs = file.read(entry_size * entries)
            loads: list[tuple[int, int, int]] = []
            dynamic = b""
            for index in range(entries):
                if wide:
                    segment, _flags, offset, address, _physical, size = struct.unpack_from(
                        order + "IIQQQQ", programs, index * entry_size
                    )
                else:
                    segment, offset, address, _physical, size = struct.unpack_from(
                        order + "IIIII", programs, index * entry_size
                    )
                if segment == PT_LOAD:
                    loads.append((address, offset, size))
                elif segment == PT_INTERP:
                    elf.interpreter = True
                elif segment == PT_DYNAMIC:
                    elf.loadable = True
                    file.seek(offset)
                    dynamic = file.read(size)
            _read_dynamic(elf, file.fileno(), dynamic, order + ("qQ" if wide else "iI"), loads)
        except (struct.error, ValueError, IndexError, OSError, OverflowError) as error:
            raise DamagedElfError(str(error)) from error
    return elf


def _read_dynamic(elf: Elf, descriptor: int, dynamic: bytes, layout: str, loads: list[tuple[int, int, int]]) -> None:
    values: list[tuple[int, int]] = []
    strings = None
    whole = len(dynamic) - len(dynamic) % struct.calcsize(layout)
    for tag, value in struct.iter_unpack(layout, dynamic[:whole]):
        if tag == DT_NULL:
            break
        if tag == DT_STRTAB:
            strings = value
        elif tag == DT_FLAGS_1:
            elf.no_default_folders = bool(value & DF_1_NODEFLIB)
        elif tag in (DT_NEEDED, DT_SONAME, DT_RPATH, DT_RUNPATH):
            values.append((tag, value))
    if not values:
        return
    # The table is given by its address in memory; its place in the file is by the segment that holds it.
    offsets = [
        strings - address + offset
        for address, offset, size in loads
        if strings is not None and address <= strings < address + size
    ]
    if not offsets:
        raise DamagedElfError("its string table lies outside of the file")
    for tag, value in values:
        # The string tables of C++ libraries are many megabytes of symbols: read only the few strings asked for.
        raw = os.pread(descriptor, 4096, offsets[0] + value)
        text = raw.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
        if tag == DT_NEEDED:
            elf.needed.append(text)
        elif tag == DT_SONAME:
            elf.soname = text
        elif tag == DT_RPATH:
            elf.rpath = text
        else:
            elf.runpath = text


def read_loader_cache(path: str) -> dict[str, list[str]]:
    """Read ``/etc/ld.so.cache``: soname to paths. This, not ``ld.so.conf``, is what the loader reads at run time."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return {}
    start = data.find(b"glibc-ld.so.cache1.1")
    found: dict[str, list[str]] = {}
    if start < 0 or len(data) < start + 48:
        return found
    order = ">" if sys.byteorder == "big" else "<"
    (count,) = struct.unpack_from(order + "I", data, start + 20)
    for index in range(count):
        position = start + 48 + 24 * index
        if position + 24 > len(data):
            break
        _flags, key, value = struct.unpack_from(order + "iII", data, position)
        name = data[start + key : data.index(b"\0", start + key)].decode("utf-8", "surrogateescape")
        target = data[start + value : data.index(b"\0", start + value)].decode("utf-8", "surrogateescape")
        found.setdefault(name, []).append(target)
    return found


class Loaded:
    """One object of a process: its ELF file, the folder it was found in, and the object that asked for it."""

    __slots__ = ("elf", "loader", "origin", "path")

    def __init__(self, path: str, elf: Elf, loader: Loaded | None) -> None:
        """Keep the path as it was found: ``$ORIGIN`` is the folder of the link, not of the file behind it."""
        self.path = path
        self.elf = elf
        self.loader = loader
        self.origin = os.path.dirname(path)


class Process:
    """All objects that come into a process when one file is loaded, as ``ld.so`` would do it, and what it misses."""

    def __init__(self) -> None:
        """Start empty."""
        self.objects: dict[str, Loaded] = {}
        self.names: set[str] = set()
        self.main: Loaded | None = None
        self.missing: list[tuple[str, str]] = []


class Loader:
    """The search of ``ld.so`` over the files of one image, with everything that it reads kept."""

    def __init__(self, root: str, environment_path: str) -> None:
        """Read the loader's cache; ``environment_path`` is ``LD_LIBRARY_PATH``."""
        self.root = root.rstrip("/")
        self.cache = read_loader_cache(self.root + "/etc/ld.so.cache")
        self.environment_folders = [entry for entry in re.split("[:;]", environment_path) if entry.startswith("/")]
        machine = os.uname().machine
        multiarch = f"lib/{machine}-linux-gnu"
        debian = os.path.isdir(f"{self.root}/{multiarch}") or os.path.isdir(f"{self.root}/usr/{multiarch}")
        self.library_folder = multiarch if debian else "lib64" if sys.maxsize > 2**32 else "lib"
        self.machine = machine
        # Compiled into the loader: those of Debian, then those of the others, which Debian has empty.
        folders = (multiarch, "lib", "lib64") if debian else ("lib64", "lib")
        self.default_folders = [f"{prefix}/{folder}" for folder in folders for prefix in ("", "/usr")]
        own = read_elf("/proc/self/exe")
        self.identity = own.identity if own else None
        self._elves: dict[str, Elf | None] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._found: dict[tuple[str, str], tuple[str, Elf] | None] = {}
        self.damaged: dict[str, str] = {}

    def elf(self, path: str) -> Elf | None:
        """Return the file as this image's loader sees it: ``None`` for no ELF file, another machine's, a broken one."""
        if path not in self._elves:
            elf = None
            try:
                elf = read_elf(self.root + path)
            except DamagedElfError as error:
                self.damaged[path] = str(error)
            except OSError:
                pass
            # GPU code (cubin, hsaco) and files for other machines are ELF too; the loader passes them by.
            self._elves[path] = elf if elf is not None and elf.identity == self.identity else None
        return self._elves[path]

    def _in_folder(self, folder: str, name: str) -> tuple[str, Elf] | None:
        folder = os.path.normpath(folder)
        if folder not in self._names:
            try:
                self._names[folder] = frozenset(os.listdir(self.root + folder))
            except OSError:
                self._names[folder] = frozenset()
        if name not in self._names[folder]:
            return None
        return self._at(f"{folder.rstrip('/')}/{name}")

    def _at(self, path: str) -> tuple[str, Elf] | None:
        elf = self.elf(path)
        return (path, elf) if elf is not None and elf.loadable else None

    def _expand(self, folders: str, origin: str) -> list[str]:
        expanded = []
        for folder in folders.split(":"):
            for token, value in (("ORIGIN", origin), ("LIB", self.library_folder), ("PLATFORM", self.machine)):
                folder = folder.replace("${" + token + "}", value).replace("$" + token, value)
            # A relative entry is searched from wherever the program happens to be started: it finds nothing for sure.
            if folder.startswith("/"):
                expanded.append(folder)
        return expanded

    def find(self, name: str, requester: Loaded, main: Loaded | None) -> tuple[str, Elf] | None:
        """Find a NEEDED name in the order of ``ld.so(8)``."""
        if "/" in name:
            expanded = self._expand(name, requester.origin)
            return self._at(expanded[0]) if expanded else None
        folders: list[str] = []
        if not requester.elf.runpath:
            # RPATH holds for what the object loads and for all that these load in turn, the program's own for all;
            # an object that has a RUNPATH takes no part in that.
            chain: list[Loaded] = []
            step: Loaded | None = requester
            while step is not None:
                chain.append(step)
                step = step.loader
            if main is not None and main not in chain:
                chain.append(main)
            for item in chain:
                if item.elf.rpath and not item.elf.runpath:
                    folders += self._expand(item.elf.rpath, item.origin)
        folders += self.environment_folders
        folders += self._expand(requester.elf.runpath, requester.origin)
        for folder in folders:
            found = self._in_folder(folder, name)
            if found is not None:
                return found
        return None if requester.elf.no_default_folders else self._in_system(name)

    def _in_system(self, name: str) -> tuple[str, Elf] | None:
        key = ("", name)
        if key not in self._found:
            found = None
            for path in self.cache.get(name, ()):
                found = found or self._at(path)
            for folder in self.default_folders:
                found = found or self._in_folder(folder, name)
            self._found[key] = found
        return self._found[key]

    def load(self, path: str, elf: Elf, within: Process | None = None) -> Process:
        """Load a file and, breadth first, everything that it needs, into a fresh process or one like ``within``."""
        process = Process()
        first = Loaded(path, elf, None)
        if within is not None:
            process.objects.update(within.objects)
            process.names.update(within.names)
            process.main = within.main
        elif elf.interpreter:
            process.main = first
        queue = [first]
        self._add(process, first, os.path.basename(path))
        while queue:
            item = queue.pop(0)
            for name in item.elf.needed:
                if name in process.names:
                    continue
                found = self.find(name, item, process.main)
                if found is None:
                    process.missing.append((item.path, name))
                    continue
                real = os.path.realpath(self.root + found[0])
                process.names.add(name)
                if real not in process.objects:
                    child = Loaded(found[0], found[1], item)
                    self._add(process, child, name)
                    queue.append(child)
        return process

    def _add(self, process: Process, item: Loaded, name: str) -> None:
        process.objects[os.path.realpath(self.root + item.path)] = item
        process.names.add(name)
        if item.elf.soname:
            process.names.add(item.elf.soname)


# --- who loads what first --------------------------------------------------------------------------------------------


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Distributions:
    """Which Python distribution owns a file, and which distributions that one requires."""

    def __init__(self, root: str, folders: set[str]) -> None:
        """Read the metadata of every distribution in these ``site-packages`` folders."""
        self.owners: dict[str, str] = {}
        self.requires: dict[str, set[str]] = {}
        for folder in sorted(folders):
            for information in glob.glob(glob.escape(root + folder) + "/*.dist-info"):
                self._read(information, folder)

    def _read(self, information: str, folder: str) -> None:
        name = ""
        required: set[str] = set()
        try:
            with open(information + "/METADATA", encoding="utf-8", errors="replace") as file:
                for line in file:
                    if not line.strip():
                        break
                    if line.startswith("Name:"):
                        name = _canonical(line[5:].strip())
                    elif line.startswith("Requires-Dist:") and not re.search(r"\bextra\s*==", line):
                        match = re.match(r"[A-Za-z0-9._-]+", line[14:].strip())
                        if match:
                            required.add(_canonical(match[0]))
            with open(information + "/RECORD", encoding="utf-8", errors="replace") as file:
                for line in file:
                    path = line.rsplit(",", 2)[0].strip('"')
                    self.owners[os.path.normpath(f"{folder}/{path}")] = name
        except OSError:
            pass
        self.requires.setdefault(name, set()).update(required)

    def owner(self, path: str) -> str:
        """Return the distribution, or for a file in no record its top folder in ``site-packages``; else nothing."""
        if path in self.owners:
            return self.owners[path]
        match = re.match(r".*/(?:site|dist)-packages/([^/]+)", path)
        return match[0] if match else ""

    def loaded_first(self, owner: str) -> set[str]:
        """Return the distribution and all that it requires, however far."""
        closed: set[str] = set()
        queue = [owner]
        while queue:
            name = queue.pop()
            if name not in closed:
                closed.add(name)
                queue += self.requires.get(name, ())
        return closed


def site_packages_of(path: str) -> str:
    """Return the ``site-packages`` folder that a path lies in, or nothing."""
    match = re.match(r"(.*/(?:site|dist)-packages)/", path)
    return match[1] if match else ""


def files_under(root: str, folder: str) -> Iterator[str]:
    """Yield the plain files under a folder of the image, links not followed."""
    for current, folders, names in os.walk(root + folder):
        folders.sort()
        for name in sorted(names):
            path = f"{current.rstrip('/')}/{name}"
            if os.path.isfile(path) and not os.path.islink(path):
                yield path[len(root) :]


def loadable_files(loader: Loader, roots: list[str]) -> dict[str, Elf]:
    """Return every program and library under the roots (folders or files), by path."""
    entries: dict[str, Elf] = {}
    for root in roots:
        alone = os.path.isfile(loader.root + root)
        for path in [root] if alone else files_under(loader.root, root):
            elf = loader.elf(path)
            if elf is not None and elf.loadable:
                entries[path] = elf
    return entries


def python_process(loader: Loader, python: str) -> Process | None:
    """Return the process of an interpreter as it starts; nothing where there is no interpreter."""
    interpreter = os.path.realpath(loader.root + python)[len(loader.root) :]
    program = loader.elf(interpreter) if os.path.exists(loader.root + interpreter) else None
    return loader.load(interpreter, program) if program is not None and program.loadable else None


def check_shared_libraries(check: dict[str, Any], image: Image) -> list[str]:
    """Load every ELF file under the roots as ``ld.so`` would, and return which NEEDED names are not found."""
    loader = image.loader
    roots = [os.path.normpath(root) for root in check["roots"]]
    entries = loadable_files(loader, roots)
    problems = [f"{root} does not exist" for root in roots if not os.path.exists(loader.root + root)]
    problems += [f"{path}: {text} (the file is damaged)" for path, text in sorted(loader.damaged.items())]

    # What site-packages holds is loaded by the environment's Python: its libraries are there already, and its RPATH
    # holds for all.
    within = python_process(loader, image.python)
    processes: dict[str, Process] = {}
    for path, elf in entries.items():
        plain = elf.interpreter or not site_packages_of(path)
        processes[path] = loader.load(path, elf, None if plain else within)

    # A NEEDED name that the search does not find is found all the same when a library of this name is in the process
    # already. Two ways to get there are accepted, and no other:
    # 1. nothing loads the file by itself: it is a dependency of a library, and that library's process misses nothing;
    # 2. Python code loads it after another library that finds the name by its own RPATH (or another library with that
    #    name): one of the same distribution, or of a distribution that this one requires (torchvision's extension comes
    #    after ``import torch``). This is how torch brings the CUDA libraries of the nvidia wheels: it loads them first,
    #    its own RPATH names their folders, and the files that come later name none.
    distributions = Distributions(loader.root, {site_packages_of(path) for path in entries} - {""})
    names_of_owner: dict[str, set[str]] = {}
    for path, process in processes.items():
        names_of_owner.setdefault(distributions.owner(path), set()).update(process.names)
    places: dict[str, list[str]] | None = None
    reported: set[tuple[str, str]] = set()
    for path, process in processes.items():
        owner = distributions.owner(path)
        first = distributions.loaded_first(owner) if owner else set()
        for file, name in process.missing:
            if name in check["provided"] or (file, name) in reported:
                continue
            if any(name in names_of_owner.get(other, ()) for other in first) or _found_as_dependency(
                loader, processes, path, (file, name)
            ):
                continue
            if places is None:
                places = library_places(loader.root)
            reported.add((file, name))
            through = f" (loaded for {path})" if path != file else ""
            place = f"; it lies in {', '.join(places[name][:3])}" if name in places else ""
            problems.append(f"{file}{through} does not find {name}{place}")
    if not entries and not problems:
        problems.append(f"no ELF file under {', '.join(roots)}: the check looks in the wrong place")
    advice = "install the library, name its folder in the file's RPATH or in /etc/ld.so.conf.d (and run ldconfig), "
    return told(problems, advice + "remove an unused file, or declare what the driver provides")


def _found_as_dependency(loader: Loader, processes: dict[str, Process], entry: str, missing: tuple[str, str]) -> bool:
    real_entry = os.path.realpath(loader.root + entry)
    real_file = os.path.realpath(loader.root + missing[0])
    return any(
        other != entry
        and real_entry in process.objects
        and real_file in process.objects
        and missing not in process.missing
        for other, process in processes.items()
    )


_SONAME = re.compile(r"(lib.+?)(?:-[0-9a-f]{8})?\.so(?:\.(.+))?")


def check_elf_needs(check: dict[str, Any], image: Image) -> list[str]:
    """Compare what the files under the roots NEED with the major versions that they should need."""
    loader, libraries, cuda = image.loader, check["libraries"], check["cuda"]
    wanted = {match[1]: match[2] or "" for match in map(_SONAME.fullmatch, libraries) if match}
    entries = loadable_files(loader, [os.path.normpath(root) for root in check["roots"]])
    distributions = Distributions(loader.root, {site_packages_of(path) for path in entries} - {""})
    problems = []
    for path, elf in entries.items():
        for soname in elf.needed:
            match = _SONAME.fullmatch(soname)
            if match is None or match[1] not in wanted:
                continue
            major, version = wanted[match[1]], match[2] or ""
            if version != major and not version.startswith(major + "."):
                problems.append(f"{distributions.owner(path) or 'no distribution'}: {path} needs {soname}")
    if cuda:
        installed, error = image.distributions()
        problems += [error] if error else []
        for one in installed:
            other = other_cuda(one["name"], one["version"], cuda)
            if other:
                problems.append(f"{one['name']} {one['version']} is for CUDA {other}")
    if not entries and not problems:
        problems.append(f"no ELF file under {', '.join(check['roots'])}: the check looks in the wrong place")
    has = f"{', '.join(libraries)}{f' (CUDA {cuda})' if cuda else ''}"
    return told(problems, f"the image has {has}: install the build for this version, or compile it")


def other_cuda(name: str, version: str, cuda: str) -> str:
    """Return the CUDA version that a distribution's name or local version names, if its major is not that of ``cuda``.

    ``2.4.1+cu121`` is for 12.1; ``2.8.3+cu12torch2.8``, ``nvidia-nccl-cu12`` and ``cupy-cuda12x`` are for 12.
    """
    for text in (*name.split("-"), version.partition("+")[2]):
        match = re.match(r"cu(?:da)?(\d{2})(\d?)(?!\d)", text)
        if match and match[1] != cuda.partition(".")[0]:
            return f"{match[1]}.{match[2]}" if match[2] else match[1]
    return ""


def check_loadable_library(check: dict[str, Any], image: Image) -> list[str]:
    """Load the library in a child, and follow the loader's search for it and for everything that it needs.

    Where only the driver's own libraries are missing, the child fails, and the search says that nothing else is.
    """
    library, loader = check["library"], image.loader
    if "/" in library:
        paths = matching(loader.root, library)
        if len(paths) != 1:
            return [f"{library} means {', '.join(paths) or 'no file'}: name exactly one"]
        library = paths[0]
    error = _dlopen(image.python, library) if not loader.root else ""
    process = python_process(loader, image.python)
    if process is None or process.main is None:
        return [error or image.python + " is not a program"]
    found = None
    if "/" not in library:
        found = loader.find(library, process.main, process.main)
    elif (elf := loader.elf(library)) is not None and elf.loadable:
        found = (library, elf)
    problems = [f"no {library} is found"]
    if found is not None:
        missing = loader.load(found[0], found[1], process).missing
        problems = [f"{file} does not find {name}" for file, name in missing if name not in check["provided"]]
    advice = "install the library, or name its folder in the file's RPATH or in /etc/ld.so.conf.d (and run ldconfig)"
    unexplained = error and not any(name in error for name in check["provided"])
    return told(problems, advice) or ([error] if unexplained else [])


# Runs under the environment's own Python: sent as text. Each library is opened in a process of its own. What it needs
# may lie beside it: then a library of that folder opens it, so that the needed one is open before (libcufile_rdma).
_OPEN = """
import ctypes, json, os, sys
def opened(path, before=()):
    try:
        return ctypes.CDLL(path, os.RTLD_NOW)
    except OSError as error:
        beside = os.path.join(os.path.dirname(path), str(error).partition(":")[0])
        if beside == path or beside in before or not os.path.isfile(beside):
            raise
        opened(beside, (*before, path))
        return opened(path, (*before, beside))
found = {}
for path in sys.argv[1:]:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            opened(path)
        except OSError as error:
            said = str(error)
        os.write(send, said.encode("utf-8", "replace")[:4000])
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as answer:
        said = answer.read().decode("utf-8", "replace")
    status = os.waitpid(child, 0)[1]
    if said or status:
        found[path] = said or "opening it ends the process with status %d" % status
print("\\n" + json.dumps(found))
"""


def check_openable_libraries(check: dict[str, Any], image: Image) -> list[str]:
    """Open each library that fits a pattern; where only the driver's are missing, follow the loader's search."""
    problems, paths = [], []
    for pattern in check["libraries"]:
        fitting = [path for path in matching(image.root, pattern) if not os.path.islink(image.root + path)]
        problems += [] if fitting else [f"no file fits {pattern}"]
        paths += fitting
    # A library by its name is where the loader finds it.
    places = {os.path.basename(path) if check["by_name"] else image.root + path: path for path in paths}
    output, error = _run([image.python, "-c", _OPEN, *places])
    if error:
        return [f"{image.python} does not open them: {error}"]
    for opened, said in json.loads(output.splitlines()[-1]).items():
        path = places[opened]
        elf = image.loader.elf(path)
        if elf is not None and any(said.startswith(name + ":") for name in check["provided"]):
            process = python_process(image.loader, image.python)
            missing = image.loader.load(path, elf, process).missing
            lines = [f"{file} does not find {name}" for file, name in missing if name not in check["provided"]]
            problems += lines
        else:
            problems.append(f"{path} cannot be opened: {said.replace(path + ': ', '')}")
    return told(problems, "a job that first needs it fails then: install the library's wheel again, and what it needs")


def _dlopen(python: str, library: str) -> str:
    """Return the loader's message about a library; nothing if it loads."""
    program = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], os.RTLD_NOW)"
    _, error = _run([python, "-c", program, library])
    return error.splitlines()[-1] if error else ""


def _run(command: list[str]) -> tuple[str, str]:
    """Run a child; return what it printed to stdout, and why it failed: what it printed to stderr, or its status."""
    try:
        child = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=IMPORT_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    output, said = (text.decode("utf-8", "replace") for text in (child.stdout, child.stderr))
    if child.returncode == 0:
        return output, ""
    return output, said.strip()[-2000:] or f"ended with status {child.returncode}"


# --- the whole file system -------------------------------------------------------------------------------------------


def walk(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every plain file of the image, links not followed, kernel file systems left out."""
    stack = [root or "/"]
    while stack:
        folder = stack.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            path = entry.path[len(root) :]
            if entry.is_dir(follow_symlinks=False):
                if path not in ("/proc", "/sys", "/dev"):
                    stack.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield path, entry.stat(follow_symlinks=False)


def library_places(root: str) -> dict[str, list[str]]:
    """Return where files that look like libraries lie, by name (links too: a link is how a library has its name)."""
    places: dict[str, list[str]] = {}
    for folder, folders, names in os.walk(root or "/"):
        if folder == (root or "/"):
            folders[:] = [name for name in folders if name not in ("proc", "sys", "dev")]
        for name in names:
            if ".so" in name:
                places.setdefault(name, []).append(folder[len(root) :] or "/")
    return places


def check_single_library(check: dict[str, Any], image: Image) -> list[str]:
    """Find every distinct ELF file that goes by the soname, also under a name that auditwheel gave it."""
    stem, dot, rest = check["soname"].partition(".so")
    pattern = re.compile(re.escape(stem) + "(-[0-9a-f]{8})?" + re.escape(dot + rest) + r"(\..+)?")
    found: dict[tuple[int, int], str] = {}
    for path, status in image.libraries():
        if pattern.fullmatch(path.rsplit("/", 1)[-1]) and _is_elf(image.root + path):
            found.setdefault((status.st_dev, status.st_ino), path)
    advice = "which one is loaded depends on the search order: keep one and remove the others"
    return told(list(found.values()), advice) if len(found) > 1 else []


def check_duplicate_packages(check: dict[str, Any], image: Image) -> list[str]:
    """Find distributions that are installed twice, Debian packages of two architectures, libraries of two versions."""
    installed, error = image.distributions()
    problems = [error] if error else []
    places: dict[str, list[str]] = {}
    for one in installed:
        places.setdefault(one["name"], []).append(f"{one['version']} in {one['folder']}")
    problems += [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    architectures: dict[str, list[str]] = {}
    for paragraph in _text(image.root + "/var/lib/dpkg/status").split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): *(.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            architectures.setdefault(fields["Package"], []).append(fields.get("Architecture", ""))
    problems += [
        f"Debian package {name}: {', '.join(found)}" for name, found in sorted(architectures.items()) if len(found) > 1
    ]
    for name, majors in library_majors(image, check["libraries"]).items():
        if len(majors) > 1:
            lie = [f"{paths[0]} (major version {major})" for major, paths in sorted(majors.items())]
            problems.append(f"{name}: {', '.join(lie)}")
    return told(problems, "which one is used depends on the search order: keep one and remove the others")


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def library_majors(image: Image, names: list[str]) -> dict[str, dict[str, list[str]]]:
    """Return, by name without ``.so``, which major versions of a library there are, and where each lies."""
    found: dict[str, dict[str, list[str]]] = {name: {} for name in names}
    for path, _status in image.libraries():
        match = _SONAME.fullmatch(path.rsplit("/", 1)[-1])
        if match is None or match[1] not in found:
            continue
        try:
            elf = read_elf(image.root + path)
        except (DamagedElfError, OSError):
            continue
        # The file's name may say more, or less, than the name that it is loaded by.
        named = _SONAME.fullmatch(elf.soname) if elf is not None and elf.loadable else None
        if named is not None and named[2]:
            found[match[1]].setdefault(named[2].partition(".")[0], []).append(path)
    return found


def _is_elf(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def largest(root: str) -> list[tuple[str, int]]:
    """Return the ten largest components: Python packages each for itself, everything else by folder."""
    totals: dict[str, int] = {}
    for path, status in walk(root):
        match = re.match(r".*/(?:site|dist)-packages/(?:nvidia/)?[^/]+", path)
        if match:
            component = match[0]
        else:
            component = "/".join(path.split("/")[:4]) if path.count("/") > 3 else os.path.dirname(path) or "/"
        totals[component] = totals.get(component, 0) + status.st_size
    return sorted(totals.items(), key=lambda item: -item[1])[:10]


# --- environment, imports, distributions -----------------------------------------------------------------------------


def check_search_path(check: dict[str, Any], image: Image) -> list[str]:
    """Return what is wrong with the entries of a path-like variable."""
    variable = check["variable"]
    value = os.environ.get(variable, "")
    problems = ["PATH is not set"] if variable == "PATH" and not value else []
    for entry in value.split(":") if value else ():
        if not entry:
            problems.append("an entry is empty, which means the current folder: remove the stray colon")
        elif not entry.startswith("/"):
            problems.append(f"{entry} is not absolute: it means another folder for every program")
        elif not os.path.isdir(image.root + entry):
            problems.append(f"{entry} {'is not a folder' if os.path.exists(image.root + entry) else 'does not exist'}")
    return told(problems, f"correct {variable} in the image's environment")


# Runs under the environment's own Python: sent as text.
_IMPORT = """
import importlib, sys
importlib.import_module(sys.argv[1])
with open("/proc/self/maps") as maps:
    paths = {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
print("\\n" + "\\n".join(sorted("mapped " + path for path in paths)))
"""

_DISTRIBUTIONS = """
import importlib.metadata, json, os, re, sys
# The folder of -c is the current one, which is not part of the environment.
sys.path = [entry for entry in sys.path if entry]
found = []
for one in importlib.metadata.distributions():
    name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
    found.append({"name": name, "version": one.version, "folder": str(one.locate_file(""))})
print("\\n" + json.dumps(found))
"""


def check_loaded_library(check: dict[str, Any], image: Image) -> list[str]:
    """Import the module in a child and read from its memory map which files of the library's name it holds."""
    output, error = _run([image.python, "-c", _IMPORT, check["module"]])
    if error:
        return [f"import {check['module']} does not succeed:", error]
    expected = os.path.realpath(check["library"])
    stem = os.path.basename(check["library"]).partition(".so")[0]
    pattern = re.compile(re.escape(stem) + r"(-[0-9a-f]{8})?\.so(\..+)?")
    mapped = [line[7:] for line in output.splitlines() if line.startswith("mapped ")]
    others = [path for path in mapped if path != expected and pattern.fullmatch(path.rsplit("/", 1)[-1])]
    if expected not in mapped:
        instead = f"it loads {', '.join(others)} instead" if others else "no library of this name is loaded"
        return [f"{instead}: look at the RPATH of the module's libraries and at LD_LIBRARY_PATH"]
    twice = "two copies of one library in a process fail sooner or later"
    return [f"it also loads {', '.join(others)}: {twice}"] if others else []


def check_absent(check: dict[str, Any], image: Image) -> list[str]:
    """Return the paths that fit a pattern which nothing may fit."""
    return told(matching(image.root, check["path"]), "must not be in the image: remove it in the step that brings it")


def installed_distributions(python: str) -> tuple[list[ProbedDistribution], str]:
    """Ask the environment's Python for all distributions on its search path, ``PYTHONPATH`` too."""
    output, error = _run([python, "-c", _DISTRIBUTIONS])
    found: list[ProbedDistribution] = [] if error else json.loads(output.splitlines()[-1])
    return found, error


def matching(root: str, pattern: str) -> list[str]:
    """Return the paths that fit a pattern, dangling links too."""
    found = glob.glob(glob.escape(root) + pattern, recursive=True)
    # Some versions of glob answer FOLDER/ to FOLDER/** without looking whether there is such a folder.
    return sorted(path[len(root) :] for path in found if os.path.lexists(path))


class Image:
    """What checks look at; each part is read once, when it is asked for."""

    def __init__(self, root: str, python: str) -> None:
        """Read nothing but the loader's cache yet."""
        self.root = root.rstrip("/")
        self.python = python
        self.loader = Loader(self.root, os.environ.get("LD_LIBRARY_PATH", ""))
        self._distributions: tuple[list[ProbedDistribution], str] | None = None
        self._libraries: list[tuple[str, os.stat_result]] | None = None

    def distributions(self) -> tuple[list[ProbedDistribution], str]:
        """Return the distributions of the environment's Python, or why it does not list them."""
        if self._distributions is None:
            found, error = installed_distributions(self.python)
            self._distributions = found, f"{self.python} does not list its distributions: {error}" if error else ""
        return self._distributions

    def libraries(self) -> list[tuple[str, os.stat_result]]:
        """Return every plain file whose name is that of a library."""
        if self._libraries is None:
            self._libraries = [(path, status) for path, status in walk(self.root) if ".so" in path.rsplit("/", 1)[-1]]
        return self._libraries


QUESTIONS: dict[str, Callable[[dict[str, Any], Image], list[str]]] = {
    "shared-libraries": check_shared_libraries,
    "elf-needs": check_elf_needs,
    "loadable-library": check_loadable_library,
    "openable-libraries": check_openable_libraries,
    "loaded-library": check_loaded_library,
    "single-library": check_single_library,
    "duplicate-packages": check_duplicate_packages,
    "search-path": check_search_path,
    "path": check_absent,
}
"""The kinds of checks that are answered here; of paths only those that must be absent."""


def answer_request(request: ProbeRequest) -> ProbeAnswer:
    """Answer everything."""
    image = Image(request["root"], request["python"])
    problems = [QUESTIONS[check["kind"]](check, image) for check in request["checks"]]
    distributions, error = image.distributions() if request["distributions"] else ([], "")
    return {
        "problems": problems,
        "distributions": distributions,
        "distributions_error": error,
        "sizes": largest(image.root) if request["sizes"] else [],
    }


if __name__ == "__main__":
    print(MARKER + json.dumps(answer_request(json.loads(sys.argv[1]))))
