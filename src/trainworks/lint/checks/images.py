"""What an image is made from, its arguments, and the environment that it gets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainworks.lint.checks.downloads import install_arguments
from trainworks.lint.document import Document, Instruction, Stage, replaced
from trainworks.lint.findings import Hit

KEYWORDS = frozenset(
    {
        *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER"),
        *("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
    }
)
# BuildKit has values for these, but a stage sees them only after an ARG of its own.
PLATFORM_ARGUMENTS = frozenset(
    f"{prefix}{suffix}" for prefix in ("TARGET", "BUILD") for suffix in ("PLATFORM", "OS", "ARCH", "VARIANT")
)
# BuildKit gives these to every RUN, declared or not.
PROXY_ARGUMENTS = frozenset(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (upper, upper.lower())
)
# EFA's installer puts NCCL's plugin elsewhere from this version on.
EFA_MOVED_PLUGIN = (1, 44)
NEW_PLUGIN_FOLDER = re.compile(r"/opt/amazon/ofi-nccl/lib(?:64)?/?(?=[:\s\"']|$)")
OLD_PLUGIN_FOLDER = re.compile(r"/opt/amazon/ofi-nccl/lib/[^:\s\"']*-linux-gnu")


def syntax(document: Document) -> Iterator[Hit]:
    """Find instructions that do not exist. (What cannot be parsed at all never comes here.)"""
    for instruction in document.instructions:
        if instruction.keyword not in KEYWORDS:
            yield Hit(instruction.line, f"there is no instruction `{instruction.keyword}`")


def argument_not_declared(document: Document) -> Iterator[Hit]:
    """Find arguments used in a stage that does not declare them."""
    known_globally = {name for argument in document.global_arguments for name, _ in argument.assignments()}
    everywhere = {
        name
        for instruction in document.instructions
        if instruction.keyword == "ARG"
        for name, _ in instruction.assignments()
    }
    everywhere = (everywhere | PLATFORM_ARGUMENTS) - PROXY_ARGUMENTS
    declared_by_stage: dict[int, set[str]] = {}
    for stage in document.stages:
        for name, line in stage.start.variable_uses():
            if name in everywhere - known_globally - PLATFORM_ARGUMENTS:
                yield Hit(line, f"${name} is empty in FROM: only an ARG before the first FROM reaches it")
        declared = set(declared_by_stage.get(id(stage.parent), set())) if stage.parent else set()
        for instruction in stage.instructions:
            if not instruction.deferred:
                for name, line in dict.fromkeys(instruction.variable_uses()):
                    if name in everywhere - declared:
                        yield Hit(line, f"${name} is empty here: this stage has no `ARG {name}` before it")
            declared.update(name for name, _ in instruction.assignments())
        declared_by_stage[id(stage)] = declared


def version_argument_unused(document: Document) -> Iterator[Hit]:
    """Find arguments that promise a version nothing reads."""
    text = "\n".join(line for line in document.lines if not line.lstrip().startswith("#"))
    seen = set()
    for instruction in document.instructions:
        if instruction.keyword != "ARG":
            continue
        for name, _ in instruction.assignments():
            if (
                name not in seen
                and name.upper().endswith(("VERSION", "_VER", "_TAG", "_COMMIT", "_SHA256", "_CHECKSUM"))
                and not re.search(
                    rf"\$\{{?{re.escape(name)}\b|getenv\W+{re.escape(name)}|environ\W+{re.escape(name)}", text
                )
            ):
                seen.add(name)
                yield Hit(instruction.line, f"nothing reads {name}: what is installed does not depend on it")


def _images(document: Document) -> Iterator[tuple[int, str, str]]:
    """Yield line, written and resolved name of each image that is pulled: FROM, COPY --from, RUN --mount=from=."""
    values: dict[str, str] = {}
    for argument in document.global_arguments:
        values.update((name, replaced(value, values)) for name, value in argument.assignments() if value)
    for stage in document.stages:
        if stage.parent is None and stage.image.lower() != "scratch":
            yield stage.start.line, stage.start.arguments[0], stage.image
        for instruction in stage.instructions:
            for name in _mounted(instruction):
                image = replaced(name, values)
                if image and document.stage_named(image) is None:
                    yield instruction.line, name, image


def _mounted(instruction: Instruction) -> Iterator[str]:
    if instruction.keyword == "COPY" and instruction.flag("from"):
        yield instruction.flag("from")
    for flag in instruction.flags:
        if flag.startswith("--mount="):
            for option in flag.removeprefix("--mount=").split(","):
                if option.startswith("from="):
                    yield option.removeprefix("from=")


def _tag(image: str) -> str:
    return image.rpartition("/")[2].partition(":")[2]


def base_image_moving(document: Document) -> Iterator[Hit]:
    """Find images without a tag, or with one that moves by design."""
    for line, written, image in _images(document):
        if "$" in image or "@sha256:" in image:
            continue
        tag = _tag(image)
        if not tag:
            yield Hit(line, f"{written} has no tag, which means latest")
        elif re.fullmatch(r"(?i)latest|nightly|edge|stable|main|master|devel|lts", tag):
            yield Hit(line, f"{image} is another image every time its makers push")


def base_image_without_digest(document: Document) -> Iterator[Hit]:
    """Find images named by a tag only."""
    for line, _, image in _images(document):
        # A tag with a hash in it is made anew for each content, by custom; nobody pushes it twice.
        hashed = re.search(r"(?:^|[-_.])[0-9a-f]{12,64}$", _tag(image))
        if "$" not in image and "@sha256:" not in image and _tag(image) and not hashed:
            yield Hit(line, f"{image} is named by its tag only")


def _path_values(document: Document) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and value of every search path that is set, by ENV or in a RUN."""
    for instruction in document.instructions:
        for name, value in instruction.assignments():
            if instruction.keyword == "ENV" and (name == "PATH" or name.endswith("_PATH")):
                # The line on which the variable itself stands, where the instruction has several.
                at = re.search(rf"(?<!\w){re.escape(name)}[=\s]", instruction.source.text)
                yield instruction.source.line(at.start() if at else 0), name, value
        for command in instruction.script.commands:
            for word in (*command.assignments, *(command.words if command.program == "export" else ())):
                name, equals, value = word.value.partition("=")
                if equals and (name == "PATH" or name.endswith("_PATH")):
                    yield word.line, name, value


