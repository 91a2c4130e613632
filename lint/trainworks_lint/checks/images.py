"""Base images, arguments, and the environment of an image."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import Version

from trainworks_lint.checks.downloads import install_arguments
from trainworks_lint.compatibility import table
from trainworks_lint.document import Document, Instruction, Stage, replaced
from trainworks_lint.findings import Hit
from trainworks_lint.shell import SHELLS, Command

KEYWORDS = frozenset(
    {
        *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER"),
        *("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
    }
)
# BuildKit has values for these, but a stage needs an ARG to use them.
PLATFORM_ARGUMENTS = frozenset(
    f"{prefix}{suffix}" for prefix in ("TARGET", "BUILD") for suffix in ("PLATFORM", "OS", "ARCH", "VARIANT")
)
# BuildKit gives these to every RUN, with or without an ARG.
PROXY_ARGUMENTS = frozenset(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (upper, upper.lower())
)
NEW_PLUGIN_FOLDER = re.compile(r"/opt/amazon/ofi-nccl/lib(?:64)?/?(?=[:\s\"']|$)")
OLD_PLUGIN_FOLDER = re.compile(r"/opt/amazon/ofi-nccl/lib/[^:\s\"']*-linux-gnu")


def syntax(document: Document) -> Iterator[Hit]:
    """Find the first instruction that does not exist. BuildKit stops there as well."""
    for instruction in document.instructions:
        if instruction.keyword not in KEYWORDS:
            yield Hit(instruction.line, f"unknown instruction `{instruction.keyword[:30]}`")
            return


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
                yield Hit(line, f"${name} is empty in FROM: only an ARG before the first FROM can be used in FROM")
        declared = set(declared_by_stage.get(id(stage.parent), set())) if stage.parent else set()
        for instruction in stage.instructions:
            if not instruction.deferred:
                for name, line in dict.fromkeys(instruction.variable_uses()):
                    if name in everywhere - declared:
                        yield Hit(line, f"${name} is empty: this stage has no `ARG {name}` before this line")
            declared.update(name for name, _ in instruction.assignments())
        declared_by_stage[id(stage)] = declared


def version_argument_unused(document: Document) -> Iterator[Hit]:
    """Find arguments with a version that nothing reads."""
    text = "\n".join(line for line in document.lines if not line.lstrip().startswith("#"))
    seen = set()
    for stage, instruction in _arguments(document):
        for name, _ in instruction.assignments():
            if (
                name not in seen
                and name.upper().endswith(("VERSION", "_VER", "_TAG", "_COMMIT", "_SHA256", "_CHECKSUM"))
                and not re.search(
                    rf"\$\{{?{re.escape(name)}\b|getenv\W+{re.escape(name)}|environ\W+{re.escape(name)}", text
                )
                and not (stage is not None and _script_may_read(document, stage, instruction))
            ):
                seen.add(name)
                yield Hit(instruction.line, f"nothing reads {name}: the installed version does not depend on it")


def _arguments(document: Document) -> Iterator[tuple[Stage | None, Instruction]]:
    """Yield every ARG with its stage; None before the first FROM."""
    for argument in document.global_arguments:
        yield None, argument
    for stage in document.stages:
        yield from ((stage, each) for each in stage.instructions if each.keyword == "ARG")


def _script_may_read(document: Document, stage: Stage, argument: Instruction) -> bool:
    """Return whether a step after an ARG runs a script of the build context: an ARG is in its environment."""
    for other in document.stages:
        lineage = [*other.lineage()]
        if not any(one is stage for one in lineage):
            continue
        instructions = [instruction for one in reversed(lineage) for instruction in one.instructions]
        copied = False
        for instruction in instructions:
            copied = copied or instruction.keyword in ("COPY", "ADD")
            mounted = any(
                flag.startswith("--mount=") and ("type=bind" in flag or "type=" not in flag)
                for flag in instruction.flags
            )
            if (
                (copied or mounted)
                and instruction.line > argument.line
                and any(map(_is_script, instruction.script.commands))
            ):
                return True
    return False


def _is_script(command: Command) -> bool:
    """Return whether a command runs a script by its path."""
    words = [word.value for word in command.own_words]
    if not words:
        return False
    if command.program in (*SHELLS, "source", ".") or re.fullmatch(r"python[\d.]*", command.program):
        if any(re.fullmatch(r"-\w*[cm]", word) for word in words[1:]):
            return False
        return any(not word.startswith("-") for word in words[1:])
    return words[0].endswith((".sh", ".bash", ".py")) or (
        "/" in words[0] and not words[0].startswith(("/usr/", "/bin/", "/sbin/", "./configure"))
    )


def _images(document: Document) -> Iterator[tuple[int, str, str]]:
    """Yield line, written name and resolved name of each image that is pulled: FROM, COPY --from, RUN --mount=from=."""
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
    """Find images without a tag, or with a tag such as latest."""
    for line, written, image in _images(document):
        if "$" in image or "@sha256:" in image:
            continue
        tag = _tag(image)
        if not tag:
            yield Hit(line, f"{written} has no tag, which means latest")
        elif re.fullmatch(r"(?i)latest|nightly|edge|stable|main|master|devel|lts", tag):
            yield Hit(line, f"{image} changes with every push")


def base_image_without_digest(document: Document) -> Iterator[Hit]:
    """Find images without a digest."""
    for line, _, image in _images(document):
        # By custom, a tag with a hash in it names one content.
        hashed = re.search(r"(?:^|[-_.])[0-9a-f]{12,64}$", _tag(image))
        if "$" not in image and "@sha256:" not in image and _tag(image) and not hashed:
            yield Hit(line, f"{image} has no digest")


def _path_values(document: Document) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and value of every search path that is set, by ENV or in a RUN."""
    for instruction in document.instructions:
        for name, value in instruction.assignments():
            if instruction.keyword == "ENV" and (name == "PATH" or name.endswith("_PATH")):
                # An instruction can have several lines: the one with the variable.
                at = re.search(rf"(?<!\w){re.escape(name)}[=\s]", instruction.source.text)
                yield instruction.source.line(at.start() if at else 0), name, value
        for command in instruction.script.commands:
            for word in (*command.assignments, *(command.words if command.program == "export" else ())):
                name, equals, value = word.value.partition("=")
                if equals and (name == "PATH" or name.endswith("_PATH")):
                    yield word.line, name, value


