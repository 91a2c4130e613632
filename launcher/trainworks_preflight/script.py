"""What a training script gives away without being run: steps of smp that it misses, and its options. Pure.

The script is parsed (``ast``), never executed or imported. The rules are those of AWS's page on PyTorch scripts for smp
(SageMaker developer guide), and what costs paid time and no other tool says: a hyperparameter that argparse refuses,
code that this image cannot compile. A script that does not parse is advice as well: it would fail on every host.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Iterable, Iterator, Mapping, Sequence


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
        in_step: It is in a function that ``smp.step`` decorates.
    """

    name: str
    line: int
    keywords: Mapping[str, ast.expr]
    arguments: tuple[ast.expr, ...] = ()
    in_step: bool = False

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    def constant(self, keyword: str) -> object:
        """Return the value of a keyword if it is a literal, else None."""
        value = self.keywords.get(keyword)
        return value.value if isinstance(value, ast.Constant) else None

    def words(self) -> tuple[str, ...]:
        """Return the texts among its values."""
        values = (*self.arguments, *self.keywords.values())
        found = (value.value for value in values if isinstance(value, ast.Constant))
        return tuple(value for value in found if isinstance(value, str))


@dataclass(frozen=True)
class Script:
    """A training script, parsed.

    Attributes:
        modules: Whole name of each import -> line.
        calls: Calls and decorators, in the order of the file.
        wrapped: Names that a ``DistributedModel`` is assigned to.
        problem: Why it could not be parsed, else None.
    """

    modules: Mapping[str, int]
    calls: tuple[Call, ...]
    wrapped: frozenset[str] = frozenset()
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
    nodes = tuple(ast.walk(tree))
    calls: list[Call] = []
    in_step: set[ast.AST] = set()
    for node in nodes:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for each in node.decorator_list:
            name = _whole_name(each.func if isinstance(each, ast.Call) else each, names)
            if name == f"{_SMP}.step":
                in_step.update(ast.walk(node))
            if not isinstance(each, ast.Call):
                calls.append(Call(name, each.lineno, {}))
    for node in nodes:
        if isinstance(node, ast.Call):
            keywords = {keyword.arg or "**": keyword.value for keyword in node.keywords}
            name = _whole_name(node.func, names)
            calls.append(Call(name, node.lineno, keywords, tuple(node.args), node in in_step))
    return Script(modules, tuple(sorted(calls, key=lambda call: call.line)), frozenset(_wrapped(nodes, names)))


def _wrapped(nodes: Iterable[ast.AST], names: Mapping[str, tuple[str, int]]) -> Iterator[str]:
    for node in nodes:
        if (
            isinstance(node, ast.Assign)
            and _whole_name(getattr(node.value, "func", node.value), names) == f"{_SMP}.DistributedModel"
        ):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


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


_SMP = "smdistributed.modelparallel.torch"


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


def check_devices(script: Script, instance_type: str) -> tuple[Finding, ...]:
    """Find what needs a GPU, on hosts without one.

    Args:
        script: The training script of smp or smddp.
        instance_type: Instance type of the hosts.
    """
    why = f"{instance_type} has no GPU: set SMP_CPU_EMULATION=1 in the job's environment"
    asked = [call for call in script.calls if _asks_for_cuda(call)]
    return tuple(Finding(f"{call.name}: asks for CUDA", why, call.line) for call in asked[:1])


def _asks_for_cuda(call: Call) -> bool:
    """Return whether a call fails where there is no GPU; ``torch.cuda.is_available`` and its like do not."""
    owner, _, last = call.name.rpartition(".")
    if last == "cuda" or (owner.endswith("cuda") and last in _OF_CUDA):
        return True
    if last == "init_process_group":
        return "nccl" in call.words()
    return last in _TO_DEVICE and any(word.partition(":")[0] == "cuda" for word in call.words())


_OF_CUDA = ("Event", "Stream", "current_device", "get_device_name", "get_device_properties", "set_device")
_TO_DEVICE = ("device", "empty", "full", "ones", "rand", "randn", "tensor", "to", "zeros")