def stray_brace_in_path(document: Document) -> Iterator[Hit]:
    """Find braces in search paths that belong to no variable."""
    for line, name, value in _path_values(document):
        rest = value
        while True:
            shorter = re.sub(r"\$\{[^{}]*\}|\{[^{}$]*,[^{}]*\}", "", rest)
            if shorter == rest:
                break
            rest = shorter
        if re.search(r"[{}]", rest):
            yield Hit(line, f"{name} has a brace that belongs to no variable")


def python_version_in_path(document: Document) -> Iterator[Hit]:
    """Find a library path that names the version of Python in digits."""
    for line, name, value in _path_values(document):
        match = re.search(r"python\d\.\d+", value)
        if name == "LD_LIBRARY_PATH" and match:
            yield Hit(line, f"LD_LIBRARY_PATH holds {match[0]} in digits")


def plugin_path_of_old_efa(document: Document) -> Iterator[Hit]:
    """Find the plugin's folder of EFA installers before 1.44 beside a newer installer."""
    text = "\n".join(line for line in document.lines if not line.lstrip().startswith("#"))
    found = re.findall(r"(?i)\bEFA_(?:INSTALLER_)?VER(?:SION)?[= ]\"?v?(\d+)\.(\d+)", text)
    found += re.findall(r"aws-efa-installer-(\d+)\.(\d+)", text)
    if not any((int(major), int(minor)) >= EFA_MOVED_PLUGIN for major, minor in found):
        return
    for line, name, value in _path_values(document):
        match = OLD_PLUGIN_FOLDER.search(value)
        # Whoever names the new folder too has both kinds of installers in mind.
        if name == "LD_LIBRARY_PATH" and match and not NEW_PLUGIN_FOLDER.search(value):
            yield Hit(line, f"{match[0]} is empty with this EFA installer: NCCL falls back to TCP without a word")


def cuda_versions_differ(document: Document) -> Iterator[Hit]:
    """Find Python files built for another CUDA than the base image has."""
    for stage in document.stages:
        base = _cuda_of(stage)
        if base is None:
            continue
        for instruction in stage.instructions:
            for command in instruction.script.commands:
                if install_arguments(command) is None:
                    continue
                for word in command.arguments:
                    for digits in re.findall(r"(?i)(?:\+|%2B|/)cu(\d{2,3})\b", instruction.resolved(word.value)):
                        wheel = f"{digits[:-1]}.{digits[-1]}"
                        if wheel != base:
                            yield Hit(word.line, f"cu{digits} is for CUDA {wheel}, the base image has CUDA {base}")


def command_outside_run(document: Document) -> Iterator[Hit]:
    """Find $(...) and backticks where no shell runs."""
    for instruction in document.instructions:
        if instruction.keyword in ("ENV", "ARG", "COPY", "ADD", "WORKDIR", "USER", "EXPOSE", "VOLUME"):
            match = re.search(r"(?<![\\$])\$\(.*\)|(?<!\\)`[^`]+`", instruction.source.text)
            if match:
                what = f"{instruction.keyword} takes `{match[0]}` as it stands: no shell runs it"
                yield Hit(instruction.source.line(match.start()), what)


def _cuda_of(stage: Stage) -> str | None:
    for ancestor in stage.lineage():
        match = re.search(r"nvidia/cuda:(\d+\.\d+)", ancestor.image)
        if match:
            return match[1]
    return None
