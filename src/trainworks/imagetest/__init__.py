"""The promises of an image, checked against the image: ``run_checks`` asks, ``line`` tells a person."""

from trainworks.imagetest.results import CheckResult, component_width, line, title_of
from trainworks.imagetest.run import run_checks

__all__ = ["CheckResult", "component_width", "line", "run_checks", "title_of"]
