"""Read the files and numbers of preflight's command line, and collect all problems in them."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Sequence

from trainworks_launcher.command.options import Parsed, value_of
from trainworks_launcher.contract.errors import Problem, nearest
from trainworks_launcher.contract.json_values import Json, decode, mapping
from trainworks_launcher.job.placement import unknown_type
from trainworks_preflight.distribution import Group
from trainworks_preflight.facts import FILE, parse_facts

_HOSTS_LIMIT = 4096  # a mistyped number must not fill the memory


class Inputs:
    """Reads the files and numbers of the command line, and collects their problems."""

    def __init__(self, parsed: Parsed) -> None:
        """Read only the facts file."""
        self._parsed = parsed
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.facts = parse_facts(Path(__file__).with_name(FILE).read_text(encoding="utf-8"))

    def text(self, path: Path, where: str) -> str:
        """Return a file's text, "" with a problem if it cannot be read."""
        try:
            return path.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = error.strerror
            self.problems.append(
                Problem(f"{path} cannot be read: {reason}", where, "give the path of a file")
            )
            return ""

    def value(self, option: str) -> Json:
        """Return the value in a file, as JSON or as a Python literal.

        {} without the option, and with a problem if the file cannot be read.
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
            # Through JSON: tuples become lists, and values that no job can get are refused.
            return decode(json.dumps(ast.literal_eval(text)))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            advice = "write JSON, or the dict as in Python, without names or calls"
            self.problems.append(
                Problem(f"{name} is neither JSON nor a Python literal: {reason}", option, advice)
            )
            return {}

    def distribution(self) -> Json:
        """Return the distribution, with a path of model parallel parameters replaced by the file's
        content.
        """
        value = self.value("--distribution")
        parallel = mapping(mapping(mapping(value).get("smdistributed")).get("modelparallel"))
        path = parallel.get("parameters")
        if isinstance(value, dict) and isinstance(path, str):
            folder = Path(value_of(self._parsed, "--distribution")).parent
            where = "distribution['smdistributed']['modelparallel']['parameters']"
            try:
                parameters = decode(self.text(folder / path, where) or "{}")
            except ValueError as error:
                self.problems.append(
                    Problem(f"{path} is not JSON: {error}", where, "write a JSON object")
                )
                parameters = {}
            inner: dict[str, Json] = {"modelparallel": {**parallel, "parameters": parameters}}
            return {**value, "smdistributed": inner}
        return value

    def count(self, text: str, option: str) -> int:
        """Read a number of hosts; 1 with a problem if it is wrong."""
        if text.isdecimal() and 1 <= int(text) <= _HOSTS_LIMIT:
            return int(text)
        advice = f"give a whole number from 1 to {_HOSTS_LIMIT}"
        self.problems.append(
            Problem(f"{text!r} is not a number of hosts", f"option {option}", advice)
        )
        return 1

    def groups(self) -> tuple[Group, ...]:
        """Return the cluster: its instance groups, or one nameless group."""
        texts = self._parsed.get("--instance-group", ())
        groups = self._named_groups(texts) if texts else [self._nameless_group()]
        for group in groups:
            row = self.facts.find(group.instance_type)
            if row is None and group.instance_type:
                self.warnings.append(unknown_type(group.instance_type, self.facts.instances))
        return tuple(groups)

    def _nameless_group(self) -> Group:
        kind = value_of(self._parsed, "--instance-type")
        if not kind:
            advice = "for example: --instance-type TYPE --instance-count 2"
            self.problems.append(
                Problem("no instance type is given", "option --instance-type", advice)
            )
        count = value_of(self._parsed, "--instance-count", "1")
        return Group("", kind, self.count(count, "--instance-count"))

    def _named_groups(self, texts: Sequence[str]) -> list[Group]:
        """Parse groups in the form ``NAME=TYPE:COUNT``."""
        option = "option --instance-group"
        if "--instance-type" in self._parsed or "--instance-count" in self._parsed:
            text = "cannot be combined with --instance-type and --instance-count"
            self.problems.append(Problem(text, option, "give groups, or type and count"))
        groups = []
        for text in texts:
            name, equals, rest = text.partition("=")
            kind, colon, count = rest.rpartition(":")
            if not (name and equals and colon):
                advice = "write NAME=TYPE:COUNT"
                self.problems.append(Problem(f"{text!r} is not a group", option, advice))
                continue
            groups.append(Group(name, kind, self.count(count, "--instance-group")))
        return groups

    def entry(self) -> tuple[Path, str]:
        """Return the code directory, and the entry point in it.

        Without --source-dir the SDK sends the script alone.
        """
        script = Path(value_of(self._parsed, "--entry-point"))
        source = value_of(self._parsed, "--source-dir")
        if not source:
            if not script.is_file():
                siblings: list[str] = []
                if script.parent.is_dir():
                    siblings = [path.name for path in script.parent.glob("*.py")]
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
