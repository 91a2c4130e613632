"""Secrets kept out of plans, logs and failure texts. Pure.

Two rules, because a secret shows itself in two ways. By name: a variable, a hyperparameter, an
option or a key inside a JSON value whose name has a word such as PASSWORD. By form:
``user:password@`` inside a URL, and tokens of a well-known form. A ``Redactor`` also knows the
values found by name, and hides them wherever they come up again: in SM_HPS, in a command line, in a
traceback.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Iterable, Mapping

from trainworks_launcher.contract.json_values import Json, compact, decode

MASK = "******"
"""The text that is shown in place of a secret."""

VALUE_LENGTH = 8
"""Characters from which a value is recognised outside its own place: a shorter
one is part of too many other words.
"""

_WORDS = frozenset(
    (
        "apikey",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "pat",
        "pwd",
        "secret",
        "secrets",
        "token",
    )
)
# "api_key" is a secret, "num_key_value_heads" is not.
_LAST_WORDS = frozenset(("auth", "key", "keys", "pw"))
_PASS = "pass"  # "db_pass" is a secret, "forward_pass" is not
_BEFORE_PASS = frozenset(
    (
        *(
            "backward",
            "data",
            "final",
            "first",
            "forward",
            "full",
            "last",
            "max",
            "min",
            "multi",
            "n",
            "num",
        ),
        *("one", "per", "render", "second", "single", "test", "third", "two"),
    )
)
"""Words before ``pass`` that make it a turn over something: the only ones that
are not somebody's or something's.
"""
_LAST_WORDS_ALONE = frozenset(("key", "keys"))  # of a mapping, a column, a metric...
_RANDOM = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])\S{16,}")  # what secrets look like
_BEFORE_IDENTIFIER = frozenset(("key",))  # AWS_ACCESS_KEY_ID
# The shell's working directory; in a connection string, a password.
_NOT_SECRET = frozenset(("PWD", "OLDPWD"))
_FRACTION = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?:\.\d*)?[eE][+-]?\d+)")
_SPLIT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)([^\s/@\"'\\]+)@")
_OPTION = r"--?([A-Za-z][A-Za-z0-9_.-]*)(=.*)?"
_ASSIGNMENT = r"([A-Za-z_][A-Za-z0-9_.-]*)=.*"
# Bounded: values may be long.
_KEY = re.compile(r"(?<![A-Za-z_])([A-Za-z_][A-Za-z0-9_.-]{0,127})['\"]?\s*[:=]\s*")
_NEXT_PAIR = r"""(?=\s*(?:[A-Za-z][\w .-]{0,63}=|['"}\],]|\Z)|\s)"""
_WITHOUT_QUOTES = (
    rf"""(?:[^\s,'"}}\];&]|[;&](?!{_NEXT_PAIR}))+"""  # Pwd=x;Encrypt=yes, a=x&b=y: ends at ; and &
)
_ANY_VALUE = rf"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[{{\[].*|{_WITHOUT_QUOTES}"""
_PAIR = re.compile(rf"{_KEY.pattern}({_ANY_VALUE})", re.DOTALL)


def is_secret_name(name: str) -> bool:
    """Return whether a name says that its value is secret: ``WANDB_API_KEY``, ``dbPassword``.

    Not ``max_tokens``.
    """
    if name in _NOT_SECRET:
        return False
    words = [word.lower() for word in _SPLIT.split(name) if word]
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "id" and before in _BEFORE_IDENTIFIER:
        return True
    if words[-1] == _PASS:
        return before not in _BEFORE_PASS
    return words[-1] in _LAST_WORDS or not _WORDS.isdisjoint(words)


def is_secret(name: str, value: object) -> bool:
    """Return whether the value of a name is secret: as its name says, but
    ``key`` alone may be any key.

    A fraction is a measurement where the name ends with another word, and ``PWD`` is a path except
    in a connection string.

    >>> is_secret("key", "val_loss"), is_secret("key", "8f14e45fceea167a5a36dedd4bea2543")
    (False, True)
    >>> is_secret("api_key", "x")
    True
    >>> is_secret("password_embedding", "0.3"), is_secret("PWD", "/work"), is_secret("PWD", "x")
    (False, False, True)
    """
    if name.upper() in _NOT_SECRET:
        return isinstance(value, str) and bool(value) and not value.startswith("/")
    last = [word.lower() for word in _SPLIT.split(name) if word][-1:]
    if not _WORDS.union(_LAST_WORDS).intersection(last) and _FRACTION.fullmatch(str(value)):
        return False
    if name.lower() in _LAST_WORDS_ALONE and isinstance(value, str):
        return bool(_RANDOM.fullmatch(value))
    return is_secret_name(name)


def redact_urls(text: str) -> str:
    """``scheme://user:password@host`` without what stands before the ``@``."""
    return _URL.sub(rf"\g<1>{MASK}@", text) if "://" in text else text


_TOKENS = re.compile(
    r"""
      \bhf_[A-Za-z0-9]{20,}  # Hugging Face
    | \bgh[opsur]_[A-Za-z0-9]{20,} | \bgithub_pat_\w{20,} | \bglpat-[\w-]{16,}  # GitHub, GitLab
    # AWS, also with the secret
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}(?:\W{1,3}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+]))?
    # OpenAI and others, NVIDIA, Google
    | \bsk-(?=[\w-]*\d)[\w-]{20,} | \bnvapi-[\w-]{20,} | \bAIza[\w-]{35}
    | \bxox[abeoprs]-[\w-]{10,} | \bpypi-AgE[\w-]+  # Slack, PyPI
    | \beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?  # a JSON web token
    | \bSharedAccessSignature=[^;\s'"]+  # Azure
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.DOTALL | re.VERBOSE,
)
_WEBHOOK = re.compile(
    r"\b(hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/"
    r"|(?:discord|discordapp)\.com/api/(?:v\d+/)?webhooks/|[\w.-]*webhook\.office\.com/webhookb2/)[^\s'\"<>,;)]+"
)
"""Addresses that are a secret themselves: who knows one may write."""

_CONNECTION = re.compile(
    rf"(\b(?:AccountKey|SharedAccessKey)\s*=\s*|;\s*(?:Password|Pwd)\s*=\s*(?!/)"
    rf"|\b(?:Password|Pwd)\s*=\s*(?!/)(?=(?:'[^']*'|\"[^\"]*\"|[^\s;'\"]+);))({_ANY_VALUE})",
    re.IGNORECASE,
)
"""Secrets in connection strings (Azure, ODBC, ADO.NET): pairs that ``;`` divides."""

_MARKED = re.compile(
    r"(\bAuthorization['\"]?\s*[:=]\s*['\"]?(?:Basic|Bearer|token)\s+|\bBearer\s+(?=\S*\d)"
    r"|\bX-(?:Amz|Goog)-(?:Signature|Security-Token|Credential)=|[?&](?:Signature|AWSAccessKeyId|sig|token|access_token)="
    r"|\b(?:aws_?)?(?:secret_?access_?key|session_?token)['\"]?\s*[:=]\s*['\"]?(?=[^\s'\"]{16}))"
    r"[^\s&'\"<>,;]{8,}",
    re.IGNORECASE,
)


def redact_tokens(text: str) -> str:
    """Return a text without tokens of well-known forms, and without what is marked as one.

    >>> redact_tokens("403 for s3.example/k?X-Amz-Signature=0a1b2c3d4e5f&X-Amz-Date=20261125")
    '403 for s3.example/k?X-Amz-Signature=******&X-Amz-Date=20261125'
    """
    for marked in (_WEBHOOK, _CONNECTION, _MARKED):
        text = marked.sub(rf"\g<1>{MASK}", text)
    return _TOKENS.sub(MASK, text)


_OPTION_IN_TEXT = re.compile(
    r"(?<![\w-])(--?([A-Za-z][\w.-]{0,63})(?:=|["
    r" \t]+|['\"],\s*['\"])(?!-))('[^']*'|\"[^\"]*\"|[^\s'\",\])]+)"
)


def redact_options(text: str) -> str:
    """Return a text without the values of options that are secrets by their names, as a command
    line in an error has.

    A value that is its option's name in capitals is argparse's own stand-in for one.

    >>> redact_options("Command ['mysql', '--pass', 'hunter2'] failed; usage: [--token TOKEN]")
    "Command ['mysql', '--pass', '******'] failed; usage: [--token TOKEN]"
    """
    return _OPTION_IN_TEXT.sub(_without_value, text) if "-" in text else text


def _without_value(option: re.Match[str]) -> str:
    name, value = option[2], option[3].strip("'\"")
    is_usage = value == value.upper() and value.replace("_", "-") == name.upper().replace("_", "-")
    return option[0] if is_usage or not is_secret(name, value) else f"{option[1]}{MASK}"


class Redactor:
    """Hides what is secret in one job."""

    def __init__(self, *sources: Mapping[str, Json] | Mapping[str, str]) -> None:
        """Learn the secret values from mappings of name to value: variables,
        hyperparameters, channels.
        """
        found: set[str] = set()
        for source in sources:
            _collect(source, found)
        forms = {form for value in found if len(value) >= VALUE_LENGTH for form in _forms(value)}
        values = sorted(forms, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, values))) if values else None
        known = sorted(
            {form for value in found if value for form in _forms(value)}, key=len, reverse=True
        )
        quoted = "|".join(map(re.escape, known))
        self._value_of_pair = re.compile(
            rf"['\"]?(?:{quoted})|{_ANY_VALUE}" if known else _ANY_VALUE, re.DOTALL
        )

    def text(self, text: str) -> str:
        """Return a text without known secret values, credentials in URLs and
        tokens of well-known forms.
        """
        if self._values is not None:
            text = self._values.sub(MASK, text)
        return redact_options(redact_tokens(redact_urls(text)))

    def value(self, name: str, value: str) -> str:
        """Mask the value of a name: all of it if the name is that of a secret,
        else the secrets in it.

        The keys of an object and the options of a list count as names too.
        """
        if value and is_secret(name, value):
            return MASK
        if value[:1] in ("{", "["):
            try:
                decoded = decode(value)
            except ValueError:
                return self.text(value)
            redacted = self.json(decoded)
            return value if redacted == decoded else compact(redacted)
        return self.text(value)

    def json(self, value: Json) -> Json:
        """Return a decoded JSON value, redacted.

        True, false, null and what is empty say nothing and stay.
        """
        if isinstance(value, dict):
            masked_entries: dict[str, Json] = {}
            for key, entry in value.items():
                says_something = bool(entry) and entry is not True
                if says_something and is_secret(key, entry):
                    masked_entries[key] = MASK
                else:
                    masked_entries[key] = self.json(entry)
            return masked_entries
        if isinstance(value, list):
            # A list of texts may be a command line, where an option's value follows it.
            texts = [entry for entry in value if isinstance(entry, str)]
            if len(texts) == len(value):
                return [*self.words(texts)]
            return [self.json(entry) for entry in value]
        if not isinstance(value, str):
            return value
        if value.startswith("-"):  # it may be a command line's options
            try:
                words = tuple(shlex.split(value))
            except ValueError:
                words = ()
            redacted = self.words(words)
            if redacted != words:
                return " ".join(map(shlex.quote, redacted))
        return self._pairs(value)

    def _pairs(self, text: str) -> str:
        """Return a text in which an object may be written, as
        ``a=1,password=x`` or ``{'password': 'x'}``.
        """
        shown: list[str] = []
        done = 0
        for key in _KEY.finditer(text):
            value = (
                self._value_of_pair.match(text, key.end()) if _may_be_secret(key.group(1)) else None
            )
            if (
                value
                and key.start() >= done
                and is_secret(key.group(1), value.group().strip("'\""))
            ):
                shown += [text[done : key.end()], MASK]
                done = value.end()
        return self.text("".join([*shown, text[done:]]))

    def variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return a mapping of variables, redacted."""
        return {name: self.value(name, value) for name, value in variables.items()}

    def words(self, argv: Iterable[str]) -> tuple[str, ...]:
        """Mask a command line: ``--token VALUE``, ``--token=VALUE``,
        ``TOKEN=VALUE`` and known values anywhere.
        """
        redacted: list[str] = []
        hidden = ""
        for word in argv:
            option = re.fullmatch(_OPTION, word, re.DOTALL)
            if hidden and not (option and word.startswith("--")):
                redacted.append(MASK if is_secret(hidden, word) else self._pairs(word))
                hidden = ""
                continue
            hidden = ""
            if option:
                secret = is_secret(option.group(1), (option.group(2) or "")[1:])
                hidden = (
                    option.group(1)
                    if is_secret_name(option.group(1)) and option.group(2) is None
                    else ""
                )
                redacted.append(
                    f"{word.partition('=')[0]}={MASK}"
                    if secret and option.group(2)
                    else self.text(word)
                )
                continue
            assignment = re.fullmatch(_ASSIGNMENT, word, re.DOTALL)
            if assignment and is_secret(assignment.group(1), word.partition("=")[2]):
                redacted.append(f"{assignment.group(1)}={MASK}")
            else:
                redacted.append(self._pairs(word))
        return tuple(redacted)


def _may_be_secret(name: str) -> bool:
    return name in _NOT_SECRET or is_secret_name(name)


def _forms(value: str) -> tuple[str, ...]:
    """Return a value as it is, inside a JSON text, and inside Python's own text of a list."""
    return value, json.dumps(value)[1:-1], repr(value)[1:-1]


def _collect(value: object, found: set[str], name: str = "") -> None:
    """Add the secret values in a decoded JSON value, or in the JSON text of a
    variable, to ``found``.
    """
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _collect(
                entry,
                found,
                f"{key}" if is_secret_name(f"{key}") or not is_secret_name(name) else name,
            )
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _collect(entry, found, name)
    elif isinstance(value, str):
        if is_secret(name, value):
            found.add(value)
        elif value[:1] in ("{", "["):
            try:
                _collect(decode(value), found, name)
            except (ValueError, RecursionError):
                return
        else:
            found.update(
                pair[2].strip("'\"")
                for pair in _PAIR.finditer(value)
                if is_secret(pair[1], pair[2].strip("'\""))
            )
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and is_secret(name, value):
        found.add(str(value))
