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
    """Remove the files that an earlier run left: they would speak for this one.

    ``""``: there is no such place.
    """
    for name in (names.FAILURE_FILE, names.FAILURE_JSON, names.SUCCESS_FILE) if output else ():
        with contextlib.suppress(OSError):
            Path(output, name).unlink()


def users_own_failure(output: str, redactor: Redactor) -> str:
    """Return the failure text that the user's program wrote itself, without secrets and shortened.

    ``""`` for none.

    What a launcher wrote, maybe that of another job with the same directory, is
    in FAILURE_JSON too.
    """
    text = _read(Path(output, names.FAILURE_FILE)).strip()
    with contextlib.suppress(ValueError):
        if text and mapping(decode(_read(Path(output, names.FAILURE_JSON)))).get("text") == text:
            return ""
    return shorten(printable(redactor.text(text)))


def _smdistributed(manifest: Manifest | None) -> str | None:
    """Return the version of this project's smdistributed, else that of AWS's smp or smddp.

    None if there is none.
    """
    if manifest is None:
        return None
    found = (
        manifest.protected.get(OPEN_LIBRARY),
        *(manifest.components.get(name) for name in ("smp", "smddp")),
    )
    return next(filter(None, found), None)


def _read(path: Path) -> str:
    try:
        return files.read_text(path, errors="replace")
    except OSError:
        return ""


def _tell_kubernetes(text: str) -> None:
    """Write a failure where Kubernetes reads it for ``kubectl describe pod``, if that file exists.

    It takes 4 KiB.
    """
    with contextlib.suppress(OSError):
        opened = os.open(names.TERMINATION_LOG, os.O_WRONLY | os.O_TRUNC)
        os.write(opened, text.encode("utf-8", "replace")[:4096])
        os.close(opened)


def write(
    output: str,
    outcome: Outcome,
    redactor: Redactor,
    mode: str = "",
    manifest: Manifest | None = None,
) -> None:
    """Write output/success, or output/failure and failure.json beside it. Errors are logged only.

    A failure text of the user's own is kept; its secrets are redacted, and it is
    shortened to what the platform shows.

    Args:
        output: Directory of the job's output; ``""``: nothing is written.
        outcome: How the job ended; its text has no secrets.
        redactor: Hides the secrets of the job.
        mode: The job's mode; ``""`` if it has none yet.
        manifest: The image's; it has the version of smdistributed. None if it was not read yet.
    """
    if outcome.kind != SUCCEEDED:
        _tell_kubernetes(redactor.text(outcome.text))
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
            if not own:  # what was written when the stop began
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
            "versions": {"launcher": __version__, "smdistributed": _smdistributed(manifest)},
        }
        # First the one by which a launcher of another job knows that the other is not its script's.
        files.write_text(Path(output, names.FAILURE_JSON), json.dumps(document, indent=2) + "\n")
        if _read(failure).strip() != text:
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
        """Nothing is written yet; the arguments are those of ``write``. log: prints a line."""
        self._output = output
        self._redactor = redactor
        self._manifest = manifest
        self._log = log
        self._lock = threading.Lock()

    def write(self, outcome: Outcome, mode: str, seconds: float) -> None:
        """Write the files, and wait no longer for it than so many seconds."""

        def write_files() -> None:
            with self._lock:  # one that was slow must not come after a later one
                write(self._output, outcome, self._redactor, mode, self._manifest)

        try:
            look = Inspection(write_files)
        except RuntimeError:  # no further thread may be started
            write_files()
            return
        if not look.wait(seconds):
            self._log(f"cannot write below {self._output}: the file system does not answer")
        if look.errors:
            raise look.errors[0]
