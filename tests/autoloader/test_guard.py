"""Whether importing a script would run its training again."""

from __future__ import annotations

import multiprocessing.process
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from autotune_loader.autoloader.guard import unguarded_line

Ask = Callable[..., int | None]
MAIN = 'if __name__ == "__main__":\n'


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs a text as a script; what `unguarded_line()` says where it calls `ask()`."""

    def run(
        text: str, name: str = "__main__", file: str | None = "script.py", **attributes: Any
    ) -> int | None:
        (tmp_path / "script.py").write_text(text)
        main, answers = ModuleType(name), list[int | None]()
        vars(main).update({"ask": lambda: answers.append(unguarded_line()), **attributes})
        if file is not None:
            main.__file__ = str(tmp_path / file)
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(compile(text, str(tmp_path / "script.py"), "exec"), vars(main))
        (answer,) = answers
        return answer

    return run


SCRIPTS = [
    (MAIN + "    ask()\n", None),
    ("if '__main__' == __name__: ask()", None),
    ("def main():\n    ask()\n\n" + MAIN + "    main()\n", None),
    ('import os\nif os.name and __name__ == "__main__":\n    for _ in range(1): ask()\n', None),
    ('try:\n    if __name__ == "__main__":\n        ask()\nfinally:\n    pass\n', None),
    ('match 1:\n    case _:\n        if __name__ == "__main__":\n            ask()\n', None),
    (MAIN + '    exec("\\n" * 50 + "ask()")\n', None),  # its line is not one of the script
    ("def main():\n    pass\n\n" + MAIN + "    (\n        ask(\n        )\n    )\n", None),
    ("import os\n\nask()\n", 3),
    ("def main():\n    ask()\n\n\nmain()\n", 5),
    (MAIN + "    pass\nask()\n", 3),
    ('if __name__ != "__main__":\n    pass\nelse:\n    ask()\n', 4),  # none that is known
    ('if __name__ == "__main__" or True:\n    ask()\n', 2),
    ('if __name__ in ("__main__", "__mp_main__"):\n    ask()\n', 2),
    ('if __name__ == "train":\n    pass\nelif True:\n    ask()\n', 4),
    # It is not asked again, but more may be.
    ('def main():\n    if __name__ == "__main__":\n        ask()\n\nmain()\n', 5),
]  # fmt: skip


@pytest.mark.parametrize(("script", "line"), SCRIPTS)
def test_a_line_outside_the_guard_is_named(script: str, line: int | None, ask: Ask) -> None:
    assert ask(script) == line


def spec(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name)


@pytest.mark.parametrize(
    ("attributes", "answer"),
    [
        ({"file": None}, None),  # python -c, a notebook
        ({"__spec__": spec("package.__main__")}, None),  # python -m package
        ({"__spec__": spec("__main__"), "file": "app.zip/__main__.py"}, None),  # python app.zip
        ({"__spec__": spec("package.train")}, 1),  # python -m package.train is imported by name
        ({"name": "__mp_main__"}, None),  # in a spawned process, which has imported the script
        ({"file": "gone.py"}, 0),
        ({"file": None, "__spec__": spec("package.train")}, 0),
    ],
)
def test_what_multiprocessing_does_not_import_runs_once(
    attributes: dict[str, Any], answer: int | None, ask: Ask
) -> None:
    assert ask("ask()\n", **attributes) == answer


@pytest.mark.parametrize("text", [b"if", bytes(3)])
def test_a_script_that_cannot_be_parsed_is_unknown(text: bytes, ask: Ask, tmp_path: Path) -> None:
    assert ask("write()\nask()", write=lambda: (tmp_path / "script.py").write_bytes(text)) == 0


def test_a_script_that_has_ended_is_unknown(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask("ask()")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__)
    assert unguarded_line() == 0  # no frame is left of it


def test_a_process_that_imports_the_script_starts_none(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        multiprocessing.process.current_process(), "_inheriting", True, raising=False
    )
    assert ask(MAIN + "    ask()") == 0


def test_a_loop_in_a_thread_counts_as_main(ask: Ask) -> None:
    def in_thread(target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()

    assert ask("\nstart(ask)\n", start=in_thread) == 2
    assert ask(MAIN + "    start(ask)\n", start=in_thread) is None


SCRIPT = """
import multiprocessing, sys
from autotune_loader.autoloader.guard import unguarded_line

def told(name):
    print(name, unguarded_line(), flush=True)

if __name__ == "__main__":
    told("guarded")
    for method in sys.argv[1:]:
        process = multiprocessing.get_context(method).Process(target=told, args=(method,))
        process.start()
        process.join()
"""


ANSWERED = ["guarded None", "fork None", "spawn None", "forkserver None"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("guard", "how", "answered"),
    [
        (MAIN, ["script.py"], ANSWERED),
        (MAIN, ["-m", "script"], ANSWERED),
        ("if sys.argv[1:]:\n", ["script.py"], ["guarded 9", "fork 12"]),
    ],
)
def test_in_a_real_script_and_in_its_processes(
    guard: str, how: list[str], answered: list[str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace(MAIN, guard))
    methods = ["fork", "spawn", "forkserver"] if guard == MAIN else ["fork"]
    root = Path(__file__).parents[2]
    environ = {"PYTHONPATH": f"{root}:{tmp_path}", "PATH": ""}
    command = [sys.executable, *how, *methods]
    pipes: Any = {"capture_output": True, "text": True, "timeout": 60}
    told = subprocess.run(command, cwd=tmp_path, env=environ, **pipes).stdout
    assert told.split("\n")[:-1] == answered
