"""Runs the checks of a plan against a built image, with pytest in this process.

They run in this process because engine and image are live objects: a child would have to find both
again, and the forbidden strings, which are secret, would have to be passed to it. Its own folder is
pytest's root. It uses no configuration, plugin, cache or option of the folder or environment that
it is called from, captures and prints nothing, and can run inside another pytest.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from trainworks.engine.subprocesses import wait_for
from trainworks.errors import EngineError, EngineUnavailableError, OutputError, TrainworksError
from trainworks.imagetest import test_promises
from trainworks.imagetest.results import CheckResult, title_of
from trainworks.plan.checks import Check

_ONE_SESSION: Final = threading.Lock()
"""pytest keeps state of its own in the process: threads that check images take turns."""

FAULTS: Final = (EngineError, EngineUnavailableError, OutputError)
"""Errors that say nothing of the image: the engine failed or is gone, or its disk is full."""


def run_checks(
    subject: test_promises.ImageUnderTest,
    *,
    report: Callable[[CheckResult], None],
    junit: Path | None = None,
) -> tuple[CheckResult, ...]:
    """Run the checks of a plan against an image.

    Args:
        subject: The image with its checks.
        report: Called with each result at once, in order; must not raise.
        junit: The file for the results as JUnit XML; default: none.

    Returns:
        One result for each check. A check that the image does not let run has not passed, and the
        result has the reason.

    Raises:
        EngineError: The engine failed at a check, also in the second attempt. The results of this
            check and of later ones are unknown, and no report is written.
        EngineUnavailableError: The engine is gone; likewise.
        OutputError: The engine's disk is full; likewise.
        KeyboardInterrupt: Ctrl-C was pressed; the container is gone by then.
    """
    distinct = tuple(dict.fromkeys(subject.checks))
    if not distinct:
        return ()
    plugin = _Plugin(replace(subject, checks=distinct), report)
    module = Path(test_promises.__file__)
    arguments = [
        str(module),
        f"--rootdir={module.parent}",
        f"--config-file={os.devnull}",
        "--noconftest",
        "--import-mode=importlib",
        "--assert=plain",
        "--capture=no",
        "--strict-markers",
        # These plugins would write files, print, or change the hooks of a
        # process that is not pytest's.
        "-pno:cacheprovider",
        "-pno:terminal",
        "-pno:faulthandler",
        "-pno:unraisableexception",
        "-pno:threadexception",
        "-pno:logging",
        "-pno:warnings",
    ]
    if junit is not None:
        arguments += [
            f"--junit-xml={junit.absolute()}",
            "--override-ini=junit_suite_name=trainworks",
        ]
    wait_for(lambda seconds: _ONE_SESSION.acquire(timeout=-1 if seconds is None else seconds))
    try:
        with _pytest_environment():
            status = pytest.main(arguments, plugins=[plugin])
    finally:
        _ONE_SESSION.release()
    if plugin.interrupted:
        raise KeyboardInterrupt
    if plugin.fault is not None:
        if junit is not None:
            # pytest's report calls every error of a check the check's failure.
            junit.unlink(missing_ok=True)
        raise plugin.fault
    return plugin.finish(f"pytest ended with {pytest.ExitCode(status).name}")


@contextlib.contextmanager
def _pytest_environment() -> Iterator[None]:
    """Hide all variables of pytest for the time of the ``with`` block; no plugins are loaded."""
    # The one place that changes this process's environment: pytest reads options and plugins from
    # its variables, and has no other switch for them. All variables of pytest, also those of the
    # run itself, are restored.
    before = {name: value for name, value in os.environ.items() if name.startswith("PYTEST_")}
    try:
        for name in before:
            del os.environ[name]
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        yield
    finally:
        for name in list(os.environ):
            if name.startswith("PYTEST_"):
                del os.environ[name]
        os.environ.update(before)


class _Plugin:
    """Gives pytest the checks as parameters and takes the results."""

    def __init__(
        self, subject: test_promises.ImageUnderTest, report: Callable[[CheckResult], None]
    ) -> None:
        self._subject = subject
        self._report = report
        self._reasons: dict[Check, list[str]] = {}
        self._seconds: dict[Check, float] = {}
        self._results: dict[Check, CheckResult] = {}
        self._trouble: list[str] = []
        self.interrupted = False
        self.fault: TrainworksError | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[test_promises.SUBJECT] = self._subject

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test function the checks of its kind."""
        functions = test_promises.PROMISES
        all_checks = self._subject.checks
        checks = [check for check in all_checks if functions.get(check.kind) is metafunc.function]
        names = [f"{check.component}: {title_of(check)}" for check in checks]
        metafunc.parametrize("check", checks, ids=names)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # A kind without a check has one item that would be skipped; the
        # others come in the order of the plan.
        order = {check: position for position, check in enumerate(self._subject.checks)}
        items[:] = [item for item in items if _check_of(item) in order]
        items.sort(key=lambda item: order[_check_of(item)])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Take the time and the reasons of a check from each phase of its test."""
        outcome = yield
        check = _check_of(item)
        self._seconds[check] = self._seconds.get(check, 0.0) + call.duration
        if call.excinfo is not None and isinstance(call.excinfo.value, FAULTS):
            self.fault = self.fault or call.excinfo.value
            item.session.shouldfail = "the engine failed"
        elif call.excinfo is not None:
            self._reasons.setdefault(check, []).append(_reason(call.excinfo, call.when))
        # A check has passed only after its teardown: that of the last one ends the container.
        if call.when == "teardown" and self.fault is None:
            self._finish(check)
        return outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._trouble.append(report.longreprtext)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._trouble.append(f"pytest itself failed: {excinfo.exconly()}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.interrupted = isinstance(excinfo.value, KeyboardInterrupt)

    def _finish(self, check: Check) -> None:
        """Make the result of a check from the reasons so far, and report it."""
        reasons = self._reasons.get(check, [])
        result = CheckResult(
            component=check.component,
            title=title_of(check),
            passed=not reasons,
            detail="\n".join(reasons),
            seconds=self._seconds.get(check, 0.0),
        )
        self._results[check] = result
        self._report(result)

    def finish(self, status: str) -> tuple[CheckResult, ...]:
        """Return all results, in order; a check that never ran has not passed.

        Args:
            status: The reason for checks that never ran, if pytest gave none.
        """
        for check in self._subject.checks:
            if check not in self._results:
                self._reasons[check] = ["the check did not run", *(self._trouble or [status])]
                self._finish(check)
        return tuple(self._results[check] for check in self._subject.checks)


def _check_of(item: pytest.Item) -> Check:
    """Return the check that a test of pytest is for."""
    check: Check = item.callspec.params["check"]  # type: ignore[attr-defined]
    return check


def _reason(excinfo: pytest.ExceptionInfo[BaseException], when: str) -> str:
    """Return why a check failed, for people.

    Args:
        excinfo: The error that the check raised.
        when: The phase of the test: ``setup``, ``call`` or ``teardown``.
    """
    error = excinfo.value
    if isinstance(error, pytest.fail.Exception):
        text = str(error.msg)
    elif isinstance(error, TrainworksError):
        text = str(error)
    elif isinstance(error, pytest.skip.Exception):
        text = f"it was skipped: {error.msg}"
    else:
        place = excinfo.traceback[-1]
        text = f"the check itself failed with {excinfo.exconly()} ({place.path}:{place.lineno + 1})"
    words = {"setup": "the check could not start: ", "teardown": "the end of the checks failed: "}
    return words.get(when, "") + text