def check_model_parallel(
    script: Script, instance_type: str, *, gpus: bool, loader_workers: bool, installs: bool
) -> tuple[Finding, ...]:
    """Find which steps of AWS's page on smp scripts are missing, and what the page says smp does not work with.

    Args:
        script: The training script of the library's first version.
        instance_type: Instance type of the hosts.
        gpus: They have GPUs.
        loader_workers: Data loaders may have worker processes under smp on this instance type.
        installs: The job installs requirements of its own.
    """
    found = [*_steps(script, gpus=gpus), *_unsupported(script), *_loaders(script, instance_type, loader_workers)]
    if not installs:
        why = "it is in no image: name it in a requirements.txt beside the script"
        found += [Finding("torchnet", why, line) for line in script.imports("torchnet")[:1]]
    return tuple(sorted(found, key=lambda finding: finding.line))


def _steps(script: Script, *, gpus: bool) -> Iterator[Finding]:
    """Find the steps of the page that this file, which imports smp, does in another way, or not."""
    if not script.imports(_SMP):
        return
    if not script.called(f"{_SMP}.init"):
        yield Finding("no smp.init() in this file", "without it the library does not start: call it after the imports")
    for call in script.called("backward"):
        if call.in_step and not call.arguments:
            why = "smp does not see it: call model.backward(loss), of the DistributedModel"
            yield Finding("backward() of the loss, in a function of smp.step", why, call.line)
    if not script.called("DistributedOptimizer"):
        for call in script.calls:
            if call.name.startswith("torch.optim.") and call.name.count(".") == 2 and call.last[:1].isupper():
                why = "smp does not keep its state: optimizer = smp.DistributedOptimizer(optimizer)"
                yield Finding(f"{call.name} without smp.DistributedOptimizer", why, call.line)
    steps = script.called(f"{_SMP}.step")
    moves = (*script.called("to"), *script.called("cuda"))
    if gpus and steps and all(call.name.rpartition(".")[0] in script.wrapped for call in moves):
        why = "a model on GPUs takes no inputs of the CPU: data.to(torch.device('cuda', smp.local_rank()))"
        yield Finding("no input is moved to a GPU in this file", why, steps[0].line)
    device = min((call.line for call in script.called("cuda.set_device")), default=0)
    for call in script.called("cuda.synchronize"):
        if call.line < device:
            why = (
                "it takes memory of the first GPU in every process: call torch.cuda.set_device(smp.local_rank()) before"
            )
            yield Finding("torch.cuda.synchronize before set_device", why, call.line)
    for call in script.calls:
        owner = call.name.rpartition(".")[0]
        if owner in script.wrapped and (call.last == "cpu" or (call.last == "to" and "cpu" in call.words())):
            why = "smp places the model's parts itself: leave it where it is, and save its state_dict()"
            yield Finding(f"{owner}.{call.last} moves the DistributedModel", why, call.line)


def _unsupported(script: Script) -> Iterator[Finding]:
    """Find what the page says that smp does not work with."""
    for module, why in (
        ("apex.amp", "not supported under smp: use PyTorch's own automatic mixed precision"),
        ("apex.optimizers", "apex's fused optimizers are not supported under smp: use torch.optim"),
    ):
        yield from (Finding(module, why, line) for line in script.imports(module))
    for name, why in (
        ("DistributedDataParallel", "not supported around an smp model: use smp.DistributedModel"),
        ("jit.ScriptModule", "not supported under smp: keep the model a plain module"),
        ("jit.script", "it makes a ScriptModule, which smp does not support"),
    ):
        yield from (Finding(name, why, call.line) for call in script.called(name))


def _loaders(script: Script, instance_type: str, workers_allowed: bool) -> Iterator[Finding]:
    for call in script.called("DataLoader"):
        if "**" not in call.keywords and call.constant("drop_last") is not True and "drop_last" not in call.keywords:
            why = "the last, smaller batch does not split into microbatches: give drop_last=True"
            yield Finding("DataLoader without drop_last", why, call.line)
        workers = call.constant("num_workers")
        if not workers_allowed and workers not in (None, 0):
            why = f"on {instance_type} worker processes of data loaders do not go with smp: give num_workers=0"
            yield Finding(f"DataLoader with num_workers={workers}", why, call.line)


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
