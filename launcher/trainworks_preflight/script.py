"""What a training script gives away without being run: its calls, its options, its data loaders. Pure.

The script is parsed (``ast``), never executed or imported. What is found becomes advice for the mode that is to start
it; a script that does not parse is advice as well, because it would fail after the cluster has started.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Iterator, Mapping


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
    """A call by its whole dotted name ("torch.utils.data.DataLoader"), with the keywords it is given."""

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

    def imports(self, module: str) -> bool:
        """Return whether a module, or something in it, is imported."""
        return any(name == module or name.startswith(f"{module}.") for name in self.modules)

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
        return Script({}, (), Finding(f"this Python cannot parse it: {reason}", "it would fail on every host", line))
    names = dict(_imported(tree))
    modules: dict[str, int] = {}
    for whole, line in names.values():
        modules.setdefault(whole, line)
    calls: list[Call] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            plain = [each for each in node.decorator_list if not isinstance(each, ast.Call)]
            calls += [Call(_whole_name(each, names), each.lineno, {}) for each in plain]
        if isinstance(node, ast.Call):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            if any(keyword.arg is None for keyword in node.keywords):
                keywords["**"] = node.func  # unknown keywords: none can be said to be missing
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


_FRAMEWORKS = (
    "accelerate",
    "deepspeed",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "composer",
    "ray",
    "fairscale",
)
"""Packages that set the process group and the libraries up by themselves."""


def _sets_up_itself(script: Script) -> bool:
    """Return whether the script must do it itself: it uses torch, and no package that does it."""
    return script.imports("torch") and not any(script.imports(name) for name in _FRAMEWORKS)


_SMP = "smdistributed.modelparallel.torch"
_SMDDP = "smdistributed.dataparallel.torch"


def check_script(
    script: Script,
    mode: str,
    instance_type: str,
    loader_workers: bool,
    torchrun: bool,
    arguments: tuple[str, ...],
    *,
    backend_known: bool = False,
) -> tuple[Finding, ...]:
    """Find advice for one mode.

    Args:
        script: The training script.
        mode: A name of ``registry.MODES``.
        instance_type: Instance type of the hosts.
        loader_workers: Data loaders may have worker processes under smp on this instance type.
        torchrun: torchrun starts it.
        arguments: Names of the hyperparameters that it gets as options.
        backend_known: ``import torch`` of the image registers smddp's backend.
    """
    if script.problem:
        return (script.problem,)
    found: list[Finding] = []
    if mode == "smdistributed.modelparallel":
        found += _model_parallel(script, instance_type, loader_workers, torchrun)
    elif mode in ("smdistributed.dataparallel", "pytorchddp"):
        found += _data_parallel(script, backend_known)
    elif torchrun:
        found += _torch_distributed(script)
    found += _undeclared(script, arguments)
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
    words = [value.value for value in (*call.arguments, *call.keywords.values()) if isinstance(value, ast.Constant)]
    if last == "init_process_group":
        return "nccl" in words
    return last in _TO_DEVICE and any(isinstance(word, str) and word.partition(":")[0] == "cuda" for word in words)


_OF_CUDA = ("Event", "Stream", "current_device", "get_device_name", "get_device_properties", "set_device")
_TO_DEVICE = ("device", "empty", "full", "ones", "rand", "randn", "tensor", "to", "zeros")


def check_compiler(script: Script, cost: str) -> tuple[Finding, ...]:
    """Find what calls a C compiler while the job runs, for an image without one.

    Args:
        script: The training script.
        cost: What does not work without a compiler, as the image manifest says it.
    """
    why = f"the image has no compiler: {cost}"
    found = [Finding("torch.compile", why, call.line) for call in script.calls if call.name == "torch.compile"]
    lines = [line for name, line in script.modules.items() if name.partition(".")[0] == "triton"]
    return (*found, *(Finding("triton", why, line) for line in lines[:1]))


def check_operators(script: Script, compiled_by: Mapping[str, str]) -> tuple[Finding, ...]:
    """Find what compiles code for GPUs, for an image without the compiler.

    Args:
        script: The training script.
        compiled_by: Distribution to the component that it needs, as the image manifest has it.
    """
    lines = {name.partition(".")[0]: line for name, line in reversed(list(script.modules.items()))}
    return tuple(
        Finding(
            module,
            f"it may compile code for GPUs when it is first used, and the image has no {component}: take one that was"
            f" built --with {component}",
            lines[module],
        )
        for name, component in compiled_by.items()
        if (module := name.replace("-", "_")) in lines
    )


def _model_parallel(script: Script, instance_type: str, loader_workers: bool, torchrun: bool) -> Iterator[Finding]:
    """Find what smp needs, and what it does not work with."""
    started = script.called("smp.init") or script.called(f"{_SMP}.init")
    if not started and _sets_up_itself(script):
        why = "unless an import does it, the library does not start: smp.init() after the imports"
        yield Finding("no smp.init() in this file", why)
    if not torchrun:  # the library's second line wraps the model in FSDP itself
        for call in script.called("DistributedDataParallel"):
            yield Finding(
                "DistributedDataParallel", "not supported around an smp model: use smp.DistributedModel", call.line
            )
    for name, line in script.modules.items():
        if name == "apex.amp" or name.startswith("apex.amp."):
            yield Finding("apex.amp", "not supported under smp: use PyTorch's own automatic mixed precision", line)
        if name == "apex.optimizers" or name.startswith("apex.optimizers."):
            yield Finding(
                "apex.optimizers", "apex's fused optimizers are not supported under smp: use torch.optim", line
            )
    for call in script.called("ScriptModule"):
        yield Finding("torch.jit.ScriptModule", "not supported under smp: keep the model a plain module", call.line)
    for call in script.called("jit.script"):
        yield Finding("torch.jit.script", "it makes a ScriptModule, which smp does not support", call.line)
    for call in script.called("torch.compile"):
        yield Finding("torch.compile", "not supported around an smp model: leave it out", call.line)
    for call in script.called("DataLoader"):
        if "**" not in call.keywords and call.constant("drop_last") is not True and "drop_last" not in call.keywords:
            why = "the last, smaller batch does not split into microbatches: give drop_last=True"
            yield Finding("DataLoader without drop_last", why, call.line)
        workers = call.constant("num_workers")
        if not loader_workers and workers not in (None, 0):
            why = f"on {instance_type} worker processes of data loaders do not go with smp: give num_workers=0"
            yield Finding(f"DataLoader with num_workers={workers}", why, call.line)


def _data_parallel(script: Script, backend_known: bool) -> Iterator[Finding]:
    """smddp is a backend of torch.distributed."""
    backends = [(call, _backend(call)) for call in script.called("init_process_group")]
    if not backends and not script.imports("smdistributed.dataparallel") and _sets_up_itself(script):
        why = 'unless an import does it, every process trains alone: dist.init_process_group(backend="smddp")'
        yield Finding("no init_process_group in this file", why)
    if not script.imports(_SMDDP) and not backend_known:
        why = f"it registers the backend: import {_SMDDP}.torch_smddp"
        if any(backend == "smddp" for _, backend in backends):
            yield Finding("the smddp module is not imported", why)
    for call, backend in backends:
        if isinstance(backend, str) and backend != "smddp":
            why = 'the job is started for smddp, and this does not use it: backend="smddp"'
            yield Finding(f"backend {backend!r}", why, call.line)


def _backend(call: Call) -> object:
    """Return the backend of init_process_group: its first argument or keyword; None if it is not a literal."""
    if call.arguments:
        first = call.arguments[0]
        return first.value if isinstance(first, ast.Constant) else None
    return call.constant("backend")


def _torch_distributed(script: Script) -> Iterator[Finding]:
    """Yield every process joins a group at its start and leaves it at its end.

    Source of the abort: gloo's threads still run when the interpreter ends; of 25 runs of four
    processes 4 ended so, and none of 25 that left their group (torch 2.13, Linux).
    """
    joined = script.called("init_process_group")
    if joined and not script.called("destroy_process_group"):
        why = (
            "a process that ends inside its group may abort at its very end (SIGABRT): end with destroy_process_group()"
        )
        yield Finding("no destroy_process_group in this file", why, joined[0].line)
    if joined or script.called("init_device_mesh"):
        return
    if not _sets_up_itself(script) or script.imports("torch_xla") or script.imports(_SMP):
        return
    why = "unless an import does it, every process trains alone: torch.distributed.init_process_group()"
    yield Finding("no init_process_group in this file", why)


def _undeclared(script: Script, arguments: tuple[str, ...]) -> Iterator[Finding]:
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
