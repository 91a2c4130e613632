"""Checks the libraries of an image: the dynamic loader lists them, as for ldd(1).

Part of the program that runs inside (``trainworks.imagetest.probe``).
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple

from trainworks.imagetest.probe.files import Image, ask, matching, told

PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
PT_GNU_STACK, PT_GNU_RELRO = 0x6474E551, 0x6474E552
PF_X = 1
ET_EXEC, ET_DYN = 2, 3
DT_NULL, DT_NEEDED, DT_STRTAB, DT_SONAME = 0, 1, 5, 14
DT_BIND_NOW, DT_FLAGS, DT_FLAGS_1 = 24, 30, 0x6FFFFFFB
DF_BIND_NOW, DF_1_NOW, DF_1_PIE = 8, 1, 0x08000000

SONAME = re.compile(r"(lib.+?)(?:-[0-9a-f]{8})?\.so(?:\.(.+))?")
"""The name of a library and its version; auditwheel adds 8 digits to a name."""


class DamagedElfError(Exception):
    """A file starts like an ELF file and is damaged."""


class _Segment(NamedTuple):
    """A row of an ELF file's program headers."""

    kind: int
    rights: int
    offset: int
    address: int
    length: int


class Elf(NamedTuple):
    """The header of a program or library of this machine.

    Attributes:
        needed: The names of the libraries that it needs.
        soname: Its own name as a library, or ``""``.
        is_program: Whether it can be started.
        loader: The program that starts it, if any.
        lacks: The linker's protections that it does not have, such as ``-z now``.
    """

    needed: tuple[str, ...]
    soname: str
    is_program: bool
    loader: str
    lacks: tuple[str, ...]


def read_elf(path: str) -> Elf | None:
    """Read a program or library.

    ``None`` for a file that the loader ignores, also one of another machine (GPU code is ELF too).

    Raises:
        DamagedElfError: The file is damaged.
    """
    with open(path, "rb") as file, open("/proc/self/exe", "rb") as own_program:
        head, own_head = file.read(64), own_program.read(20)
        if not _is_of_this_machine(head, own_head):
            return None
        try:
            return _parse_elf(file.fileno(), head)
        except (struct.error, ValueError, OSError, OverflowError) as error:
            raise DamagedElfError(str(error)) from error


def _is_of_this_machine(head: bytes, own_head: bytes) -> bool:
    """Whether the head of a file is ELF, with the class, byte order and machine of this program.

    The head is the first 64 bytes, a whole header of ELF. A shorter file counts as one of this
    machine, so that a file that was cut off is read, and reported as damaged.

    Args:
        head: The beginning of the file.
        own_head: The head of the Python that runs.
    """
    if head[:4] != own_head[:4]:
        return False
    is_complete = len(head) == 64
    return not is_complete or (head[4:6], head[18:20]) == (own_head[4:6], own_head[18:20])


def _parse_elf(file: int, head: bytes) -> Elf | None:
    """Read the dynamic section of an ELF file; ``None`` for a file without one."""
    kind, table, size, count = struct.unpack("<16xH14xQ14xHH6x", head)
    if kind not in (ET_EXEC, ET_DYN):
        return None
    segments = [
        _Segment(*struct.unpack("<IIQQ8xQ", os.pread(file, 40, table + size * number)))
        for number in range(count)
    ]
    segment_by_kind = {segment.kind: segment for segment in segments}
    dynamic = segment_by_kind.get(PT_DYNAMIC)
    if dynamic is None:
        return None
    needed_positions: list[int] = []
    tags: dict[int, int] = {}
    section = os.pread(file, dynamic.length - dynamic.length % 16, dynamic.offset)
    for tag, value in struct.iter_unpack("<qQ", section):
        if tag == DT_NULL:
            break
        tags[tag] = value
        if tag == DT_NEEDED:
            needed_positions.append(value)
    strings = _string_table(segments, tags)
    if strings is None and not tags.keys().isdisjoint((DT_NEEDED, DT_SONAME)):
        raise DamagedElfError("its string table lies outside of the file")

    def text(position: int) -> str:
        content = os.pread(file, 4096, position).split(b"\0", 1)[0]
        return content.decode("utf-8", "surrogateescape")

    needed: list[str] = []
    soname = loader = ""
    if strings is not None:
        needed = [text(strings + position) for position in needed_positions]
        if DT_SONAME in tags:
            soname = text(strings + tags[DT_SONAME])
    interpreter = segment_by_kind.get(PT_INTERP)
    if interpreter is not None:
        loader = text(interpreter.offset)
    is_pie = bool(tags.get(DT_FLAGS_1, 0) & DF_1_PIE)
    rights = {segment.kind: segment.rights for segment in segments}
    return Elf(
        needed=tuple(needed),
        soname=soname,
        is_program=interpreter is not None or is_pie,
        loader=loader,
        lacks=_unprotected(rights, tags),
    )


