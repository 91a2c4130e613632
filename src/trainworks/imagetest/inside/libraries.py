"""What the dynamic loader of an image finds: its own answer to
``LD_TRACE_LOADED_OBJECTS``, as ldd(1) asks it.

Part of the program that runs inside (``trainworks.imagetest.inside``).
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

from trainworks.imagetest.inside.files import Image, ask, matching, told

PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
PT_GNU_STACK, PT_GNU_RELRO = 0x6474E551, 0x6474E552
PF_X = 1
ET_EXEC, ET_DYN = 2, 3
DT_NULL, DT_NEEDED, DT_STRTAB, DT_SONAME, DT_BIND_NOW, DT_FLAGS, DT_FLAGS_1 = (
    0,
    1,
    5,
    14,
    24,
    30,
    0x6FFFFFFB,
)
DF_BIND_NOW, DF_1_NOW, DF_1_PIE = 8, 1, 0x08000000

SONAME = re.compile(r"(lib.+?)(?:-[0-9a-f]{8})?\.so(?:\.(.+))?")
"""The name of a library, also one that auditwheel gave it, and its version."""


class DamagedElfError(Exception):
    """A file starts like an ELF file and is damaged."""


class Elf(NamedTuple):
    """What a program or library of this machine says of itself.

    Attributes:
        loader: The program that starts it, if any.
        lacks: Which of the linker's protections it does not have.
    """

    needed: tuple[str, ...]
    soname: str
    is_program: bool
    loader: str
    lacks: tuple[str, ...]


def read_elf(path: str) -> Elf | None:
    """Read a program or library.

    ``None`` for what the loader passes by, also another machine's (GPU code is ELF too).

    Raises:
        DamagedElfError: The file is damaged.
    """
    with open(path, "rb") as file, open("/proc/self/exe", "rb") as running:
        head, own = file.read(64), running.read(20)
        # 64 bits and little-endian, as every machine that images are built for.
        if head[:4] != own[:4] or (
            len(head) == 64 and (head[4:6], head[18:20]) != (own[4:6], own[18:20])
        ):
            return None
        try:
            kind, table, size, count = struct.unpack("<16xH14xQ14xHH6x", head)
            if kind not in (ET_EXEC, ET_DYN):
                return None
            segments = []
            rights = {}
            for number in range(count):
                entry = os.pread(file.fileno(), 40, table + size * number)
                kind, flags, offset, address, length = struct.unpack("<IIQQ8xQ", entry)
                segments.append((kind, offset, address, length))
                rights[kind] = flags
            places = {kind: (offset, length) for kind, offset, _, length in segments}
            if PT_DYNAMIC not in places:
                return None
            offset, length = places[PT_DYNAMIC]
            tags: list[tuple[int, int]] = []
            for tag, value in struct.iter_unpack(
                "<qQ", os.pread(file.fileno(), length - length % 16, offset)
            ):
                if tag == DT_NULL:
                    break
                tags.append((tag, value))
            found = dict(tags)
            # The table is given by its address in memory; its place in the file
            # is by the segment that holds it.
            strings = [
                found[DT_STRTAB] - address + offset
                for kind, offset, address, length in segments
                if kind == PT_LOAD
                and DT_STRTAB in found
                and address <= found[DT_STRTAB] < address + length
            ]
            if not strings and not found.keys().isdisjoint({DT_NEEDED, DT_SONAME}):
                raise DamagedElfError("its string table lies outside of the file")

            def text(position: int) -> str:
                return (
                    os.pread(file.fileno(), 4096, position)
                    .split(b"\0", 1)[0]
                    .decode("utf-8", "surrogateescape")
                )

            return Elf(
                needed=tuple(text(strings[0] + value) for tag, value in tags if tag == DT_NEEDED),
                soname=text(strings[0] + found[DT_SONAME]) if DT_SONAME in found else "",
                is_program=PT_INTERP in places or bool(found.get(DT_FLAGS_1, 0) & DF_1_PIE),
                loader=text(places[PT_INTERP][0]) if PT_INTERP in places else "",
                lacks=_unprotected(rights, found),
            )
        except (struct.error, ValueError, OSError, OverflowError) as error:
            raise DamagedElfError(str(error)) from error


def _unprotected(rights: dict[int, int], tags: dict[int, int]) -> tuple[str, ...]:
    """Return which of the linker's protections a file lacks, as the linker's options name them.

    Args:
        rights: The rights of its segments, by their kind.
        tags: Its dynamic section.
    """
    flags, more = tags.get(DT_FLAGS, 0), tags.get(DT_FLAGS_1, 0)
    is_bound = DT_BIND_NOW in tags or flags & DF_BIND_NOW or more & DF_1_NOW
    lacking = []
    if PT_GNU_RELRO not in rights:
        lacking.append("-z relro")
    if not is_bound:
        lacking.append("-z now")
    # Without this segment the kernel makes the stack executable.
    if rights.get(PT_GNU_STACK, PF_X) & PF_X:
        lacking.append("-z noexecstack")
    return tuple(lacking)


def loadable_files(roots: Iterable[str], below: str = "") -> tuple[dict[str, Elf], list[str]]:
    """Return each program and library under the roots (folders or files), and a
    line for each that is damaged.
    """
    entries: dict[str, Elf] = {}
    damaged = []
    for path in (each for root in roots for each in _plain_files(below + os.path.normpath(root))):
        try:
            elf = read_elf(path)
        except DamagedElfError as error:
            damaged.append(f"{path[len(below) :]}: {error} (the file is damaged)")
            continue
        except OSError:
            continue
        if elf is not None:
            entries[path[len(below) :]] = elf
    return entries, damaged


def _plain_files(root: str) -> Iterator[str]:
    """Yield the plain files under a folder, or the file that it is; links are not followed."""
    if os.path.isfile(root):
        yield root
    for current, folders, names in os.walk(root):
        folders.sort()
        for path in (f"{current.rstrip('/')}/{name}" for name in sorted(names)):
            if os.path.isfile(path) and not os.path.islink(path):
                yield path


class Process(NamedTuple):
    """What comes into a process when one file is loaded: where each name is
    found, and which names are not.

    ``error`` is what the loader says where it does not load the file itself, or
    something that it found.
    """

    found: dict[str, str]
    missing: list[str]
    error: str


_LISTED = re.compile(r"\t(.+?)(?: => (.+?))?(?: \(0x[0-9a-f]+\))?")


def trace(program: str, *, preload: str = "") -> Process:
    """Let the loader list what it loads for a program or library, and for one that is preloaded.

    Nothing starts.
    """
    own = read_elf("/proc/self/exe")
    assert own is not None
    child = subprocess.run(
        # musl's loader does not know the variable, and would start the program;
        # its option ends at what is missing.
        [own.loader, *(["--list"] if "ld-musl" in own.loader else []), program],
        env={
            **os.environ,
            "LD_TRACE_LOADED_OBJECTS": "1",
            **({"LD_PRELOAD": preload} if preload else {}),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        errors="surrogateescape",
    )
    found, missing = {}, []
    for match in filter(None, map(_LISTED.fullmatch, child.stdout.splitlines())):
        if match[2] == "not found":
            missing.append(match[1])
        else:
            found[match[1]] = match[2] or match[1]
    failed = child.returncode != 0 or (preload and preload not in found)
    return Process(found=found, missing=missing, error=child.stderr.strip() if failed else "")


def processes_of(entries: dict[str, Elf], python: str) -> dict[str, Process]:
    """Return the process of each program and library.

    What site-packages holds is loaded by the environment's Python: its libraries are there already,
    and its RPATH holds for all.
    """
    loaded_by_python = os.path.exists(python) and not trace(python).error

    def process_of(entry: tuple[str, Elf]) -> Process:
        path, elf = entry
        # A blank or a colon would end the name of a library to preload.
        if (
            elf.is_program
            or not loaded_by_python
            or not site_packages_of(path)
            or re.search("[ :]", path)
        ):
            return trace(path)
        return trace(python, preload=path)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip(entries, pool.map(process_of, entries.items())))  # noqa: B905 (Python 3.8)


def site_packages_of(path: str) -> str:
    """Return the ``site-packages`` folder that a path lies in, or nothing."""
    match = re.match(r"(.*/(?:site|dist)-packages)/", path)
    return match[1] if match else ""


def canonical(name: str) -> str:
    """Return the normalised name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Distributions:
    """Which Python distribution owns a file, and which distributions that one requires."""

    def __init__(self, paths: Iterable[str], below: str = "") -> None:
        """Read the metadata of every distribution in the ``site-packages``
        folders of these paths.
        """
        self.owners: dict[str, str] = {}
        self.requires: dict[str, set[str]] = {}
        for folder in sorted({site_packages_of(path) for path in paths} - {""}):
            for one in metadata.distributions(path=[below + folder]):
                name = canonical(one.metadata["Name"] or "")
                required = [
                    each for each in one.requires or () if not re.search(r"\bextra\s*==", each)
                ]
                names = filter(None, (re.match(r"[A-Za-z0-9._-]+", each) for each in required))
                self.requires.setdefault(name, set()).update(canonical(each[0]) for each in names)
                self.owners.update(
                    (os.path.normpath(f"{folder}/{file}"), name) for file in one.files or ()
                )

    def owner(self, path: str) -> str:
        """Return the distribution, or for a file in no record its top folder in ``site-packages``.

        Else nothing.
        """
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


