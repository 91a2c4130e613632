"""Our build as a process: what ``build.py --until build`` does, under another
tag, so that no other image is moved.

Called by ``builds.py`` with a frozen copy of the checkout: ``ours.py ROOT
ENGINE TAG cached|all FRAMEWORK CUDA``.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path


def main(words: list[str]) -> int:
    """Build, and print as JSON what was built and which components had a step that ran."""
    root, engine_name, tag, steps, framework, cuda = words
    sys.path.insert(0, str(Path(root) / "src"))

    from trainworks.build.image import build_image
    from trainworks.build.options import BuildOptions
    from trainworks.build.session import BuildSession
    from trainworks.build.target import image_spec
    from trainworks.cli.commands.build import parser
    from trainworks.engine import choose
    from trainworks.engine.protocol import StepEvent
    from trainworks.facts.load import load
    from trainworks.plan.model import Request
    from trainworks.plan.resolve import make_plan
    from trainworks.render.dockerfile import render
    from trainworks.terminal.build_progress import BuildProgress

    class Recorder(BuildProgress):
        """Follows the build as a log file would, and remembers which components ran a step."""

        def __init__(self) -> None:
            super().__init__(io.StringIO())
            self.ran: set[str] = set()

        def __call__(self, event: StepEvent) -> None:
            if event.state == "done" and event.step.startswith(("RUN", "COPY")):
                self.ran.add(event.component)
            super().__call__(event)

    arguments = (
        "--framework",
        framework,
        "--cuda",
        cuda,
        "--until",
        "build",
        "--engine",
        engine_name,
    )
    options = parser().parse_args(arguments)
    facts = load(Path(root))
    plan = make_plan(Request(framework=options.framework, cuda=options.cuda), facts)
    rendering = render(plan, facts)
    engine = choose(options.engine)
    recorder = Recorder()
    session = BuildSession(root=Path(root), facts=facts)
    spec = image_spec(replace(plan, tags=(tag,)), rendering, session)
    result = build_image(
        spec, engine, BuildOptions(until="build", no_cache=steps == "all"), recorder
    )
    content = {
        "identifier": result.image.identifier,
        "size": result.image.size,
        "ran": sorted(recorder.ran),
    }
    sys.stdout.write(json.dumps(content) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
