from __future__ import annotations

from tests.support.sentences import JARGON, all_texts


def test_no_sentence_has_a_word_that_a_newcomer_must_look_up() -> None:
    found = [
        f"{file}:{line}: {text}" for file, line, text in all_texts() if any(word in text.lower() for word in JARGON)
    ]
    assert found == []
