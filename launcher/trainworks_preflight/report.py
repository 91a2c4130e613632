"""Write the result of a preflight, as text for people or as JSON."""

from __future__ import annotations

import json
import shlex
import textwrap
from typing import Callable, Mapping, Sequence

from trainworks_launcher.command.options import Parsed, value_of
from trainworks_launcher.command.rank_map import rank_map
from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.json_values import Json, readable
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.job.job import describe
from trainworks_launcher.plan.plan import NodePlan
from trainworks_preflight.check import Result, check


def preflight(parsed: Parsed, width: int) -> tuple[int, str]:
    """Run a preflight.

    Args:
        parsed: The command line.
        width: Columns of the terminal.

    Returns:
        The exit status (0: the job would start, 64: it has problems), and the text to print.
    """
    result = check(parsed)
    status = names.EXIT_NOT_STARTED if result.problems else 0
    redactor = None if "--show-secrets" in parsed else Redactor(result.hyperparameters)
    if value_of(parsed, "--format", "text") == "json":
        return status, _as_json(result, redactor)
    return status, _as_text(result, redactor, width)


def _as_json(result: Result, redactor: Redactor | None) -> str:
    """Write the result as JSON text."""
    hidden = redactor.text if redactor else str
    redacted = [problem._replace(what=hidden(problem.what)) for problem in result.problems]
    document: dict[str, Json] = {
        "ready": not result.problems,
        "problems": [dict(problem._asdict()) for problem in redacted],
        "warnings": [hidden(warning) for warning in result.warnings],
        "hyperparameters": _redacted(result.hyperparameters, redactor),
        "plans": [plan.document() for plan in _redacted_plans(result, redactor)],
        "advice": [dict(piece._asdict()) for piece in result.advice],
        "tips": [{"text": tip.text, "link": tip.link} for tip in result.tips],
        "assumptions": [result.assumption] if result.assumption else [],
    }
    return readable(json.dumps(document, indent=2, ensure_ascii=False)) + "\n"


def _redacted(hyperparameters: Mapping[str, Json], redactor: Redactor | None) -> dict[str, Json]:
    """Redact hyperparameters; a value without a secret keeps its type."""
    if redactor is None:
        return dict(hyperparameters)
    shown: dict[str, Json] = {}
    for name, value in hyperparameters.items():
        text = value if isinstance(value, str) else json.dumps(value)
        redacted = redactor.value(name, text)
        shown[name] = value if redacted == text else redacted
    return shown


def _redacted_plans(result: Result, redactor: Redactor | None) -> Sequence[NodePlan]:
    if redactor is None:
        return result.plans
    return [plan.redacted(redactor) for plan in result.plans]


def _as_text(result: Result, redactor: Redactor | None, width: int) -> str:
    """Write the result for people: the job, problems, warnings, plans, advice, and the verdict.

    A job with problems is shown without its plans and tips, because they will change.
    """
    width = min(max(width, 60), 120)
    hidden = redactor.text if redactor else str
    lines: list[str] = []
    if result.job is not None:
        instance_type = result.job.placement.instance_type
        lines += _wrapped(f"{describe(result.job)}; hosts are {instance_type}", width)
    lines += _problem_lines(result.problems, hidden, width)
    if result.warnings:
        lines += ["", "Warnings, which do not stop it:"]
    for number, warning in enumerate(result.warnings, 1):
        lines += _wrapped(hidden(warning), width, f"  {number}. ", "     ")
    if result.job is not None and not result.problems:
        ranks = rank_map(result.job.placement, result.job.environment.devices)
        if ranks:
            lines += ["", *ranks]
        plans = _redacted_plans(result, redactor)
        for plan in plans:
            lines += ["", *_plan_lines(plan, plans[0], width)]
        lines += _advice_lines(result, hidden, width)
    lines.append("")
    if result.assumption:
        lines += _wrapped(f"({result.assumption})", width)
    if result.problems:
        noun = "problem" if len(result.problems) == 1 else "problems"
        lines.append(f"not ready: {len(result.problems)} {noun}")
    else:
        lines.append("ready: the job would start")
    return "\n".join(lines).strip("\n") + "\n"