def stray_brace_in_path(document: Document) -> Iterator[Hit]:
    """Find braces in search paths that are not part of a variable."""
    for line, name, value in _path_values(document):
        rest = value
        while True:
            shorter = re.sub(r"\$\{[^{}]*\}|\{[^{}$]*,[^{}]*\}", "", rest)
            if shorter == rest:
                break
            rest = shorter
        if re.search(r"[{}]", rest):
            yield Hit(line, f"{name} has a brace that is not part of a variable")


def python_version_in_path(document: Document) -> Iterator[Hit]:
    """Find a library path with a fixed version of Python."""
    for line, name, value in _path_values(document):
        match = re.search(r"python\d\.\d+", value)
        if name == "LD_LIBRARY_PATH" and match:
            yield Hit(line, f"LD_LIBRARY_PATH contains {match[0]}")


def plugin_path_of_old_efa(document: Document) -> Iterator[Hit]:
    """Find the plugin's folder of EFA installers before 1.44 beside a newer installer."""
    text = "\n".join(line for line in document.lines if not line.lstrip().startswith("#"))
    moved = Version(table().efa_moved_plugin)
    found = re.findall(r"(?i)\bEFA_(?:INSTALLER_)?VER(?:SION)?[= ]\"?v?(\d+)\.(\d+)", text)
    found += re.findall(r"aws-efa-installer-(\d+)\.(\d+)", text)
    if not any(Version(f"{major}.{minor}") >= moved for major, minor in found):
        return
    for line, name, value in _path_values(document):
        match = OLD_PLUGIN_FOLDER.search(value)
        # A path with both folders is for both kinds of installers.
        if name == "LD_LIBRARY_PATH" and match and not NEW_PLUGIN_FOLDER.search(value):
            yield Hit(
                line, f"{match[0]} does not exist with this EFA installer: NCCL falls back to TCP without an error"
            )


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
                    for digits in re.findall(
                        r"(?i)(?:\+|%2B|/)cu(\d{2,3})(?=\b|torch)", instruction.resolved(word.value)
                    ):
                        # cu121 is 12.1, and cu92 is 9.2, but the cu12 of an extension is every 12.
                        major = digits if len(digits) == 2 and digits.startswith("1") else digits[:-1]
                        wheel = major if major == digits else f"{major}.{digits[-1]}"
                        if f"{base}.".startswith(f"{wheel}."):
                            continue
                        yield Hit(word.line, f"cu{digits} is for CUDA {wheel}, the base image has CUDA {base}")


def command_outside_run(document: Document) -> Iterator[Hit]:
    """Find $(...) and backticks in instructions that do not run a shell."""
    for instruction in document.instructions:
        if instruction.keyword in ("ENV", "ARG", "COPY", "ADD", "WORKDIR", "USER", "EXPOSE", "VOLUME"):
            match = re.search(r"(?<![\\$])\$\(.*\)|(?<!\\)`[^`]+`", instruction.source.text)
            if match:
                what = f"{instruction.keyword} does not run `{match[0]}`: the text itself is the value"
                yield Hit(instruction.source.line(match.start()), what)


def _cuda_of(stage: Stage) -> str | None:
    for ancestor in stage.lineage():
        match = re.search(r"nvidia/cuda:(\d+\.\d+)", ancestor.image)
        if match:
            return match[1]
    return None
