"""What is asked for, by a command, a variable or a call, and that printed next steps work."""

import ast
import builtins
import inspect
import re
import shlex
import sys

import pytest

import autotune_loader
from autotune_loader import cli, enable
from autotune_loader.diagnosis import Advice, Kept
from autotune_loader.watch import hook, launch, run_plan
from autotune_loader.watch.run_plan import ASKED, VARIABLE, Plan, say

PLAIN = "  waits for data 96% of the time\n  next: `autotune-loader\n    run`."
COLOURED = (
    "  \033[1;36mwaits for data 96%\033[0m of the time\n"
    "  \033[1;36mnext: `autotune-loader\n    run`.\033[0m"
)


@pytest.mark.parametrize(
    ("environ", "is_terminal", "shown"),
    [
        ({}, False, PLAIN),
        ({}, True, COLOURED),
        ({"TERM": "dumb"}, True, PLAIN),
        ({"NO_COLOR": "1"}, True, PLAIN),
        ({"FORCE_COLOR": "1"}, False, COLOURED),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, COLOURED),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, PLAIN),
    ],
)
def test_who_sees_colours(environ, is_terminal, shown, monkeypatch, capsys):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    say(PLAIN)
    assert capsys.readouterr().err == f"{shown}\n"


@pytest.mark.parametrize("allow_workers", [False, True])
@pytest.mark.parametrize("script", ["train.py", "'a b.py' --epochs 3", "-m package.train -o x"])
def test_a_printed_command_is_what_it_says(script, allow_workers, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "launch", lambda *given, **how: started.append((*given, how)))
    program, *words = shlex.split(
        Plan(verb="watch", script=script).to_run(allow_workers=allow_workers)
    )
    assert program == "autotune-loader"
    assert cli.main(words) == 0
    ((plan, *target, how),) = started
    assert plan == Plan(verb="run", allow_workers=allow_workers)
    _, *asked = (None, *shlex.split(script))
    assert how["is_module"] == (asked[0] == "-m")
    assert target == [asked[how["is_module"]], asked[how["is_module"] + 1 :]]


@pytest.mark.parametrize("allow_workers", [False, True])
def test_a_printed_variable_is_what_it_says(allow_workers):
    printed = Plan.asked("watch").to_run(allow_workers=allow_workers)
    (assignment,) = shlex.split(printed)
    name, _, value = assignment.partition("=")
    assert name == ASKED
    assert Plan.asked(value) == Plan(verb="run", script="", allow_workers=allow_workers)


@pytest.mark.parametrize("allow_workers", [False, True])
def test_a_printed_call_is_what_it_says(allow_workers, monkeypatch):
    called = []
    monkeypatch.setattr(
        autotune_loader, "enable", lambda *given, **how: called.append((given, how))
    )
    call = ast.parse(Plan(verb="watch").to_run(allow_workers=allow_workers), mode="eval").body
    given, how = (
        map(ast.literal_eval, call.args),
        {each.arg: ast.literal_eval(each.value) for each in call.keywords},
    )
    bound = inspect.signature(enable).bind(*given, **how)
    bound.apply_defaults()
    assert call.func.id == "enable"
    assert (bound.arguments["verb"], bound.arguments["allow_workers"]) == ("run", allow_workers)


def test_in_notebooks_the_next_step_is_a_cell(monkeypatch):
    monkeypatch.setattr(builtins, "get_ipython", None, raising=False)
    assert Plan(verb="watch").to_run(allow_workers=True) == "%%watch run --allow-workers"


OURS = re.compile(r"\b(?:AutoLoader|DataLoader|tune|compare|enable)\([^()]*\)")


@pytest.mark.parametrize(
    "call", [call for row in (*Advice, *Kept) for call in OURS.findall(row.value)]
)
def test_advice_names_arguments_that_there_are(call):
    from torch.utils.data import DataLoader

    call = ast.parse(re.sub(r"\{\w+\}", "2", call), mode="eval").body
    called = (
        getattr(autotune_loader, call.func.id, None) if call.func.id != "DataLoader" else DataLoader
    )
    takes = inspect.signature(called).parameters
    assert [each.arg for each in call.keywords if each.arg not in takes] == []


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("watch", Plan(verb="watch", script="")),
        ("run", Plan(verb="run", script="")),
        (
            "run -o /x/loader.json --allow-workers --json '/a b.json'",
            Plan(
                verb="run",
                script="",
                allow_workers=True,
                output="/x/loader.json",
                report="/a b.json",
            ),
        ),
    ],
)
def test_a_variable_asks_as_a_command_line(text, plan):
    assert Plan.asked(text) == plan


@pytest.mark.parametrize(
    "text", [" ", "wach", "watch train.py", "watch -o", "watch --allow-workers", "run --workers 2"]
)
def test_an_unknown_variable_is_said_and_left(text, monkeypatch, capsys):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(ASKED, text)
    hook.begin_as_handed_on()
    told = f"AUTOTUNE_LOADER={text!r} is not known. Try AUTOTUNE_LOADER=watch or"
    assert capsys.readouterr().err.startswith(f"autotune-loader: {told}")
    # AND processes that are started from here say nothing more
    assert {ASKED, VARIABLE}.isdisjoint(run_plan.os.environ)
    assert hook.active == []