def check_shared_libraries(check: dict[str, Any], image: Image) -> list[str]:
    """Let the loader load every program and library under the roots, and return
    which names it does not find.

    A name that is not found is found all the same when a library of this name is in the process
    already. Two ways to get there are accepted, and no other:

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
    problems = [f"{root} does not exist" for root in roots if not os.path.exists(root)] + damaged
    processes = processes_of(entries, image.python)
    objects = {
        path: {os.path.realpath(each) for each in (path, *process.found.values())}
        for path, process in processes.items()
    }
    distributions = Distributions(entries)
    names_of_owner: dict[str, set[str]] = {}
    for path, process in processes.items():
        names = names_of_owner.setdefault(distributions.owner(path), set())
        names.update(process.found, (entries[path].soname, os.path.basename(path)))
    reported: set[tuple[str, str]] = set()
    for path, process in processes.items():
        owner = distributions.owner(path)
        first = distributions.loaded_first(owner) if owner else set()
        if process.error:
            reason = process.error.rpartition("\n")[2]
            problems.append(f"{path} cannot be loaded: {reason}")
        for name in process.missing:
            if name in check["provided"] or any(
                name in names_of_owner.get(other, ()) for other in first
            ):
                continue
            file = _needing(name, path, process)
            both = {os.path.realpath(path), os.path.realpath(file)}
            as_dependency = any(
                other != path and both <= objects[other] and name not in processes[other].missing
                for other in processes
            )
            if as_dependency or (file, name) in reported:
                continue
            reported.add((file, name))
            through = f" (loaded for {path})" if path != file else ""
            places = [
                os.path.dirname(each)
                for each in image.libraries()
                if os.path.basename(each) == name
            ]
            place = f"; it lies in {', '.join(places[:3])}" if places else ""
            problems.append(f"{file}{through} does not find {name}{place}")
    if not entries and not problems:
        problems.append(f"no ELF file under {', '.join(roots)}: the check looks in the wrong place")
    advice = (
        "install the library, name its folder in the file's"
        " RPATH or in /etc/ld.so.conf.d (and run ldconfig), "
    )
    return told(problems, advice + "remove an unused file, or declare what the driver provides")


def _needing(name: str, path: str, process: Process) -> str:
    """Return which file of a process names a library, the process's own first."""
    for each in (path, *process.found.values()):
        try:
            elf = read_elf(each)
        except (DamagedElfError, OSError):
            continue
        if elf is not None and name in elf.needed:
            return each
    return path