def _problem_lines(
    problems: Sequence[Problem], hidden: Callable[[str], str], width: int
) -> list[str]:
    """Write each problem, and below it what to do; ``[]`` without problems."""
    if not problems:
        return []
    lines = ["", "Problems, to correct before you start the job:"]
    for number, problem in enumerate(problems, 1):
        fault = str(problem._replace(advice=""))
        lines += _wrapped(hidden(fault), width, f"  {number}. ", "     ")
        if problem.advice:
            lines += _wrapped(hidden(f"-> {problem.advice}"), width, "     ", "        ")
    return lines


def _advice_lines(result: Result, hidden: Callable[[str], str], width: int) -> list[str]:
    """Write the advice and the tips of a job without problems."""
    lines: list[str] = []
    if result.advice:
        lines += ["", "Advice on this job:"]
    for piece in result.advice:
        lines += _wrapped(hidden(f"{piece.subject}: {piece.text}"), width, "  - ", "    ")
        lines += _wrapped(hidden(f"why: {piece.why}"), width, "    ", "    ")
    if result.tips:
        lines += ["", "Tips for every job of this kind:"]
    for tip in result.tips:
        lines += _wrapped(f"{tip.text}: {tip.link}", width, "  - ", "    ")
    return lines


def _wrapped(text: str, width: int, first: str = "", following: str = "") -> list[str]:
    """Wrap a text; options and names with hyphens stay whole."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=following, break_on_hyphens=False
    )


def _plan_lines(plan: NodePlan, leader: NodePlan, width: int) -> list[str]:
    """Write one host's plan in short: its command, ready to be copied, and its own variables."""
    place = f"{plan.host} ({plan.role})"
    beside = [f"  beside it: {row.name}" for row in plan.auxiliaries]
    if not plan.argv:
        reasons = [reason.why for reason in plan.why if not reason.words]
        why = reasons[0] if reasons else "another host starts its processes"
        return [*_wrapped(f"{place} runs no command: {why}", width, "", "  "), *beside]

    different = _differences(plan, leader) if plan is not leader else None
    if different is not None and len(different) <= _FEW:
        same = f"{place} runs the same"
        if different:
            same += f", but for {', '.join(different)}"
        return _wrapped(same, width, "", "  ")

    lines, line = [f"{place} runs:"], "  "
    for word in map(shlex.quote, plan.argv):
        if len(line) + len(word) + 3 > width and line.strip():
            lines.append(f"{line}\\")
            line = "    "
        line += f"{word} "
    lines.append(line.rstrip())
    variables = _own_variables(plan)
    if variables:
        lines.append("  with:")
    for name, value in variables.items():
        lines.append(f"    {name}={shlex.quote(value)}")
    return lines + beside


def _differences(plan: NodePlan, leader: NodePlan) -> list[str] | None:
    """Return the words and variables in which a plan differs from the leader's.

    None if the plans have different forms.
    """
    own, leaders = _own_variables(plan), _own_variables(leader)
    if len(plan.argv) != len(leader.argv) or not own.keys() >= leaders.keys():
        return None
    different = [word for word, other in zip(plan.argv, leader.argv) if word != other]
    for name, value in own.items():
        if leaders.get(name) == value:
            continue
        is_short = len(value) < _SHORT
        different.append(f"{name}={value}" if is_short else f"its own {name}")
    return different


_SHORT = 40
"""Length from which only the name of a variable is shown, where two hosts are compared."""

_FEW = 4
"""Limit of differences from the leader's plan that are shown instead of the whole plan."""


def _own_variables(plan: NodePlan) -> dict[str, str]:
    """Return the variables of a plan that depend on the mode."""
    own = [name for name in sorted(plan.env) if not name.startswith(_EVERY_SCRIPTS)]
    return {name: plan.env[name] for name in own}


_EVERY_SCRIPTS = ("SM_", "SAGEMAKER_", "CURRENT_HOST", "PYTHON", "MASTER_")
"""Prefixes of variables that every script gets, in any mode: `explain` shows them."""
