"""What is hidden in texts of other people's code, and what is not."""

from __future__ import annotations

import pytest

from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Failure
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
        ("401 for hf_abcdefgh", "401 for ***"),
        ("keys wJalrXUtnFEMI and hf_abcdefgh", "keys *** and ***"),
        ("password swordfish is wrong", "password *** is wrong"),
        ("mysql://user:pa/ss:w@rd@host/db?ssl=1", "mysql://***@host/db?ssl=1"),
        ("sqlite:///x?password=abc&mode=ro", "sqlite:///x?password=***&mode=ro"),
        ("https://example.org/a@b and me@example.org", "https://example.org/a@b and me@example.org"),
        ("1 sample in /home/someone", "1 sample in /home/someone"),
        ("a worker of 100000 tokens is sometimes slow", "a worker of 100000 tokens is sometimes slow"),
        ("401 for ghp_zyxwvu and hf_abcdef,hf_ghijkl", "401 for *** and ***"),
    ],
)
def test_secrets_are_hidden_and_all_else_stays(text: str, shown: str) -> None:
    assert without_secrets(text, ENVIRON) == shown


def test_failures_and_errors_hide_what_user_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "planted-secret")

    failure = Failure(kind="crashed", phase="step", message="planted-secret", traceback="File x\n planted-secret")
    error = WorkloadError("planted-secret", "Traceback: planted-secret")

    assert "planted-secret" not in repr(failure)
    assert "planted-secret" not in f"{error} {error.user_traceback}"


def test_a_cause_is_told_only_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "planted-secret")
    harmless, telling, wrapping = ValueError("no"), ValueError("planted-secret"), ValueError("wrapped")
    wrapping.__cause__ = telling

    assert cause_without_secrets(harmless) is harmless
    assert cause_without_secrets(telling) is None
    assert cause_without_secrets(wrapping) is None
