"""The preflight's command line: its files, read once, with everything that is wrong with them."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from trainworks_launcher.command.options import Parsed, value_of
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import Json, decode, mapping
from trainworks_launcher.job.placement import unknown_type
from trainworks_preflight.distribution import Group
from trainworks_preflight.facts import FILE, parse_facts

_HOSTS_LIMIT = 4096  # a number typed wrong must not fill the memory


class Inputs:
    """Reads the command line's files and numbers, and collects what is wrong with them."""

    def __init__(self, parsed: Parsed) -> None:
        """Nothing is read yet but the launcher's own facts."""
        self._parsed = parsed
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.facts = parse_facts(Path(__file__).with_name(FILE).read_text(encoding="utf-8"))

    def text(self, path: Path, where: str) -> str:
        """Return a file's text, "" if it cannot be read."""
        try:
            return path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.problems.append(
                Problem(f"{path} cannot be read: {reason}", where, "give the path of a file")
            )
            return ""

    def value(self, option: str) -> Json:
        """Return a file with one value, as JSON or as Python writes it.

        {} without the option or if it cannot be read.
        """
        name = value_of(self._parsed, option)
        text = self.text(Path(name), f"option {option}").strip() if name else ""
        if not text:
            return {}
        try:
            return decode(text)
        except ValueError as error:
            reason = str(error)
        try:
            # Through JSON: tuples become lists, and what no job can be sent is refused.
            return decode(json.dumps(ast.literal_eval(text)))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            advice = "write JSON, or the dict as in Python, without names or calls"
            self.problems.append(
                Problem(f"{name} is neither JSON nor a Python literal: {reason}", option, advice)
            )
            return {}

    def distribution(self) -> Json:
        """Return the distribution, with model parallel parameters that stand in
        a file of their own in their place.
        """
        value = self.value("--distribution")
        parallel = mapping(mapping(mapping(value).get("smdistributed")).get("modelparallel"))
        path = parallel.get("parameters")
        if isinstance(value, dict) and isinstance(path, str):
            folder = Path(value_of(self._parsed, "--distribution")).parent
            where = "distribution['smdistributed']['modelparallel']['parameters']"
            try:
                read = decode(self.text(folder / path, where) or "{}")
            except ValueError as error:
                self.problems.append(
                    Problem(f"{path} is not JSON: {error}", where, "write a JSON object")
                )
                read = {}
            return {**value, "smdistributed": {"modelparallel": {**parallel, "parameters": read}}}
        return value

    def count(self, text: str, option: str) -> int:
        """Return a number of hosts; 1 if it is wrong."""
        if text.isdecimal() and 1 <= int(text) <= _HOSTS_LIMIT:
            return int(text)
        advice = f"give a whole number from 1 to {_HOSTS_LIMIT}"
        self.problems.append(
            Problem(f"{text!r} is not a number of hosts", f"option {option}", advice)
        )
        return 1

    def groups(self) -> tuple[Group, ...]:
        """Return the cluster: its instance groups, or one nameless group."""
        given = self._parsed.get("--instance-group", ())
        if not given:
            kind = value_of(self._parsed, "--instance-type")
            if not kind:
                advice = "for example: --instance-type TYPE --instance-count 2"
                self.problems.append(
                    Problem("no instance type is given", "option --instance-type", advice)
                )
            groups = [
                Group(
                    "",
                    kind,
                    self.count(value_of(self._parsed, "--instance-count", "1"), "--instance-count"),
                )
            ]
        else:
            if "--instance-type" in self._parsed or "--instance-count" in self._parsed:
                advice = "give groups, or type and count"
                self.problems.append(
                    Problem(
                        "cannot be combined with --instance-type and --instance-count",
                        "option --instance-group",
                        advice,
                    )
                )
            groups = []
            for text in given:
                name, equals, rest = text.partition("=")
                kind, colon, count = rest.rpartition(":")
                if not (name and equals and colon):
                    advice = "write NAME=TYPE:COUNT"
                    self.problems.append(
                        Problem(f"{text!r} is not a group", "option --instance-group", advice)
                    )
                    continue
                groups.append(Group(name, kind, self.count(count, "--instance-group")))
        for group in groups:
            row = self.facts.find(group.instance_type)
            if row is None and group.instance_type:
                self.warnings.append(unknown_type(group.instance_type, self.facts.instances))
        return tuple(groups)

    def entry(self) -> tuple[Path, str]:
        """Return (the code directory, the entry point in it).

        Without --source-dir the SDK sends the script alone.
        """
        script = Path(value_of(self._parsed, "--entry-point"))
        source = value_of(self._parsed, "--source-dir")
        if not source:
            if not script.is_file():
                siblings = (
                    [path.name for path in script.parent.glob("*.py")]
                    if script.parent.is_dir()
                    else []
                )
                advice = nearest(script.name, siblings)
                self.problems.append(
                    Problem(f"file not found: {str(script)!r}", "option --entry-point", advice)
                )
            return script.parent, script.name
        folder = Path(source)
        if not folder.is_dir():
            self.problems.append(Problem(f"directory not found: {source!r}", "option --source-dir"))
        if script.is_absolute() or (not (folder / script).exists() and script.exists()):
            try:
                script = script.resolve().relative_to(folder.resolve())
            except ValueError:
                advice = "give its path inside that directory"
                self.problems.append(
                    Problem(f"{script} is not in {folder}", "option --entry-point", advice)
                )
        return folder, script.as_posix()