def _string_table(segments: list[_Segment], tags: dict[int, int]) -> int | None:
    """Return the place of the string table in the file, or ``None``.

    The dynamic section has its address in memory; the segment around it has the place.
    """
    address = tags.get(DT_STRTAB)
    if address is None:
        return None
    for segment in segments:
        end = segment.address + segment.length
        if segment.kind == PT_LOAD and segment.address <= address < end:
            return address - segment.address + segment.offset
    return None


def _unprotected(rights: dict[int, int], tags: dict[int, int]) -> tuple[str, ...]:
    """Return the linker's protections that a file lacks, by the linker's options.

    Args:
        rights: The rights of its segments, by their kind.
        tags: Its dynamic section.
    """
    flags = tags.get(DT_FLAGS, 0)
    more_flags = tags.get(DT_FLAGS_1, 0)
    is_bound = DT_BIND_NOW in tags or flags & DF_BIND_NOW or more_flags & DF_1_NOW
    options = []
    if PT_GNU_RELRO not in rights:
        options.append("-z relro")
    if not is_bound:
        options.append("-z now")
    # Without this segment the kernel makes the stack executable.
    if rights.get(PT_GNU_STACK, PF_X) & PF_X:
        options.append("-z noexecstack")
    return tuple(options)


def loadable_files(roots: Iterable[str], below: str = "") -> tuple[dict[str, Elf], list[str]]:
    """Return each program and library under the roots (folders or files).

    And a line for each file that is damaged.
    """
    entries: dict[str, Elf] = {}
    damaged = []
    for root in roots:
        for path in _plain_files(below + os.path.normpath(root)):
            shown = path[len(below) :]
            try:
                elf = read_elf(path)
            except DamagedElfError as error:
                damaged.append(f"{shown}: {error} (the file is damaged)")
                continue
            except OSError:
                continue
            if elf is not None:
                entries[shown] = elf
    return entries, damaged


def _plain_files(root: str) -> Iterator[str]:
    """Yield the plain files under a folder, or the file itself; links are not followed."""
    if os.path.isfile(root):
        yield root
    for folder, folder_names, names in os.walk(root):
        folder_names.sort()
        for name in sorted(names):
            path = f"{folder.rstrip('/')}/{name}"
            if os.path.isfile(path) and not os.path.islink(path):
                yield path


class Process(NamedTuple):
    """The libraries of a process that loads one file.

    Attributes:
        found: The path of each library that the loader finds, by name.
        missing: The names that it does not find.
        error: The loader's error if it does not load the file, or one of the libraries.
    """

    found: dict[str, str]
    missing: list[str]
    error: str


_LISTED = re.compile(r"\t(.+?)(?: => (.+?))?(?: \(0x[0-9a-f]+\))?")


def trace(program: str, *, preload: str = "") -> Process:
    """Let the loader list the libraries of a program or library, and of one that is preloaded.

    Nothing starts.
    """
    own = read_elf("/proc/self/exe")
    assert own is not None
    command = [own.loader, program]
    if "ld-musl" in own.loader:
        # musl's loader does not know the variable, and would start the program. Its option ends at
        # the first missing library.
        command.insert(1, "--list")
    environment = {**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}
    if preload:
        environment["LD_PRELOAD"] = preload
    child = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        errors="surrogateescape",
    )
    found: dict[str, str] = {}
    missing = []
    for line in child.stdout.splitlines():
        match = _LISTED.fullmatch(line)
        if match is None:
            continue
        name, path = match[1], match[2]
        if path == "not found":
            missing.append(name)
        else:
            found[name] = path or name
    # The loader lists auxiliary libraries (DT_AUXILIARY), too, and does without them.
    files = (program, preload, *found.values())
    missing = [name for name in missing if _is_needed(name, files)]
    has_failed = child.returncode != 0 or (preload != "" and preload not in found)
    return Process(found=found, missing=missing, error=child.stderr.strip() if has_failed else "")


