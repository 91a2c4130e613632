"""What a training script gives away without being run: what would end it on every host, after the hosts are paid for.

The script is parsed (``ast``), never executed or imported: a hyperparameter that argparse refuses, code that this image
cannot compile, a script that this Python cannot parse. What smp does not work with, smp says itself.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Iterator, Mapping, Sequence


@dataclass(frozen=True)
class Finding:
    """Something in a training script.

    Attributes:
        what: What is there or missing.
        why: The reason, and what to do.
        line: Line of the script; 0 for the whole of it.
    """

    what: str
    why: str
    line: int = 0


@dataclass(frozen=True)
class Call:
    """A call by its whole dotted name ("torch.utils.data.DataLoader").

    Attributes:
        name: The name; empty parts stand for what is not a name, as in ``scale(loss).backward``.
        line: Its line.
        keywords: Keyword -> value; "**" stands for keywords that cannot be seen.
        arguments: The values without a keyword.
    """

    name: str
    line: int
    keywords: Mapping[str, ast.expr]
    arguments: tuple[ast.expr, ...] = ()

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    def constant(self, keyword: str) -> object:
        """Return the value of a keyword if it is a literal, else None."""
        value = self.keywords.get(keyword)
        return value.value if isinstance(value, ast.Constant) else None


@dataclass(frozen=True)
class Script:
    """A training script, parsed.

    Attributes:
        modules: Whole name of each import -> line.
        calls: Calls and decorators, in the order of the file.
        problem: Why it could not be parsed, else None.
    """

    modules: Mapping[str, int]
    calls: tuple[Call, ...]
    problem: Finding | None = None

    def imports(self, module: str) -> tuple[int, ...]:
        """Return the lines on which a module, or something in it, is imported."""
        return tuple(line for name, line in self.modules.items() if f"{name}.".startswith(f"{module}."))

    def called(self, last: str) -> tuple[Call, ...]:
        """Return the calls whose dotted name ends with ``last``, as ``torch.save`` with ``save``."""
        return tuple(call for call in self.calls if call.name == last or call.name.endswith(f".{last}"))


def read_script(text: str) -> Script:
    """Parse a script."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 0) or 0
        reason = getattr(error, "msg", str(error))
        problem = Finding(f"this Python cannot parse it: {reason}", "it would fail on every host", line)
        return Script({}, (), problem=problem)
    names = dict(_imported(tree))
    modules: dict[str, int] = {}
    for whole, line in names.values():
        modules.setdefault(whole, line)
    calls: list[Call] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bare = (each for each in node.decorator_list if not isinstance(each, ast.Call))
            calls += [Call(_whole_name(each, names), each.lineno, {}) for each in bare]
        elif isinstance(node, ast.Call):
            keywords = {keyword.arg or "**": keyword.value for keyword in node.keywords}
            calls.append(Call(_whole_name(node.func, names), node.lineno, keywords, tuple(node.args)))
    return Script(modules, tuple(sorted(calls, key=lambda call: call.line)))


def _imported(tree: ast.Module) -> Iterator[tuple[str, tuple[str, int]]]:
    """Local name -> (whole name, line) of everything that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                yield local, (alias.name if alias.asname else local, node.lineno)
                if not alias.asname and "." in alias.name:
                    yield alias.name, (alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, (f"{node.module}.{alias.name}", node.lineno)


def _whole_name(node: ast.expr, names: Mapping[str, tuple[str, int]]) -> str:
    """``nn.parallel.DistributedDataParallel`` with the first part replaced by what it was imported as."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        parts.append("")
    else:
        parts.append(names[node.id][0] if node.id in names else node.id)
    return ".".join(reversed(parts))


def check_script(
    script: Script, *, arguments: Sequence[str] = (), compiled: Mapping[str, str] | None = None
) -> tuple[Finding, ...]:
    """Find what would fail in any mode.

    Args:
        script: The training script.
        arguments: Names of the hyperparameters that it gets as options.
        compiled: Module or function that compiles code while the job runs -> why this image cannot.
    """
    if script.problem:
        return (script.problem,)
    found = [*_undeclared(script, arguments)]
    for name, why in (compiled or {}).items():
        called = tuple(call.line for call in script.called(name))
        found += [Finding(name, why, line) for line in called or script.imports(name)[:1]]
    why = "it is smp's second version, which only images of AWS have: use FSDP2 of PyTorch, by torch_distributed"
    found += [Finding("torch.sagemaker", why, line) for line in script.imports("torch.sagemaker")[:1]]
    return tuple(sorted(found, key=lambda finding: finding.line))


def _undeclared(script: Script, arguments: Sequence[str]) -> Iterator[Finding]:
    """Hyperparameters that argparse would refuse: only where the script's parser is plainly all there is."""
    parsers = script.called("argparse.ArgumentParser")
    strict = [call for call in script.calls if call.last == "parse_args"]
    if len(parsers) != 1 or not strict or any(call.last == "parse_known_args" for call in script.calls):
        return
    if parsers[0].keywords.keys() & {"parents", "fromfile_prefix_chars", "**"}:
        return
    declared: set[str] = set()
    for call in script.calls:
        if call.last == "add_argument":
            for argument in call.arguments:
                if not isinstance(argument, ast.Constant):
                    return  # a name that is computed: not sure
                declared.add(str(argument.value))
    if any(
        call.last in ("add_subparsers", "add_argument_group", "add_mutually_exclusive_group") for call in script.calls
    ):
        return
    line = strict[0].line
    abbreviated = parsers[0].constant("allow_abbrev") is not False
    for name in arguments:
        option = f"-{name}" if len(name) == 1 else f"--{name}"
        known = option in declared or (abbreviated and any(word.startswith(option) for word in declared))
        if declared and not known:
            why = f"argparse would end the script with status 2: declare it, add_argument({option!r}), or leave it out"
            yield Finding(f"hyperparameter {name!r} is not declared", why, line)