def check_elf_needs(check: dict[str, Any], image: Image) -> list[str]:
    """Compare what the files under the roots NEED with the major versions that they should need."""
    libraries, cuda = check["libraries"], check["cuda"]
    wanted = {match[1]: match[2] or "" for match in map(SONAME.fullmatch, libraries) if match}
    entries, _ = loadable_files(check["roots"], image.root)
    distributions = Distributions(entries, image.root)
    problems = []
    for path, elf in entries.items():
        for soname in elf.needed:
            match = SONAME.fullmatch(soname)
            if match is None or match[1] not in wanted:
                continue
            major, version = wanted[match[1]], match[2] or ""
            if version != major and not version.startswith(major + "."):
                problems.append(
                    f"{distributions.owner(path) or 'no distribution'}: {path} needs {soname}"
                )
    if cuda:
        installed, error = image.distributions()
        problems += [error] if error else []
        for one in installed:
            other = other_cuda(one["name"], one["version"], cuda)
            if other:
                problems.append(f"{one['name']} {one['version']} is for CUDA {other}")
    if not entries and not problems:
        problems.append(
            f"no ELF file under {', '.join(check['roots'])}: the check looks in the wrong place"
        )
    has = f"{', '.join(libraries)}{f' (CUDA {cuda})' if cuda else ''}"
    return told(problems, f"the image has {has}: install the build for this version, or compile it")


