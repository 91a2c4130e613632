"""Keep secrets out of plans, logs and failure texts. Pure.

There are two rules. By name: a variable, a hyperparameter, an option or a key inside a JSON value
is secret if its name has a word such as PASSWORD. By form: ``user:password@`` inside a URL, and
tokens of a well-known form, such as ``hf_...``. A ``Redactor`` also knows the values that are
secret by name, and hides these values everywhere: in SM_HPS, in a command line, in a traceback.
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
"""Minimum length of a secret that is hidden everywhere. A shorter one is hidden only behind its
name, because other words may contain the same letters.
"""

_SECRET_WORDS = frozenset(
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
"""Words that make a name secret at any place in the name: ``token_of_hub``."""

_SECRET_LAST_WORDS = frozenset(("auth", "key", "keys", "pw"))
"""Words that make a name secret only at its end: ``api_key``, but not ``num_key_value_heads``."""

_PASS = "pass"  # "db_pass" is a secret, "forward_pass" is not
_BEFORE_PASS = frozenset(
    (
        "backward", "data", "final", "first", "forward", "full", "last", "max", "min", "multi", "n",
        "num", "one", "per", "render", "second", "single", "test", "third", "two",
    )
)  # fmt: skip
"""Words before ``pass`` in the names of turns over data. Every other ``pass`` is a password."""

_AMBIGUOUS_NAMES = frozenset(("key", "keys"))
"""Whole names that often mean a key of a mapping, a column or a metric. Their values are secret
only if they look random.
"""

_LOOKS_RANDOM = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])\S{16,}")
"""The form of most secrets: 16 characters or more without blanks, with a letter and a digit."""

_BEFORE_IDENTIFIER = frozenset(("key",))
"""Words before a last word ``id`` that make a name secret: AWS_ACCESS_KEY_ID."""

_WORKING_DIRECTORIES = frozenset(("PWD", "OLDPWD"))
"""The shell's names of working directories. In a connection string ``Pwd`` is a password."""

_DECIMAL_NUMBER = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?:\.\d*)?[eE][+-]?\d+)")
"""A number with a decimal point or an exponent: ``0.3``, ``1e-4``; not ``12``."""

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
    """Return whether a name is that of a secret, as ``WANDB_API_KEY`` and ``dbPassword``.

    ``max_tokens`` is not.
    """
    if name in _WORKING_DIRECTORIES:
        return False
    words = _words_of(name)
    if not words:
        return False
    before = ""
    if len(words) > 1:
        before = words[-2]
    if words[-1] == "id" and before in _BEFORE_IDENTIFIER:
        return True
    if words[-1] == _PASS:
        return before not in _BEFORE_PASS
    return words[-1] in _SECRET_LAST_WORDS or not _SECRET_WORDS.isdisjoint(words)


def _words_of(name: str) -> list[str]:
    """Return the words of a name in lower case: ``dbPassword`` has ``db`` and ``password``."""
    return [word.lower() for word in _SPLIT.split(name) if word]


def is_secret(name: str, value: object) -> bool:
    """Return whether a value is secret: by its name, unless the value shows another meaning.

    The value of ``key`` alone is secret only if it looks random. A number with a decimal point is a
    measurement, unless the name ends with a word such as ``password``. ``PWD`` is a path, except in
    a connection string.

    >>> is_secret("key", "val_loss"), is_secret("key", "8f14e45fceea167a5a36dedd4bea2543")
    (False, True)
    >>> is_secret("api_key", "x")
    True
    >>> is_secret("password_embedding", "0.3"), is_secret("PWD", "/work"), is_secret("PWD", "x")
    (False, False, True)
    """
    if name.upper() in _WORKING_DIRECTORIES:
        # A path begins with "/". Any other text is a password of a connection string.
        return isinstance(value, str) and bool(value) and not value.startswith("/")
    last = _words_of(name)[-1:]
    ends_with_secret_word = _SECRET_WORDS.union(_SECRET_LAST_WORDS, (_PASS,)).intersection(last)
    # "password_embedding" is 0.3: a measurement of something that is about passwords.
    if not ends_with_secret_word and _DECIMAL_NUMBER.fullmatch(str(value)):
        return False
    if name.lower() in _AMBIGUOUS_NAMES and isinstance(value, str):
        return bool(_LOOKS_RANDOM.fullmatch(value))
    return is_secret_name(name)


def redact_urls(text: str) -> str:
    """Hide the login in ``scheme://user:password@host``."""
    if "://" not in text:
        return text
    return _URL.sub(rf"\g<1>{MASK}@", text)


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
"""Webhooks: every program with such an address may write to the channel."""

