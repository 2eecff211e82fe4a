"""Passwords and tokens kept out of what is shown, logged or written: texts of other people's code may hold any of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

HIDDEN = "***"
# Names of environment variables whose values are nobody's business. PWD is a folder, GIT_AUTHOR_NAME a name, a tokenizer none.
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH(?!ORS?(?![A-Z]))",
    re.IGNORECASE,
)
# MAX_TOKENS=100000 is a number of tokens, API_TOKENS=hf_abcdef,hf_ghijkl are some.
_COUNT = re.compile(r"TOKENS.*=\d+", re.IGNORECASE)
# A shorter value would be found in innocent words.
SHORTEST_SECRET = 6
# https://user:password@host, and ?token=...
_USER_INFO = re.compile(r"(?<=://)[^\s'\"]*:[^\s'\"]*@")
_PARAMETER = re.compile(r"\b(\w*(?:password|passwd|token|secret|api_?key|access_?key))=[^\s&'\",)]+", re.IGNORECASE)


def without_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """A text without user and password of URLs, `password=` and the like, and the values of variables such as `HF_TOKEN`."""
    for secret in sorted(_secrets_in(environ), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _PARAMETER.sub(rf"\1={HIDDEN}", _USER_INFO.sub(f"{HIDDEN}@", text))


def cause_without_secrets(error: BaseException) -> BaseException | None:
    """An exception, to be told as the cause of another; None where it or its own causes would show a secret."""
    shown: BaseException | None = error
    while shown is not None:
        if without_secrets(str(shown)) != str(shown):
            return None
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    return error


def _secrets_in(environ: Mapping[str, str]) -> set[str]:
    named = {
        value for name, value in environ.items() if _SECRET_NAME.search(name) and not _COUNT.search(f"{name}={value}")
    }
    in_urls = {found[1] for value in environ.values() for found in re.finditer(r"://[^\s:@/]*:([^\s@]+)@", value)}
    return {secret for secret in named | in_urls if len(secret) >= SHORTEST_SECRET}
