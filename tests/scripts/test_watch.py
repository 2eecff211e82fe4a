"""`watch` on scripts with loaders: what they do and draw is what they do without, and each loader is told of by its line."""

from __future__ import annotations

import json
import re

import pytest

from autotune_loader import TuningResult
from tests.support.bench import Bench, line_of

pytestmark = pytest.mark.process
TRAIN = """
    def train(loader, model, optimizer):
        batches = iter(loader)
        noise = torch.randn(4)
        for x in batches:
            loss = (model(x.float() + noise) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    if __name__ == "__main__":
        torch.manual_seed(0); random.seed(0); np.random.seed(0)
        workers = int(sys.argv[1])
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        kept = DataLoader(Numbers(), batch_size=8, shuffle=True, num_workers=workers, persistent_workers=workers > 0)  # KEPT
        for epoch in range(3):
            train(kept, model, optimizer)
            train(DataLoader(Numbers(32), batch_size=8, num_workers=workers), model, optimizer)  # ANEW
            train(DataLoader(Stream(), batch_size=4, num_workers=workers), model, optimizer)  # STREAM
        weights = [value.hex() for each in model.parameters() for value in each.flatten().tolist()]
        print(weights, random.random(), np.random.rand(), torch.rand(1).item())
    """


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_and_random_states_are_the_same_bit_for_bit(bench: Bench, workers: int) -> None:
    text = bench.write(TRAIN)
    _, plain = bench.run("train.py", str(workers))

    code, printed, report = bench.command("watch", "train.py", str(workers))

    assert (code, printed) == (0, plain)
    for mark, batches in (("KEPT", 36), ("ANEW", 12), ("STREAM", 30)):
        block = report.partition(f"train.py:{line_of(text, mark)} ")[2].partition("\n\n")[0]
        assert f"{batches} batches in 3 epochs" in block, mark
        assert f"num_workers={workers}" in block


def test_what_binds_is_told_with_a_step_to_take_files_are_written_and_long_waits_have_an_exit_code(
    bench: Bench,
) -> None:
    bench.write("""
        if __name__ == "__main__":
            os.chdir("/")
            for x in DataLoader(Numbers(480), batch_size=8):
                time.sleep(0.004)
            for x in DataLoader(Numbers(8), batch_size=8, num_workers=1):
                pass
        """)

    written = ("-o", "loader.json", "--report", "out.html")
    code, output = bench.run("command.py", "watch", "--json", *written, "--fail-if-wait", "10%", "train.py")

    told = json.loads(output.splitlines()[-1])
    assert code == 4
    assert "--fail-if-wait allows 10 %" in told["notes"][0]
    loader = told["loaders"][0]
    assert loader["binding"] == "storage"
    assert 0.6 < loader["wait_share"] < 0.95
    assert re.match(r"num_workers=\d+, prefetch_factor=\d: .* expected", loader["next_step"])
    result = TuningResult.load(bench.folder / "loader.json")
    page = (bench.folder / "out.html").read_text()
    assert (page[:15], "Numbers" in page) == ("<!DOCTYPE html>", True)
    assert (result.origin, result.best.num_workers, result.trials[0].measurement.batch_bytes) == ("live", 0, 128)
    assert sorted(each["num_workers"] for each in result.loaders.values()) == [0, 1]


@pytest.mark.parametrize(("verb", "workers"), [("watch", 2), ("run", 0), ("run", 2)])
def test_an_error_of_the_dataset_shows_no_frame_of_ours(bench: Bench, verb: str, workers: int) -> None:
    bench.write(TRAIN)

    code, printed, report = bench.command(verb, "train.py", str(workers), BAD="20")

    assert code == 1
    assert "ValueError: " in printed
    assert "no sample 20" in printed
    frames = re.findall(r'File "([^"]+)"', printed.partition("tests/preloaded.py")[0])
    assert [frame for frame in frames if "/autotune_loader/" in frame] == []
    assert "train.py:" in report


def test_processes_of_the_script_are_reached(bench: Bench) -> None:
    text = bench.write("""
        import multiprocessing, subprocess
        def work():
            for x in DataLoader(Numbers(), batch_size=8):  # CHILD
                pass
        if __name__ == "__main__":
            child = [sys.executable, "train.py", "child"]
            if sys.argv[1] == "child":
                work()
            elif sys.argv[1] == "exec":
                os.execv(sys.executable, child)
            elif sys.argv[1] == "subprocess":
                print(end=subprocess.run(child, check=True, stdout=-1, stderr=-2, text=True).stdout)
            else:
                process = multiprocessing.get_context("fork").Process(target=work)
                process.start()
                process.join()
        """)

    for how in ("fork", "subprocess", "exec"):
        code, printed, report = bench.command("watch", "train.py", how, TMPDIR=str(bench.folder))
        assert (code, printed) == (0, "")
        assert list(bench.folder.glob("autotune-loader-*")) == []
        assert report.count("autotune-loader") <= 1, how  # one report, none that there is nothing to tell
        assert f"train.py:{line_of(text, 'CHILD')} " in report, how
