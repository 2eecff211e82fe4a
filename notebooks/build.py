"""Builds and runs the notebooks: `python notebooks/build.py [folder]`. Their text is here, so that a change can be read.

quickstart       from a dataset to a loader
autoloader       training that tunes its own loader
inspect_study    the trials as a frame, the pictures, Optuna's own plots, what-if
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
MARKDOWN, CODE = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell

JPEGS = """
from torch.utils.data import DataLoader

from autotune_loader import load_config, tune
from autotune_loader.demo import JpegFolder, SmallCnn, cache_folder, make_jpegs

make_jpegs(cache_folder())  # 1,200 pictures, made once; your own dataset and model go here
dataset, model = JpegFolder(cache_folder()), SmallCnn()
"""

SERVER = """
import time

import torch
from torch.utils.data import Dataset, get_worker_info

from autotune_loader import TuningResult, tune


class Photos(Dataset):
    \"\"\"Samples on a server that takes a while to answer, and no more than six connections.\"\"\"

    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        worker = get_worker_info()
        if worker is not None and worker.id >= 6:
            raise ConnectionError("the server takes 6 connections")
        time.sleep(0.002)
        pixels = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index))
        return pixels, index % 10


dataset = Photos()
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
"""

BATCHED = """
from torch.utils.data import DataLoader

from autotune_loader import compare


class Batched(Photos):
    \"\"\"The same samples with one request for a whole batch.\"\"\"

    def __getitems__(self, indices):
        time.sleep(0.010)
        seeded = [torch.Generator().manual_seed(index) for index in indices]
        return [(torch.rand(3, 32, 32, generator=each), index % 10) for each, index in zip(seeded, indices)]


sides = {
    "a request a sample": DataLoader(dataset, batch_size=32, num_workers=2),
    "a request a batch": DataLoader(Batched(), batch_size=32, num_workers=2),
}
found = compare(sides, model, budget="20s", progress=False)
print(found)
found.plot()
"""

WAITING = """
import time

import torch
from torch.utils.data import Dataset

from autotune_loader import AutoLoader


class Photos(Dataset):
    \"\"\"Samples that cost a while of waiting and a little of computing, as decoding from a network drive does.\"\"\"

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.002)
        pixels = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index))
        return pixels, index % 10


