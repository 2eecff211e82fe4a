"""The README as package indexes show it: relative links lead to this version's files in the repository."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCE = re.search(r'\nSource = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
VERSION = re.search(r'\n__version__ = "(.+)"', (ROOT / "autotune_loader" / "version.py").read_text(encoding="utf-8"))[1]


def absolute(link: re.Match) -> str:
    folder = "raw" if link[1].endswith((".svg", ".png")) else "blob"
    return f"]({SOURCE}/{folder}/v{VERSION}/{link[1]})"


readme = re.sub(r"\]\((?!https?:|#)([^)]+)\)", absolute, (ROOT / "README.md").read_text(encoding="utf-8"))
setup(long_description=readme, long_description_content_type="text/markdown")
