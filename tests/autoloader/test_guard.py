"""Whether importing a script would run its training again."""

from __future__ import annotations

import multiprocessing.process
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from autotune_loader.autoloader.guard import unguarded_line

Ask = Callable[..., int | None]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs a text as `python script.py` would, and returns what `unguarded_line()` says when the script calls `ask()`."""

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


class Spec:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    "script",
    [
        'if __name__ == "__main__":\n    ask()\n',
        "if '__main__' == __name__: ask()",
        'def main():\n    ask()\n\nif __name__ == "__main__":\n    main()\n',
        'import os\nif os.name and __name__ == "__main__":\n    for _ in range(1):\n        ask()\n    print()\n',
        'try:\n    if __name__ == "__main__":\n        ask()\nfinally:\n    pass\n',
        'match 1:\n    case _:\n        if __name__ == "__main__":\n            ask()\n',
        'if __name__ == "__main__":\n    exec("\\n" * 50 + "ask()")\n',  # its line is not one of the script
        'def main():\n    pass\n\nif __name__ == "__main__":\n    (\n        ask(\n        )\n    )\n',
    ],
)
def test_a_line_within_the_guard_is_not_run_again(script: str, ask: Ask) -> None:
    assert ask(script) is None


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("import os\n\nask()\n", 3),
        ("def main():\n    ask()\n\n\nmain()\n", 5),
        ('if __name__ == "__main__":\n    pass\nask()\n', 3),
        (
            'if __name__ != "__main__":\n    pass\nelse:\n    ask()\n',
            4,
        ),  # a guard, but none that is known
        ('if __name__ == "__main__" or True:\n    ask()\n', 2),
        ('if __name__ in ("__main__", "__mp_main__"):\n    ask()\n', 2),
        ('if __name__ == "train":\n    pass\nelif True:\n    ask()\n', 4),
        (
            'def main():\n    if __name__ == "__main__":\n        ask()\n\nmain()\n',
            5,
        ),  # it is not asked again, but more may be
    ],
)
def test_a_line_outside_the_guard_is_named(script: str, line: int, ask: Ask) -> None:
    assert ask(script) == line


@pytest.mark.parametrize(
    ("attributes", "answer"),
    [
        ({"file": None}, None),  # python -c, a notebook
        ({"__spec__": Spec("package.__main__")}, None),  # python -m package
        ({"__spec__": Spec("__main__"), "file": "app.zip/__main__.py"}, None),  # python app.zip
        ({"__spec__": Spec("package.train")}, 1),  # python -m package.train is imported by its name
        ({"name": "__mp_main__"}, None),  # in a spawned process, which has imported the script
        ({"file": "gone.py"}, 0),
        ({"file": None, "__spec__": Spec("package.train")}, 0),
    ],
)
def test_what_multiprocessing_does_not_import_runs_nothing_again(
    attributes: dict[str, Any], answer: int | None, ask: Ask
) -> None:
    assert ask("ask()\n", **attributes) == answer


def test_a_script_that_cannot_be_parsed_or_has_ended_cannot_be_told(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in (b"if", bytes(3)):
        assert (
            ask(
                "write()\nask()", write=lambda text=text: (tmp_path / "script.py").write_bytes(text)
            )
            == 0
        )
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__)
    assert unguarded_line() == 0  # no frame is left of it


def test_a_process_that_is_importing_the_script_may_start_none(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        multiprocessing.process.current_process(), "_inheriting", True, raising=False
    )
    assert ask('if __name__ == "__main__":\n    ask()') == 0


def test_a_loop_in_a_thread_is_where_the_main_thread_is(ask: Ask) -> None:
    def in_thread(target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()

    assert ask("\nstart(ask)\n", start=in_thread) == 2
    assert ask('if __name__ == "__main__":\n    start(ask)\n', start=in_thread) is None


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


@pytest.mark.process
@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"]])
def test_in_a_real_script_and_in_the_processes_that_it_starts(
    how: list[str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    root = Path(__file__).parents[2]
    command = [sys.executable, *how, "fork", "spawn", "forkserver"]
    environ = {"PYTHONPATH": f"{root}:{tmp_path}", "PATH": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n")[:-1] == [
        f"{each} None" for each in ("guarded", "fork", "spawn", "forkserver")
    ]
    # AND without the guard
    (tmp_path / "script.py").write_text(
        SCRIPT.replace('if __name__ == "__main__":', "if sys.argv[1:]:")
    )
    done = subprocess.run(
        [*command[:-3], "fork"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split("\n")[:-1] == ["guarded 9", "fork 12"]
