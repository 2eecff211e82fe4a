"""What is hidden in texts of other people's code, and what is not."""

from __future__ import annotations

import pytest

from autotune_loader.values.secrets import cause_without_secrets, without_secrets

ENVIRON = {
    "HF_TOKEN": "hf_abcdefgh",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    "DATABASE_URL": "postgresql://me:swordfish@host/db",
    "PWD": "/home/someone",
    "SHORT_TOKEN": "1",
    "GIT_AUTHOR_NAME": "worker",
    "MAX_TOKENS": "100000",
    "API_TOKENS": "hf_abcdef,hf_ghijkl",
    "TOKENIZERS_PARALLELISM": "sometimes",
    "GITHUB_AUTH": "ghp_zyxwvu",
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("keys wJalrXUtnFEMI and hf_abcdefgh", "keys *** and ***"),
        ("password swordfish is wrong", "password *** is wrong"),
        ("mysql://user:pa/ss:w@rd@host/db?ssl=1", "mysql://***@host/db?ssl=1"),
        ("sqlite:///x?password=abc&mode=ro", "sqlite:///x?password=***&mode=ro"),
        ("401 for ghp_zyxwvu and hf_abcdef,hf_ghijkl", "401 for *** and ***"),
        ("https://example.org/a@b and me@example.org", None),
        ("a worker of 100000 tokens in /home/someone is sometimes slow, 1 time", None),
    ],
)
def test_secrets_are_hidden_and_all_else_stays(text: str, shown: str | None) -> None:
    assert without_secrets(text, ENVIRON) == (shown or text)


def test_a_cause_is_told_only_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "planted-secret")
    harmless, telling, wrapping = ValueError("no"), ValueError("planted-secret"), ValueError("wrapped")
    wrapping.__cause__ = telling
    assert cause_without_secrets(harmless) is harmless
    assert cause_without_secrets(telling) is None
    assert cause_without_secrets(wrapping) is None
