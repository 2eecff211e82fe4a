"""Tables that a program writes into the study's README, each between its own pair of marks."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).parent / "README.md"


def write(name: str, text: str, readme: Path = README) -> None:
    """Replace what stands between the marks of this name.

    Raises:
        ValueError: the file has no such marks.
    """
    begin, end = f"<!-- {name}: written by a program -->", f"<!-- /{name} -->"
    whole = readme.read_text()
    if begin not in whole or end not in whole:
        raise ValueError(f"{readme} has no marks {begin} and {end}")
    before, rest = whole.split(begin, 1)
    after = rest.split(end, 1)[1]
    readme.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