def _is_needed(name: str, files: Iterable[str]) -> bool:
    """Return whether one of the files needs a library (DT_NEEDED)."""
    for file in files:
        try:
            elf = read_elf(file)
        except (DamagedElfError, OSError):
            continue
        if elf is not None and name in elf.needed:
            return True
    return False


def processes_of(entries: dict[str, Elf], python: str) -> dict[str, Process]:
    """Return the process of each program and library.

    The environment's Python loads a library of site-packages: Python's own libraries are in the
    process already, and its RPATH holds for all.
    """
    loaded_by_python = os.path.exists(python) and not trace(python).error

    def process_of(entry: tuple[str, Elf]) -> Process:
        path, elf = entry
        # A blank or a colon would end the name of a library to preload.
        can_preload = not re.search("[ :]", path)
        is_extension = not elf.is_program and bool(site_packages_of(path))
        if loaded_by_python and is_extension and can_preload:
            return trace(python, preload=path)
        return trace(path)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip(entries, pool.map(process_of, entries.items())))


def site_packages_of(path: str) -> str:
    """Return the ``site-packages`` folder that a path lies in, or nothing."""
    match = re.match(r"(.*/(?:site|dist)-packages)/", path)
    return match[1] if match else ""


def canonical(name: str) -> str:
    """Return the normalised name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Distributions:
    """The Python distribution of each file, and the distributions that each requires."""

    def __init__(self, paths: Iterable[str], below: str = "") -> None:
        """Read the metadata of every distribution in the ``site-packages`` folders of paths."""
        self.owners: dict[str, str] = {}
        self.requires: dict[str, set[str]] = {}
        folders = {site_packages_of(path) for path in paths}
        for folder in sorted(folders - {""}):
            for distribution in metadata.distributions(path=[below + folder]):
                self._add(distribution, folder)

    def _add(self, distribution: metadata.Distribution, folder: str) -> None:
        name = canonical(distribution.metadata["Name"] or "")
        required = self.requires.setdefault(name, set())
        for requirement in distribution.requires or ():
            is_optional = re.search(r"\bextra\s*==", requirement)
            match = re.match(r"[A-Za-z0-9._-]+", requirement)
            if match and not is_optional:
                required.add(canonical(match[0]))
        for file in distribution.files or ():
            self.owners[os.path.normpath(f"{folder}/{file}")] = name

    def owner(self, path: str) -> str:
        """Return the distribution, or for a file in no record its top folder in ``site-packages``.

        Else nothing.
        """
        if path in self.owners:
            return self.owners[path]
        match = re.match(r".*/(?:site|dist)-packages/([^/]+)", path)
        return match[0] if match else ""

    def loaded_first(self, owner: str) -> set[str]:
        """Return the distribution and all that it requires, also indirectly."""
        closure: set[str] = set()
        queue = [owner]
        while queue:
            name = queue.pop()
            if name not in closure:
                closure.add(name)
                queue += self.requires.get(name, ())
        return closure


def check_shared_libraries(check: dict[str, Any], image: Image) -> list[str]:
    """Let the loader load every program and library under the roots; return the missing names.

    A missing name is accepted if a library of this name is in the process already. There are two
    accepted ways to that:

    1. nothing loads the file by itself: it is a dependency of a library, and
       that library's process misses nothing;
    2. Python code loads it after another library that finds the name by its own RPATH (or another
       library with that name): one of the same distribution, or of a distribution that this one
       requires (torchvision's extension comes after ``import torch``). This is how torch brings the
       CUDA libraries of the nvidia wheels: it loads them first, its own RPATH names their folders,
       and the files that come later name none.
    """
    roots = [os.path.normpath(root) for root in check["roots"]]
    entries, damaged = loadable_files(roots)
    problems = [f"{root} does not exist" for root in roots if not os.path.exists(root)]
    problems += damaged
    loaded = _LoadedFiles(entries, image.python)
    reported: set[tuple[str, str]] = set()
    for path, process in loaded.processes.items():
        if process.error:
            reason = process.error.rpartition("\n")[2]
            problems.append(f"{path} cannot be loaded: {reason}")
        for name in process.missing:
            if name in check["provided"] or loaded.is_loaded_before(name, path):
                continue
            file = _needing(name, path, process)
            if (file, name) in reported or loaded.is_loaded_as_dependency(name, file, path):
                continue
            reported.add((file, name))
            through = f" (loaded for {path})" if path != file else ""
            folders = [
                os.path.dirname(library)
                for library in image.libraries()
                if os.path.basename(library) == name
            ]
            place = f"; it lies in {', '.join(folders[:3])}" if folders else ""
            problems.append(f"{file}{through} does not find {name}{place}")
    if not entries and not problems:
        problems.append(f"no ELF file under {', '.join(roots)}: the check looks in the wrong place")
    advice = (
        "install the library, name its folder in the file's"
        " RPATH or in /etc/ld.so.conf.d (and run ldconfig), "
        "remove an unused file, or declare what the driver provides"
    )
    return told(problems, advice)


class _LoadedFiles:
    """Programs and libraries, each with the process that loads it."""

    def __init__(self, entries: dict[str, Elf], python: str) -> None:
        """Let the loader list the libraries of each.

        Args:
            entries: Programs and libraries by path.
            python: The environment's Python.
        """
        self.processes = processes_of(entries, python)
        self._distributions = Distributions(entries)
        self._files: dict[str, set[str]] = {}
        self._names_of_owner: dict[str, set[str]] = {}
        for path, process in self.processes.items():
            files = (path, *process.found.values())
            self._files[path] = {os.path.realpath(file) for file in files}
            owner = self._distributions.owner(path)
            names = self._names_of_owner.setdefault(owner, set())
            names.update(process.found, (entries[path].soname, os.path.basename(path)))

    def is_loaded_before(self, name: str, path: str) -> bool:
        """Whether Python loads a library of this name before the file of a path."""
        owner = self._distributions.owner(path)
        if not owner:
            return False
        for earlier in self._distributions.loaded_first(owner):
            if name in self._names_of_owner.get(earlier, ()):
                return True
        return False

    def is_loaded_as_dependency(self, name: str, file: str, path: str) -> bool:
        """Whether another process loads both files and does not miss the name."""
        both = {os.path.realpath(path), os.path.realpath(file)}
        for other, process in self.processes.items():
            if other != path and both <= self._files[other] and name not in process.missing:
                return True
        return False


def _needing(name: str, path: str, process: Process) -> str:
    """Return the file of a process that names a library, the process's own first."""
    for file in (path, *process.found.values()):
        if _is_needed(name, (file,)):
            return file
    return path


def check_elf_needs(check: dict[str, Any], image: Image) -> list[str]:
    """Compare the major versions that files under the roots need with the expected ones."""
    libraries, cuda = check["libraries"], check["cuda"]
    majors = {}
    for library in libraries:
        match = SONAME.fullmatch(library)
        if match:
            majors[match[1]] = match[2] or ""
    entries, _ = loadable_files(check["roots"], image.root)
    distributions = Distributions(entries, image.root)
    problems = []
    for path, elf in entries.items():
        for soname in elf.needed:
            match = SONAME.fullmatch(soname)
            if match is None or match[1] not in majors:
                continue
            major, version = majors[match[1]], match[2] or ""
            if version != major and not version.startswith(major + "."):
                owner = distributions.owner(path) or "no distribution"
                problems.append(f"{owner}: {path} needs {soname}")
    if cuda:
        installed, error = image.distributions()
        if error:
            problems.append(error)
        for row in installed:
            other = other_cuda(row["name"], row["version"], cuda)
            if other:
                problems.append(f"{row['name']} {row['version']} is for CUDA {other}")
    if not entries and not problems:
        problems.append(
            f"no ELF file under {', '.join(check['roots'])}: the check looks in the wrong place"
        )
    provided = ", ".join(libraries)
    if cuda:
        provided += f" (CUDA {cuda})"
    advice = f"the image has {provided}: install the build for this version, or compile it"
    return told(problems, advice)


def other_cuda(name: str, version: str, cuda: str) -> str:
    """Return another CUDA version in a distribution's name or local version, or ``""``.

    Only the major version is compared with ``cuda``. ``2.4.1+cu121`` is for 12.1;
    ``2.8.3+cu12torch2.8``, ``nvidia-nccl-cu12`` and ``cupy-cuda12x`` are for 12.
    """
    for text in (*name.split("-"), version.partition("+")[2]):
        match = re.match(r"cu(?:da)?(\d{2})(\d?)(?!\d)", text)
        if match and match[1] != cuda.partition(".")[0]:
            return f"{match[1]}.{match[2]}" if match[2] else match[1]
    return ""


# Runs under the environment's own Python: sent as text. Each library is opened in a process of its
# own. What it needs may lie beside it: then a library of that folder opens it, so that the needed
# one is open before (libcufile_rdma).
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
for path in sys.argv[2:]:
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
print("\\n" + sys.argv[1] + json.dumps(found) + sys.argv[1])
"""


def check_openable_libraries(check: dict[str, Any], image: Image) -> list[str]:
    """Open each library that fits a pattern."""
    problems = []
    path_by_library = {}
    for pattern in check["libraries"]:
        paths = [path for path in matching("", pattern) if not os.path.islink(path)]
        if not paths:
            problems.append(f"no file fits {pattern}")
        for path in paths:
            # By its name alone, the loader opens the first library on its own path.
            library = os.path.basename(path) if check["by_name"] else path
            path_by_library[library] = path
    problems += _unopened(path_by_library, image, check["provided"])
    return told(
        problems,
        "a job that first needs it fails then:"
        " install the library's wheel again, and what it needs",
    )


FORTIFIED = re.compile(rb"\0__\w+_chk\0")


def check_hardened_libraries(check: dict[str, Any], image: Image) -> list[str]:
    """Return the protections that the files of some patterns lack."""
    problems, contents = [], []
    for pattern in check["libraries"]:
        paths = matching(image.root, pattern)
        plain_paths = [path for path in paths if not os.path.islink(image.root + path)]
        if not plain_paths:
            problems.append(f"no file fits {pattern}")
        entries, _ = loadable_files(plain_paths, image.root)
        for path, elf in entries.items():
            problems += [f"{path} is linked without {option}" for option in elf.lacks]
            with open(image.root + path, "rb") as file:
                contents.append(file.read())
    if check["guards"] and contents:
        if not any(b"\0__stack_chk_fail\0" in content for content in contents):
            problems.append("no file is compiled with -fstack-protector-strong")
        if not any(FORTIFIED.search(content) for content in contents):
            problems.append("no file is compiled with -D_FORTIFY_SOURCE=2")
    return told(
        problems,
        "compile it by `hardened` of templates/macros.j2, if its build reads the variables",
    )


def check_loadable_library(check: dict[str, Any], image: Image) -> list[str]:
    """Open a library by its name, or the one file that fits a pattern."""
    library = check["library"]
    if "/" in library:
        paths = matching("", library)
        if len(paths) != 1:
            return [f"{library} means {', '.join(paths) or 'no file'}: name exactly one"]
        library = paths[0]
    advice = (
        "install the library, or name its folder in the file's"
        " RPATH or in /etc/ld.so.conf.d (and run ldconfig)"
    )
    return told(_unopened({library: library}, image, check["provided"]), advice)


def _unopened(path_by_library: dict[str, str], image: Image, provided: list[str]) -> list[str]:
    """Return the reasons why libraries cannot be opened.

    Where one of the driver's is missing, other names that the loader misses.

    Args:
        path_by_library: The libraries to open, by path or name, and the path for messages.
        image: Its environment's Python opens them.
        provided: Names of the driver's libraries.
    """
    errors, error = ask(image.python, _OPEN, *path_by_library)
    if error:
        return [f"{image.python} does not open them: {error}"]
    problems = []
    for library, reason in errors.items():
        path = path_by_library[library]
        process = trace(image.python, preload=library)
        missing = [name for name in process.missing if name not in provided]
        is_for_driver = any(reason.startswith(name + ":") for name in provided)
        if "/" not in library and library not in process.found:
            problems.append(f"no {library} is found")
        elif missing:
            problems += [
                f"{_needing(name, path, process)} does not find {name}" for name in missing
            ]
        elif not is_for_driver:
            problems.append(f"{path} cannot be opened: {reason.replace(library + ': ', '')}")
    return problems


# Runs under the environment's own Python: sent as text.
_IMPORT = """
import importlib, json, sys
importlib.import_module(sys.argv[2])
with open("/proc/self/maps") as maps:
    paths = {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
print("\\n" + sys.argv[1] + json.dumps(sorted(paths)) + sys.argv[1])
"""


def check_loaded_library(check: dict[str, Any], image: Image) -> list[str]:
    """Import the module in a child, and check the files of the library's name in its memory map."""
    mapped, error = ask(image.python, _IMPORT, check["module"])
    if error:
        return [f"import {check['module']} does not succeed:", error]
    expected = os.path.realpath(check["library"])
    stem = os.path.basename(check["library"]).partition(".so")[0]
    pattern = re.compile(re.escape(stem) + r"(-[0-9a-f]{8})?\.so(\..+)?")
    others = [
        path for path in mapped if path != expected and pattern.fullmatch(path.rsplit("/", 1)[-1])
    ]
    if expected not in mapped:
        instead = "no library of this name is loaded"
        if others:
            instead = f"it loads {', '.join(others)} instead"
        return [f"{instead}: look at the RPATH of the module's libraries and at LD_LIBRARY_PATH"]
    if others:
        reason = "two copies of one library in a process fail sooner or later"
        return [f"it also loads {', '.join(others)}: {reason}"]
    return []


def check_single_library(check: dict[str, Any], image: Image) -> list[str]:
    """Find every distinct ELF file of a soname, also under a name that auditwheel gave it."""
    stem, dot, rest = check["soname"].partition(".so")
    pattern = re.compile(re.escape(stem) + "(-[0-9a-f]{8})?" + re.escape(dot + rest) + r"(\..+)?")
    path_by_inode: dict[tuple[int, int], str] = {}
    for path, status in image.plain_libraries():
        if not pattern.fullmatch(path.rsplit("/", 1)[-1]):
            continue
        with open(image.root + path, "rb") as file:
            if file.read(4) == b"\x7fELF":
                path_by_inode.setdefault((status.st_dev, status.st_ino), path)
    if len(path_by_inode) < 2:
        return []
    advice = "which one is loaded depends on the search order: keep one and remove the others"
    return told(list(path_by_inode.values()), advice)


def check_duplicate_packages(check: dict[str, Any], image: Image) -> list[str]:
    """Find distributions that are installed twice, Debian packages of two
    architectures, libraries of two versions.
    """
    installed, error = image.distributions()
    problems = [error] if error else []
    places: dict[str, list[str]] = {}
    for row in installed:
        places.setdefault(row["name"], []).append(f"{row['version']} in {row['folder']}")
    for name, copies in sorted(places.items()):
        if len(copies) > 1:
            problems.append(f"{name}: {', '.join(copies)}")
    architectures: dict[str, list[str]] = {}
    for fields in image.debian_packages():
        architectures.setdefault(fields["Package"], []).append(fields.get("Architecture", ""))
    for name, names in sorted(architectures.items()):
        if len(names) > 1:
            problems.append(f"Debian package {name}: {', '.join(names)}")
    for name, majors in library_majors(image, check["libraries"]).items():
        if len(majors) > 1:
            copies = [
                f"{paths[0]} (major version {major})" for major, paths in sorted(majors.items())
            ]
            problems.append(f"{name}: {', '.join(copies)}")
    return told(
        problems, "which one is used depends on the search order: keep one and remove the others"
    )


def library_majors(image: Image, names: list[str]) -> dict[str, dict[str, list[str]]]:
    """Return the major versions of libraries and the paths of each, by name without ``.so``."""
    majors_by_name: dict[str, dict[str, list[str]]] = {name: {} for name in names}
    for path, _ in image.plain_libraries():
        match = SONAME.fullmatch(path.rsplit("/", 1)[-1])
        if match is None or match[1] not in majors_by_name:
            continue
        try:
            elf = read_elf(image.root + path)
        except (DamagedElfError, OSError):
            continue
        if elf is None:
            continue
        # The file's name may have more, or less, than the soname.
        soname = SONAME.fullmatch(elf.soname)
        if soname is not None and soname[2]:
            major = soname[2].partition(".")[0]
            majors_by_name[match[1]].setdefault(major, []).append(path)
    return majors_by_name
