"""No test turns green by itself: what conftest.py does with a test that fails at first."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPT = f"""
import sys
import pytest

sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.exit(pytest.main(["-n0", "-c", "pytest.ini", "-p", "conftest", "test_it.py"]))
"""
TESTS = """
import pytest

runs = []

{mark}
@pytest.mark.parametrize("number", range({failing}))
def test_it(number):
    runs.append(number)
    assert runs.count(number) == 2
"""
NAMED = '@pytest.mark.rerun("the clock of a busy machine")'


@pytest.mark.parametrize(
    ("mark", "failing", "code", "said"),
    [
        ("", 1, 1, "1 failed"),
        (NAMED, 3, 1, "reruns: 3, of 2 that may be"),
        pytest.param(NAMED, 2, 0, "reruns: 2, of 2 that may be", marks=pytest.mark.system),
        pytest.param("@pytest.mark.rerun", 1, 4, "without a reason", marks=pytest.mark.system),
    ],
)
def test_a_failure_is_run_again_only_by_name(preloaded, tmp_path, mark, failing, code, said):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "run.py").write_text(SCRIPT)
    tests = TESTS.format(mark=f"@pytest.mark.process\n{mark}", failing=failing)
    (tmp_path / "test_it.py").write_text(tests)
    run = preloaded.start("run.py", folder=tmp_path)
    assert run.wait(60) == code, run.output
    assert said in run.output