_CONNECTION = re.compile(
    rf"(\b(?:AccountKey|SharedAccessKey)\s*=\s*|;\s*(?:Password|Pwd)\s*=\s*(?!/)"
    rf"|\b(?:Password|Pwd)\s*=\s*(?!/)(?=(?:'[^']*'|\"[^\"]*\"|[^\s;'\"]+);))({_ANY_VALUE})",
    re.IGNORECASE,
)
"""Secrets in connection strings (Azure, ODBC, ADO.NET): pairs separated by ``;``."""

_MARKED_TOKEN = re.compile(
    r"(\bAuthorization['\"]?\s*[:=]\s*['\"]?(?:Basic|Bearer|token)\s+|\bBearer\s+(?=\S*\d)"
    r"|\bX-(?:Amz|Goog)-(?:Signature|Security-Token|Credential)=|[?&](?:Signature|AWSAccessKeyId|sig|token|access_token)="
    r"|\b(?:aws_?)?(?:secret_?access_?key|session_?token)['\"]?\s*[:=]\s*['\"]?(?=[^\s'\"]{16}))"
    r"[^\s&'\"<>,;]{8,}",
    re.IGNORECASE,
)


def redact_tokens(text: str) -> str:
    """Hide tokens of well-known forms, and values that are marked as tokens.

    >>> redact_tokens("403 for s3.example/k?X-Amz-Signature=0a1b2c3d4e5f&X-Amz-Date=20261125")
    '403 for s3.example/k?X-Amz-Signature=******&X-Amz-Date=20261125'
    """
    for marked in (_WEBHOOK, _CONNECTION, _MARKED_TOKEN):
        text = marked.sub(rf"\g<1>{MASK}", text)
    return _TOKENS.sub(MASK, text)


_OPTION_IN_TEXT = re.compile(
    r"(?<![\w-])(--?([A-Za-z][\w.-]{0,63})(?:=|["
    r" \t]+|['\"],\s*['\"])(?!-))('[^']*'|\"[^\"]*\"|[^\s'\",\])]+)"
)


def redact_options(text: str) -> str:
    """Hide the values of options that are secret by their names, in a command line in an error.

    A value that is its option's name in capitals is argparse's own placeholder.

    >>> redact_options("Command ['mysql', '--pass', 'hunter2'] failed; usage: [--token TOKEN]")
    "Command ['mysql', '--pass', '******'] failed; usage: [--token TOKEN]"
    """
    if "-" not in text:
        return text
    return _OPTION_IN_TEXT.sub(_without_value, text)


def _without_value(option: re.Match[str]) -> str:
    """Return an option of a text with MASK for a secret value; otherwise unchanged.

    Args:
        option: A match of ``_OPTION_IN_TEXT``: 1 is all before the value, 2 the name, 3 the value.
    """
    name, value = option[2], option[3].strip("'\"")
    # For example ``--token TOKEN`` in a usage text.
    is_usage = value == value.upper() and value.replace("_", "-") == name.upper().replace("_", "-")
    if is_usage or not is_secret(name, value):
        return option[0]
    return f"{option[1]}{MASK}"


