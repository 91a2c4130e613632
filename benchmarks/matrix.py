#!/usr/bin/env python3
"""Simulates how long the matrix takes, and what it costs, against the number of builders. Nothing is built.

The matrix is every target that can be built; those with unlocked inputs compile parts for a time that nobody knows.
How long a target takes is taken from images/built.toml where it was timed, else from a line through those rows: seconds
over the bytes of its Python files. A builder that has a stage in its cache does not build it again: the stage's share
of the bytes costs nothing there. Targets are given out longest first, each to the builder that ends it first. The
seconds of the rows are those of the machine that built them, with whatever was cached then: read the ratios, not the
minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression

from measure import ROOT, Figure, Section, machine, table, write
from trainworks.build.many import Chosen, chosen_targets
from trainworks.facts.load import load as load_facts
from trainworks.facts.rows import Facts
from trainworks.render.forecast import stage_keys

BUILDERS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A target as the simulation sees it.

    Attributes:
        name: The target's.
        own: Seconds that no cache saves: start, export, image tests.
        stages: Seconds of each stage, by its key; a builder that has the key spends none.
    """

    name: str
    own: float
    stages: Mapping[str, float]

    def seconds(self, cached: set[str]) -> float:
        """Return how long it takes on a builder with these stages."""
        return self.own + sum(seconds for key, seconds in self.stages.items() if key not in cached)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a number of builders comes to: seconds until the last target ends, builder minutes paid for, their price."""

    builders: int
    seconds: float
    minutes: float
    cost: float
    speedup: float


def simulate(works: Sequence[Work], builders: int, *, start_seconds: float = 0) -> list[float]:
    """Return when each builder that is used ends, in seconds from the start.

    Args:
        works: What to build.
        builders: How many there are, each with an empty cache.
        start_seconds: How long a builder takes before it can build.
    """
    ends = [0.0] * builders
    caches: list[set[str]] = [set() for _ in range(builders)]
    for work in sorted(works, key=lambda work: (-work.seconds(set()), work.name)):

        def end(number: int, work: Work = work) -> float:
            return (ends[number] or start_seconds) + work.seconds(caches[number])

        chosen = min(range(builders), key=end)
        ends[chosen] = end(chosen)
        caches[chosen].update(work.stages)
    return [each for each in ends if each]


def outcomes(works: Sequence[Work], counts: Sequence[int], *, price: float, start_seconds: float) -> list[Outcome]:
    """Return what each number of builders comes to; ``price`` is that of one builder's minute."""
    alone = max(simulate(works, 1, start_seconds=start_seconds))
    found = []
    for count in counts:
        ends = simulate(works, count, start_seconds=start_seconds)
        minutes = sum(ends) / 60
        found.append(
            Outcome(
                builders=count,
                seconds=round(max(ends), 1),
                minutes=round(minutes, 1),
                cost=round(minutes * price, 2),
                speedup=round(alone / max(ends), 2),
            )
        )
    return found


def works_of(facts: Facts) -> list[Work]:
    """Return every target that can be planned, with its seconds from real builds or from the line through them."""
    targets = [target for target in chosen_targets(facts.targets, facts) if target.plan and not target.plan.unlocked]
    built = {row.target: float(row.seconds) for row in facts.built if row.seconds}
    points = [(float(total(target)), built[target.name]) for target in targets if target.name in built]
    slope, intercept = linear_regression([size for size, _ in points], [seconds for _, seconds in points])
    return [work_of(target, built.get(target.name, intercept + slope * total(target)), intercept) for target in targets]


def work_of(target: Chosen, seconds: float, own: float) -> Work:
    """Share a target's seconds out among its stages, by the bytes of their Python files."""
    assert target.plan is not None
    assert target.rendering is not None
    sizes = {step.component: sum(file.size for file in step.python) for step in target.plan.steps}
    keys = stage_keys(target.plan, target.rendering)
    names = [step.component for step in target.plan.steps if has_stage(target, step.component)]
    own = min(max(own, 0.0), seconds)
    share = (seconds - own) / (sum(sizes.values()) or 1)
    return Work(
        name=target.name, own=own, stages={key: share * sizes[name] for key, name in zip(keys, names, strict=True)}
    )


def has_stage(target: Chosen, component: str) -> bool:
    """Return whether a component has a build stage."""
    assert target.rendering is not None
    return component in target.rendering.stage_components.values()


def total(target: Chosen) -> int:
    """Return the bytes of a target's Python files."""
    assert target.plan is not None
    return sum(file.size for step in target.plan.steps for file in step.python)


def section_of(works: Sequence[Work], found: Sequence[Outcome], start_seconds: float) -> Section:
    """Return the table for the results, each number of builders beside one."""
    alone = max(simulate(works, 1, start_seconds=start_seconds))
    return Section(
        title=f"Simulated, not measured: {len(works)} targets on several builders",
        machine=machine(start=f"{start_seconds:g} s for each builder"),
        figures=tuple(
            Figure(
                name=f"{each.builders} builders",
                unit="s",
                ours=(each.seconds,),
                peer=(alone,),
                note=f"{each.minutes:g} builder minutes to be paid for",
            )
            for each in found
        ),
        peer="one builder. The seconds come from the rows of images/ (see benchmarks/matrix.py): the ratio counts.",
    )


def main(words: list[str]) -> int:
    """Simulate, and print the table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--price", type=float, default=0.0, help="of one builder's minute, in any currency")
    parser.add_argument("--start-seconds", type=float, default=60.0, help="before a builder can build (default: 60)")
    parser.add_argument("--builders", type=int, nargs="+", default=list(BUILDERS))
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--write", action="store_true", help="record the figures in benchmarks/results.*")
    options = parser.parse_args(words)
    works = works_of(load_facts(ROOT))
    found = outcomes(works, options.builders, price=options.price, start_seconds=options.start_seconds)
    if options.write:
        write("matrix", section_of(works, found, options.start_seconds))
    if options.format == "json":
        print(json.dumps([asdict(each) for each in found], indent=2))
        return 0
    rows = [("builders", "minutes until the end", "builder minutes", "cost", "times faster")]
    rows += [
        (str(e.builders), f"{e.seconds / 60:.1f}", f"{e.minutes:.1f}", f"{e.cost:.2f}", f"{e.speedup:.2f}")
        for e in found
    ]
    print(f"simulated, not measured: {len(works)} targets\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