def other_cuda(name: str, version: str, cuda: str) -> str:
    """Return the CUDA version that a distribution's name or local version names, if its major is
    not that of ``cuda``.

    ``2.4.1+cu121`` is for 12.1; ``2.8.3+cu12torch2.8``, ``nvidia-nccl-cu12``
    and ``cupy-cuda12x`` are for 12.
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
    problems, paths = [], []
    for pattern in check["libraries"]:
        fitting = [path for path in matching("", pattern) if not os.path.islink(path)]
        problems += [] if fitting else [f"no file fits {pattern}"]
        paths += fitting
    # A library by its name is where the loader finds it.
    places = {os.path.basename(path) if check["by_name"] else path: path for path in paths}
    problems += _unopened(places, image, check["provided"])
    return told(
        problems,
        "a job that first needs it fails then:"
        " install the library's wheel again, and what it needs",
    )


FORTIFIED = re.compile(rb"\0__\w+_chk\0")


def check_hardened_libraries(check: dict[str, Any], image: Image) -> list[str]:
    """Return which protections the files that fit the patterns lack."""
    problems, contents = [], []
    for pattern in check["libraries"]:
        fitting = [
            path for path in matching(image.root, pattern) if not os.path.islink(image.root + path)
        ]
        problems += [] if fitting else [f"no file fits {pattern}"]
        for path, elf in loadable_files(fitting, image.root)[0].items():
            problems += [f"{path} is linked without {option}" for option in elf.lacks]
            with open(image.root + path, "rb") as file:
                contents.append(file.read())
    if check["guards"] and contents:
        if not any(b"\0__stack_chk_fail\0" in content for content in contents):
            problems.append("no file is compiled with -fstack-protector-strong")
        if not any(map(FORTIFIED.search, contents)):
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


def _unopened(places: dict[str, str], image: Image, provided: list[str]) -> list[str]:
    """Return why libraries cannot be opened.

    Where one of the driver's is missing, what the loader misses besides.

    Args:
        places: What to open, and the path to tell.
        image: Its environment's Python opens them.
        provided: Names of the driver's libraries.
    """
    answers, error = ask(image.python, _OPEN, *places)
    if error:
        return [f"{image.python} does not open them: {error}"]
    problems = []
    for opened, said in answers.items():
        process = trace(image.python, preload=opened)
        missing = [name for name in process.missing if name not in provided]
        if "/" not in opened and opened not in process.found:
            problems.append(f"no {opened} is found")
        elif missing:
            problems += [
                f"{_needing(name, places[opened], process)} does not find {name}"
                for name in missing
            ]
        elif not any(said.startswith(name + ":") for name in provided):
            problems.append(f"{places[opened]} cannot be opened: {said.replace(opened + ': ', '')}")
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
    """Import the module in a child and read from its memory map which files of
    the library's name it holds.
    """
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
        instead = (
            f"it loads {', '.join(others)} instead"
            if others
            else "no library of this name is loaded"
        )
        return [f"{instead}: look at the RPATH of the module's libraries and at LD_LIBRARY_PATH"]
    twice = "two copies of one library in a process fail sooner or later"
    return [f"it also loads {', '.join(others)}: {twice}"] if others else []


def check_single_library(check: dict[str, Any], image: Image) -> list[str]:
    """Find every distinct ELF file that goes by the soname, also under a name
    that auditwheel gave it.
    """
    stem, dot, rest = check["soname"].partition(".so")
    pattern = re.compile(re.escape(stem) + "(-[0-9a-f]{8})?" + re.escape(dot + rest) + r"(\..+)?")
    found: dict[tuple[int, int], str] = {}
    for path, status in image.plain_libraries():
        if pattern.fullmatch(path.rsplit("/", 1)[-1]):
            with open(image.root + path, "rb") as file:
                if file.read(4) == b"\x7fELF":
                    found.setdefault((status.st_dev, status.st_ino), path)
    advice = "which one is loaded depends on the search order: keep one and remove the others"
    return told(list(found.values()), advice) if len(found) > 1 else []


def check_duplicate_packages(check: dict[str, Any], image: Image) -> list[str]:
    """Find distributions that are installed twice, Debian packages of two
    architectures, libraries of two versions.
    """
    installed, error = image.distributions()
    problems = [error] if error else []
    places: dict[str, list[str]] = {}
    for one in installed:
        places.setdefault(one["name"], []).append(f"{one['version']} in {one['folder']}")
    problems += [
        f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1
    ]
    architectures: dict[str, list[str]] = {}
    for fields in image.debian_packages():
        architectures.setdefault(fields["Package"], []).append(fields.get("Architecture", ""))
    problems += [
        f"Debian package {name}: {', '.join(found)}"
        for name, found in sorted(architectures.items())
        if len(found) > 1
    ]
    for name, majors in library_majors(image, check["libraries"]).items():
        if len(majors) > 1:
            lie = [f"{paths[0]} (major version {major})" for major, paths in sorted(majors.items())]
            problems.append(f"{name}: {', '.join(lie)}")
    return told(
        problems, "which one is used depends on the search order: keep one and remove the others"
    )


def library_majors(image: Image, names: list[str]) -> dict[str, dict[str, list[str]]]:
    """Return, by name without ``.so``, which major versions of a library there
    are, and where each lies.
    """
    found: dict[str, dict[str, list[str]]] = {name: {} for name in names}
    for path, _ in image.plain_libraries():
        match = SONAME.fullmatch(path.rsplit("/", 1)[-1])
        if match is None or match[1] not in found:
            continue
        try:
            elf = read_elf(image.root + path)
        except (DamagedElfError, OSError):
            continue
        # The file's name may say more, or less, than the name that it is loaded by.
        named = SONAME.fullmatch(elf.soname) if elf is not None else None
        if named is not None and named[2]:
            found[match[1]].setdefault(named[2].partition(".")[0], []).append(path)
    return found