dataset = Photos()
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
"""

# What each picture shows, under it.
PICTURES = {
    "workers": "Where the line stops rising, more workers do not help; the star is the choice, with its interval.",
    "timeline": "A gap in the training loop's row is a wait, for the worker whose batch ends where the gap ends.",
    "speedup": "Each dot is a round in which both were timed: where all of the band lies above the line, the gain is real.",
}


def picture(name: str) -> tuple[nbformat.NotebookNode, nbformat.NotebookNode]:
    return CODE(f"result.plot_{name}()"), MARKDOWN(PICTURES[name])


QUICKSTART = (
    MARKDOWN("# Quickstart\n\nFrom a dataset and a model to a `DataLoader` that is as fast as this machine allows."),
    CODE(JPEGS.strip()),
    MARKDOWN("## Tune\n\nOne call; interrupting the cell keeps the best so far."),
    CODE(
        "result = tune(\n"
        '    dataset, model, batch_size=32, budget="25s", output="loader.json", progress=False, reuse=False\n'
        ")  # reuse=True, the default, would check an earlier result in seconds instead\n"
        "print(result)"
    ),
    MARKDOWN("The whole story: what was tried, what binds, what to do next."),
    CODE("print(result.report())"),
    MARKDOWN("## Look"),
    *picture("workers"),
    *picture("timeline"),
    *picture("speedup"),
    MARKDOWN("## Train with it\n\nIn the training job, a file of plain data is all that is needed."),
    CODE(
        'config = load_config("loader.json")\n'
        "loader = DataLoader(dataset, batch_size=32, shuffle=True, **config.to_kwargs())\n"
        "\n"
        "pixels, labels = next(iter(loader))\n"
        "config.to_kwargs(), pixels.shape"
    ),
)

LIVE = (
    MARKDOWN(
        "# Training that tunes its own loader\n\n`AutoLoader` stands where `DataLoader` stood. Samples, order and augmentations "
        "are those of a loader that never changes."
    ),
    CODE(WAITING.strip()),
    CODE(
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "loader = AutoLoader(dataset, batch_size=32, shuffle=True)\n\n"
        "for epoch in range(8):\n"
        "    for pixels, labels in loader:\n"
        "        loss = torch.nn.functional.cross_entropy(model(pixels), labels)\n"
        "        optimizer.zero_grad()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        time.sleep(0.006)  # what a larger model would take on a GPU, while the CPU is free"
    ),
    MARKDOWN(
        "It begins without workers, as `DataLoader` does, proves that workers give the same batches, tries some, and is silent "
        "once it has settled."
    ),
    CODE("loader.plot()"),
    MARKDOWN("Each block of batches that was looked at, and what was decided."),
    CODE("loader.history.round(2)"),
    CODE("print(loader.report())"),
    MARKDOWN("The next job begins where this one ended."),
    CODE('loader.save("loader.json")'),
)

INSPECT = (
    MARKDOWN(
        "# Inspect a study\n\nWhat a tuning run has seen, and how to ask about it. The job here reads from a server that "
        "refuses a seventh worker. The class is defined right here: it is sent to the measuring process."
    ),
    CODE(SERVER.strip()),
    CODE(
        "result = tune(\n"
        '    dataset, model, batch_size=32, budget="30s", output="loader.json", progress=False, reuse=False\n'
        ")\n"
        "result.verdict"
    ),
    MARKDOWN("## The trials as a pandas frame\n\nSI units, one row per trial; NA means not measured."),
    CODE(
        "frame = result.to_dataframe()\n"
        'columns = ["role", "num_workers", "prefetch_factor", "samples_per_s", "predicted_samples_per_s", "failure_kind"]\n'
        'frame[[*columns, "wait_share", "service_s", "service_cpu_s", "step_s"]].round(4)'
    ),
    MARKDOWN("## The pictures"),
    *(cell for name in PICTURES for cell in picture(name)),
    MARKDOWN("## What if\n\nThe twin answers for what was not run, and for machines that are not here."),
    CODE(
        "import pandas as pd\n\n\n"
        "def rate(workers, cores=None):\n"
        "    return round(result.predict(num_workers=workers, cores=cores).samples_per_s.value)\n\n"
        "counts = [0, 1, 2, 4, 8, 16, 32]\n"
        'pd.DataFrame({"here": map(rate, counts), "with 16 cores": [rate(n, 16) for n in counts]}, '
        'index=pd.Index(counts, name="workers"))'
    ),
    MARKDOWN("It answers from the file too, from means instead of single batches."),
    CODE('TuningResult.load("loader.json").predict(num_workers=8).samples_per_s'),
    MARKDOWN(
        "## Does a change help?\n\n`compare()` runs loaders in turns and tells which is faster. It needs no search: each side is "
        "as you made it."
    ),
    CODE(BATCHED.strip()),
    MARKDOWN(
        "## Optuna's own plots\n\n`result.study` is an ordinary Optuna study. Importances of a dozen trials are noise, so they "
        "are shown only from twenty on."
    ),
    CODE(
        "from optuna.visualization import matplotlib as visualization  # or optuna.visualization, with plotly\n\n"
        "axes = visualization.plot_optimization_history(result.study)"
    ),
    CODE(
        "import optuna\n\n"
        "done = [t for t in result.study.trials if t.state == optuna.trial.TrialState.COMPLETE]\n"
        "if len(done) >= 20:\n"
        "    print(optuna.importance.get_param_importances(result.study))\n"
        "else:\n"
        '    print(f"{len(done)} trials are too few for importances to mean anything.")'
    ),
)

NOTEBOOKS = {"quickstart": QUICKSTART, "autoloader": LIVE, "inspect_study": INSPECT}


def make(name: str) -> nbformat.NotebookNode:
    """The notebook, not run yet."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(cells=list(NOTEBOOKS[name]), metadata={"kernelspec": kernel})
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # the same each time, so that only outputs differ
    return notebook


def run(notebook: nbformat.NotebookNode, folder: Path, timeout_s: int = 120) -> None:
    """Run every cell in `folder`; an exception in one is raised here."""
    os.environ["PYTHONWARNINGS"] = "ignore"  # of others' libraries, with paths of this machine in them
    NotebookClient(notebook, timeout=timeout_s, resources={"metadata": {"path": str(folder)}}).execute()


def main(folder: Path) -> None:
    import tempfile

    os.environ["AUTOTUNE_LOADER_CACHE"] = "off"  # each notebook shows a search
    for name in NOTEBOOKS:
        notebook = make(name)
        with tempfile.TemporaryDirectory() as scratch:
            run(notebook, Path(scratch))
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times of day
        nbformat.write(notebook, folder / f"{name}.ipynb")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
