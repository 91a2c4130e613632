"""``build.py --bake``: the file for `docker buildx bake`, beside it the contexts and this machine's settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from trainworks.build.context import add_local_artifacts, replace_output, write_context
from trainworks.build.many import choose_rows, chosen_targets
from trainworks.errors import LockError, OutputError
from trainworks.facts.rows import Facts
from trainworks.host.settings import read_host_settings
from trainworks.inputs.mirror import read_mirror
from trainworks.inputs.source_code import download_missing
from trainworks.render.bake import SECRET, bake, bake_name
from trainworks.terminal.output import put, say

FILE = "docker-bake.json"


def write_bake(options: argparse.Namespace, facts: Facts, environment: Mapping[str, str]) -> int:
    """Write the file, one context for each target, and this machine's settings as the secrets that they mount.

    Args:
        options: The command line, parsed.
        facts: The rows.
        environment: The process's environment, for this machine's settings.

    Raises:
        UnknownNameError: A pattern fits no target.
        TrainworksError: A target cannot be planned; nothing was written then.
        LockError: With ``--strict`` a target has unlocked inputs, or no target is left.
        HostError: A source of a target cannot be reached: what the file builds must not depend on the machine.
        OutputError: Something cannot be written.
    """
    targets = []
    for chosen in chosen_targets(choose_rows(options.only, facts), facts):
        if chosen.error is not None:
            raise chosen.error
        assert chosen.plan is not None
        assert chosen.rendering is not None
        if not chosen.plan.unlocked:
            targets.append((chosen.plan, chosen.rendering))
        elif options.strict:
            raise LockError(f"{chosen.name} has inputs that are not locked: {', '.join(chosen.plan.unlocked)}")
        else:
            say(f"{chosen.name}: skipped: {len(chosen.plan.unlocked)} inputs not locked")
    if not targets:
        raise LockError("no target is left: every one has inputs that are not locked")
    mirror = read_mirror(options.mirror, offline=options.offline)
    settings = mirror.settings(read_host_settings(environment))
    places = mirror.places(facts, settings, environment)
    for plan, _ in targets:
        download_missing(plan, places, settings, mirror=options.mirror)
    folder: Path = options.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plan, rendering in targets:
            context = folder / "contexts" / plan.target.name
            replace_output(rendering, context)
            write_context(rendering, context)
            add_local_artifacts(plan, places.folders, context)
            secrets = settings.secrets(plan.base.suite if plan.base.bootstrap else "", plan.wheel_index)
            for identifier in dict.fromkeys(SECRET.findall(rendering.dockerfile)):
                _write_secret(folder / "secrets", plan.target.name, identifier, secrets[identifier])
        # They may hold passwords: they are no part of what is kept or sent anywhere.
        (folder / "secrets" / ".gitignore").write_text("*\n", encoding="utf-8")
        text = bake(targets)
        (folder / FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{error.filename or folder}: {error.strerror or error}") from error
    names = [bake_name(plan.target.name) for plan, _ in targets]
    report = {"file": str(folder / FILE), "targets": names, "groups": list(json.loads(text)["group"])}
    put(json.dumps(report, indent=2) + "\n" if options.format == "json" else f"{folder / FILE}\n")
    return 0


def _write_secret(folder: Path, target: str, identifier: str, content: bytes) -> None:
    folder.mkdir(exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    (folder / target).mkdir(exist_ok=True)
    path = folder / target / identifier
    path.touch(mode=0o600)
    path.write_bytes(content)
