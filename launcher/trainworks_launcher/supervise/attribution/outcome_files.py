"""The files that say how a job ended: output/success, output/failure, output/failure.json."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Callable

from trainworks_launcher import __version__
from trainworks_launcher.contract import files, names
from trainworks_launcher.contract.inspection import Inspection
from trainworks_launcher.contract.json_values import decode, mapping, printable
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.environment.manifest import Manifest
from trainworks_launcher.job.model_parallel import OPEN_LIBRARY
from trainworks_launcher.supervise.outcome.outcome import STOPPED, SUCCEEDED, Outcome, shorten
from trainworks_launcher.supervise.processes.output import log


def clear(output: str) -> None:
    """Remove the files that an earlier run left, because they would speak for this one.

    A file that cannot be removed stays, without an error.

    Args:
        output: Directory of the outcome, for example ``/opt/ml/output``; ``""``: nothing is
            removed.
    """
    if not output:
        return
    for name in (names.FAILURE_FILE, names.FAILURE_JSON, names.SUCCESS_FILE):
        with contextlib.suppress(OSError):
            Path(output, name).unlink()


def users_own_failure(output: str, redactor: Redactor) -> str:
    """Read the failure text that the user's program wrote itself.

    Args:
        output: Directory of the outcome, for example ``/opt/ml/output``.
        redactor: Hides the secrets of the job.

    Returns:
        The text without secrets and control characters, shortened to what the platform shows.
        ``""`` if there is none, or if a launcher wrote it.
    """
    text = _read_if_readable(Path(output, names.FAILURE_FILE)).strip()
    if not text:
        return ""
    # A launcher writes its text to FAILURE_JSON, too. The launcher may be that of another job
    # with the same directory. A file that is not JSON is not a launcher's.
    with contextlib.suppress(ValueError):
        document = mapping(decode(_read_if_readable(Path(output, names.FAILURE_JSON))))
        if document.get("text") == text:
            return ""
    return shorten(printable(redactor.text(text)))


def _find_smdistributed_version(manifest: Manifest | None) -> str | None:
    """Return the version of this project's smdistributed, else that of AWS's smp or smddp.

    None if the image has none of them, or if there is no manifest.
    """
    if manifest is None:
        return None
    version = manifest.protected.get(OPEN_LIBRARY)
    if version:
        return version
    return manifest.components.get("smp") or manifest.components.get("smddp") or None


def _read_if_readable(path: Path) -> str:
    """Read a text file; ``""`` if it cannot be read."""
    try:
        return files.read_text(path, errors="replace")
    except OSError:
        return ""


_TERMINATION_LOG_BYTES = 4096
"""Size of a termination message that Kubernetes shows."""


def _write_termination_log(text: str) -> None:
    """Write a failure text where Kubernetes reads it for ``kubectl describe pod``.

    Nothing is written if the file does not exist (outside Kubernetes) or cannot be written.
    """
    with contextlib.suppress(OSError):
        # Without O_CREAT: the kubelet makes the file.
        descriptor = os.open(names.TERMINATION_LOG, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(descriptor, text.encode("utf-8", "replace")[:_TERMINATION_LOG_BYTES])
        finally:
            os.close(descriptor)


def write(
    output: str,
    outcome: Outcome,
    redactor: Redactor,
    mode: str = "",
    manifest: Manifest | None = None,
) -> None:
    """Write output/success, or output/failure and failure.json beside it.

    A failure text of the user's own is kept; its secrets are redacted, and it is shortened to what
    the platform shows. A job that was stopped and ended with status 0 has neither file. In a pod a
    failure is written to Kubernetes' termination log, too. An error of the file system is a line
    in the log.

    Args:
        output: Directory of the outcome, for example ``/opt/ml/output``; ``""``: only the
            termination log is written.
        outcome: How the job ended; its text has no secrets.
        redactor: Hides the secrets of the job.
        mode: The job's mode; ``""`` if it has none yet.
        manifest: The image's; it has the version of smdistributed. None if it was not read yet.
    """
    if outcome.kind != SUCCEEDED:
        _write_termination_log(redactor.text(outcome.text))
    if not output:
        return
    failure, success = Path(output, names.FAILURE_FILE), Path(output, names.SUCCESS_FILE)
    try:
        failure.parent.mkdir(parents=True, exist_ok=True)
        if outcome.kind == SUCCEEDED:
            success.touch()
            return
        with contextlib.suppress(FileNotFoundError):
            success.unlink()
        own = users_own_failure(output, redactor)
        if outcome.kind == STOPPED and outcome.status == 0:
            # The files say "failed" since the stop began. The job has ended well after all.
            # A text of the user's own stays, without the launcher's word that the ranks are saving.
            if own:
                Path(output, names.FAILURE_JSON).unlink()
            else:
                clear(output)
            return
        text = own or shorten(outcome.text)
        document = {
            "schema": names.FAILURE_SCHEMA,
            "kind": outcome.kind,
            "status": outcome.status,
            "mode": mode,
            "host": outcome.host,
            "rank": outcome.rank if outcome.rank >= 0 else None,
            "cause": outcome.account.partition("\n")[0],
            "text": text,
            "retry": outcome.retry,
            "restarts": outcome.restarts,
            "lost_steps": outcome.lost_steps,
            "earlier": [redactor.text(cause) for cause in outcome.earlier],
            "versions": {
                "launcher": __version__,
                "smdistributed": _find_smdistributed_version(manifest),
            },
        }
        # FAILURE_JSON comes first: without it a launcher of another job with this directory would
        # take FAILURE_FILE for a text of the user's program.
        files.write_text(Path(output, names.FAILURE_JSON), json.dumps(document, indent=2) + "\n")
        if _read_if_readable(failure).strip() != text:
            files.write_text(failure, f"{text}\n")
    except OSError as error:
        log(f"cannot write below {failure.parent}: {error}")


class OutcomeWriter:
    """Writes the files of one attempt, on a file system that may never answer."""

    def __init__(
        self,
        output: str,
        redactor: Redactor,
        manifest: Manifest | None,
        log: Callable[[str], None],
    ) -> None:
        """Write nothing yet.

        Args:
            output: Directory of the outcome, for example ``/opt/ml/output``; ``""`` for none.
            redactor: Hides the secrets of the job.
            manifest: The image's; None if it was not read yet.
            log: Prints a line.
        """
        self._output = output
        self._redactor = redactor
        self._manifest = manifest
        self._log = log
        self._lock = threading.Lock()

    def write(self, outcome: Outcome, mode: str, seconds: float) -> None:
        """Write the files in a thread, and wait for it, bounded.

        A thread that is not done in time goes on, and a line in the log says so. Raises the error
        of the thread, which is none of the file system: ``write`` logs these.

        Args:
            outcome: How the job ended.
            mode: The job's mode; ``""`` if it has none yet.
            seconds: Bound of the wait.
        """

        def write_files() -> None:
            # A slow thread of an earlier call must not write after this one.
            with self._lock:
                write(self._output, outcome, self._redactor, mode, self._manifest)

        try:
            writing = Inspection(write_files)
        except RuntimeError:
            # This container allows no further thread.
            write_files()
            return
        if not writing.wait(seconds):
            self._log(f"cannot write below {self._output}: the file system does not answer")
        if writing.errors:
            raise writing.errors[0]