class Redactor:
    """Hides the secrets of one job."""

    def __init__(self, *sources: Mapping[str, Json] | Mapping[str, str]) -> None:
        """Collect the secret values in mappings of names to values.

        Args:
            sources: For example variables, hyperparameters, channels.
        """
        secrets: set[str] = set()
        for source in sources:
            _collect(source, secrets)
        # All secrets are hidden behind their names, and long ones in any text.
        forms: set[str] = set()
        long_forms: set[str] = set()
        for secret in secrets:
            if secret:
                forms.update(_forms(secret))
            if len(secret) >= VALUE_LENGTH:
                long_forms.update(_forms(secret))
        self._values: re.Pattern[str] | None = None
        if long_forms:
            self._values = re.compile(_any_of(long_forms))
        pattern = _ANY_VALUE
        if forms:
            # A known value may have blanks and commas, at which any other value ends.
            pattern = rf"['\"]?(?:{_any_of(forms)})|{_ANY_VALUE}"
        self._value_of_pair = re.compile(pattern, re.DOTALL)

    def text(self, text: str) -> str:
        """Hide known secrets, credentials in URLs and tokens of well-known forms in a text."""
        if self._values is not None:
            text = self._values.sub(MASK, text)
        return redact_options(redact_tokens(redact_urls(text)))

    def value(self, name: str, value: str) -> str:
        """Redact a value: the whole value if its name is that of a secret, else its secret parts.

        In a JSON text keys of an object and options of a list are names, too. A JSON text without
        secrets keeps its form; one with secrets is written anew, without blanks, in sorted order.
        """
        if value and is_secret(name, value):
            return MASK
        if value[:1] in ("{", "["):
            try:
                decoded = decode(value)
            except ValueError:
                return self.text(value)
            redacted = self.json(decoded)
            if redacted == decoded:
                return value
            return compact(redacted)
        return self.text(value)

    def json(self, value: Json) -> Json:
        """Redact a decoded JSON value. True, false, null and empty values are never secrets."""
        if isinstance(value, dict):
            redacted_entries: dict[str, Json] = {}
            for key, entry in value.items():
                may_be_secret = bool(entry) and entry is not True
                if may_be_secret and is_secret(key, entry):
                    redacted_entries[key] = MASK
                else:
                    redacted_entries[key] = self.json(entry)
            return redacted_entries
        if isinstance(value, list):
            # A list of texts may be a command line, where a value follows its option.
            texts = [entry for entry in value if isinstance(entry, str)]
            if len(texts) == len(value):
                return [*self.words(texts)]
            return [self.json(entry) for entry in value]
        if not isinstance(value, str):
            return value
        if value.startswith("-"):
            # The value may be options of a command line.
            try:
                words = tuple(shlex.split(value))
            except ValueError:
                words = ()
            redacted_words = self.words(words)
            if redacted_words != words:
                return " ".join(map(shlex.quote, redacted_words))
        return self._pairs(value)

    def _pairs(self, text: str) -> str:
        """Redact a text with pairs, such as ``a=1,password=x`` or ``{'password': 'x'}``."""
        pieces: list[str] = []
        done = 0  # characters of the text that are in the pieces
        for key in _KEY.finditer(text):
            name = key.group(1)
            # A key inside a value that is hidden already is a part of that value.
            if key.start() < done or not _may_be_secret(name):
                continue
            value = self._value_of_pair.match(text, key.end())
            if value and is_secret(name, value.group().strip("'\"")):
                pieces += [text[done : key.end()], MASK]
                done = value.end()
        return self.text("".join([*pieces, text[done:]]))

    def variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Redact a mapping of variables."""
        return {name: self.value(name, value) for name, value in variables.items()}

    def words(self, argv: Iterable[str]) -> tuple[str, ...]:
        """Redact a command line.

        Hides values in ``--token VALUE``, ``--token=VALUE`` and ``TOKEN=VALUE``, and known secrets
        anywhere.
        """
        redacted: list[str] = []
        option_of_value = ""  # the secret option before this word
        for word in argv:
            option = re.fullmatch(_OPTION, word, re.DOTALL)
            # A word with one hyphen may be the secret itself; one with two is the next option.
            if option_of_value and not (option and word.startswith("--")):
                if is_secret(option_of_value, word):
                    redacted.append(MASK)
                else:
                    redacted.append(self._pairs(word))
                option_of_value = ""
                continue
            option_of_value = ""
            assignment = re.fullmatch(_ASSIGNMENT, word, re.DOTALL)
            if option:
                # The value includes its "="; None for an option whose value is the next word.
                name, value = option.group(1), option.group(2)
                if value is None and is_secret_name(name):
                    option_of_value = name
                if value and is_secret(name, value[1:]):
                    redacted.append(f"{word.partition('=')[0]}={MASK}")
                else:
                    redacted.append(self.text(word))
            elif assignment and is_secret(assignment.group(1), word.partition("=")[2]):
                redacted.append(f"{assignment.group(1)}={MASK}")
            else:
                redacted.append(self._pairs(word))
        return tuple(redacted)


def _may_be_secret(name: str) -> bool:
    """Return whether ``is_secret`` can be true for a name, with a suitable value."""
    return name in _WORKING_DIRECTORIES or is_secret_name(name)


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern of these texts, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


def _forms(value: str) -> tuple[str, ...]:
    """Return a value in its three forms: plain, inside JSON, and inside Python's ``repr``."""
    return value, json.dumps(value)[1:-1], repr(value)[1:-1]


def _collect(value: object, secrets: set[str], name: str = "") -> None:
    """Collect the secret values in a decoded JSON value, or in the JSON text of a variable.

    Args:
        value: The value; one of another type, true and false are ignored.
        secrets: Gets the secret values as texts, numbers too.
        name: The key of the value; that of the enclosing object for an entry of a list; ``""`` at
            the top.
    """
    if isinstance(value, Mapping):
        for key, entry in value.items():
            # Every value below a secret name is secret.
            nearest_name = f"{key}"
            if is_secret_name(name) and not is_secret_name(nearest_name):
                nearest_name = name
            _collect(entry, secrets, nearest_name)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _collect(entry, secrets, name)
    elif isinstance(value, str):
        if is_secret(name, value):
            secrets.add(value)
        elif value[:1] in ("{", "["):
            try:
                _collect(decode(value), secrets, name)
            except (ValueError, RecursionError):
                # Not JSON after all: the text holds no secret that can be told apart.
                return
        else:
            for pair in _PAIR.finditer(value):
                secret = pair[2].strip("'\"")
                if is_secret(pair[1], secret):
                    secrets.add(secret)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and is_secret(name, value):
        secrets.add(str(value))
