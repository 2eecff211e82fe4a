"""Builds and runs the notebooks: `python notebooks/build.py [folder]`. Their text is here, so that a change can be read.

quickstart       from a loader of JPEG files to the saved file
autoloader       training that tunes its own loader
inspect_study    any loader.json and any Optuna study: a path at the top, then pictures
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
MARKDOWN, CODE = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell

QUICKSTART = (
    MARKDOWN(
        "# Quickstart\n\nFrom a loader and a model to the fewest workers that keep the training loop fed. The job decodes 1,200 "
        "JPEG files, which are made once; your own loader and model go into the first cell."
    ),
    CODE(
        "from torch.utils.data import DataLoader\n\n"
        "from autotune_loader import load_config, tune\n"
        "from autotune_loader.demo import JpegFolder, SmallCnn, cache_folder, make_jpegs\n\n"
        "make_jpegs(cache_folder())\n"
        "loader = DataLoader(JpegFolder(cache_folder()), batch_size=32, shuffle=True)\n"
        "model = SmallCnn()"
    ),
    MARKDOWN("## Tune\n\nOne call; interrupting the cell keeps the best so far."),
    CODE('result = tune(loader, model, budget="40s", output="loader.json", progress=False)\nprint(result)'),
    MARKDOWN(
        "Where a gain is *not shown*, a larger budget tells; where workers cost more memory than they are worth to "
        "you, keep what you have.\n\nThe whole story: what was tried, what the bottleneck is, what to do next."
    ),
    CODE("print(result.report())"),
    MARKDOWN(
        "## Look\n\nPoints are what ran: filled where they were timed in turns, open where once. Where the dotted line stops "
        "rising, more workers do not help."
    ),
    CODE("result.plot_workers()"),
    MARKDOWN("Where the time of a sample goes in a worker: the longest stage is worth making cheaper first."),
    CODE("result.plot_stages()"),
    MARKDOWN("One burst, batch by batch: the training loop waits for the worker whose batch ends where the wait ends."),
    CODE("result.plot_timeline()"),
    MARKDOWN(
        "## Train with it\n\nIn this process the loader itself; in another one, a file of plain data is all that is needed."
    ),
    CODE(
        "loader = result.apply_to(loader)\n\n"
        'config = load_config("loader.json")\n'
        "same = DataLoader(loader.dataset, batch_size=32, shuffle=True, **config.to_kwargs())\n"
        "config.to_kwargs(), next(iter(loader))[0].shape"
    ),
)

LIVE = (
    MARKDOWN(
        "# Training that tunes its own loader\n\n`AutoLoader` stands where `DataLoader` stood. It gives the same batches in the "
        "same order, and uses worker processes only after their first batches were compared with the loop's own."
    ),
    CODE(
        "import time\n\n"
        "import torch\n"
        "from torch.utils.data import Dataset\n\n"
        "from autotune_loader import AutoLoader\n\n\n"
        "class Photos(Dataset):\n"
        '    """Samples that cost a while of waiting and a little of computing, as from a network drive."""\n\n'
        "    def __len__(self):\n"
        "        return 4096\n\n"
        "    def __getitem__(self, index):\n"
        "        time.sleep(0.002)\n"
        "        pixels = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index))\n"
        "        return pixels, index % 10\n\n\n"
        "model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "loader = AutoLoader(Photos(), batch_size=32, shuffle=True)"
    ),
    CODE(
        "for epoch in range(8):\n"
        "    begun = time.monotonic()\n"
        "    for pixels, labels in loader:\n"
        "        loss = torch.nn.functional.cross_entropy(model(pixels), labels)\n"
        "        optimizer.zero_grad()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        time.sleep(0.006)  # what a larger model would take on a GPU, while the CPU is free\n"
        '    print(f"epoch {epoch}: {time.monotonic() - begun:.1f} s with {loader.config}")'
    ),
    MARKDOWN("What was tried, in turns with what was asked for; what is not shown to be faster is not kept."),
    CODE("print(loader.report())"),
    CODE("loader.result.plot_workers()"),
    MARKDOWN('The next job begins where this one ended: `AutoLoader(dataset, config="loader.json", ...)`.'),
    CODE('loader.save("loader.json")'),
)

INSPECT = (
    MARKDOWN(
        "# Inspect a study\n\nWorks on any `loader.json` and any Optuna study: set the two lines below. As they are, the notebook "
        "makes a study of its own: a job that reads from a server which refuses a seventh worker, and keeps it in `study.db`."
    ),
    CODE('PATH, STORAGE = "loader.json", "sqlite:///study.db"  # yours; STORAGE = None where no study was kept'),
    CODE(
        "import time\n"
        "from pathlib import Path\n\n"
        "import optuna\n"
        "import torch\n"
        "from torch.utils.data import DataLoader, Dataset, get_worker_info\n\n"
        "from autotune_loader import TuningResult, TwinSampler, compare, tune\n\n"
        "optuna.logging.set_verbosity(optuna.logging.WARNING)\n\n\n"
        "class Photos(Dataset):\n"
        '    """Samples on a server that takes a while to answer, and no more than six connections."""\n\n'
        "    def __len__(self):\n"
        "        return 20_000\n\n"
        "    def __getitem__(self, index):\n"
        "        worker = get_worker_info()\n"
        "        if worker is not None and worker.id >= 6:\n"
        '            raise ConnectionError("the server takes 6 connections")\n'
        "        time.sleep(0.002)\n"
        "        return torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index)), index % 10\n\n\n"
        "if not Path(PATH).exists():\n"
        "    loader = DataLoader(Photos(), batch_size=32, shuffle=True)\n"
        "    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))\n"
        '    study = optuna.create_study(study_name="loader", storage=STORAGE, direction="maximize")\n'
        '    tune(loader, model, study=study, budget="40s", output=PATH, progress=False)'
    ),
    CODE(
        "result = TuningResult.load(PATH)\n"
        "study = None if STORAGE is None else optuna.load_study(study_name=None, storage=STORAGE)\n"
        "print(result.report())"
    ),
    MARKDOWN("## The bursts as a pandas frame\n\nSI units; `round` is missing where a burst ran alone; NA means not measured."),
    CODE(
        "frame = result.to_dataframe()\n"
        'columns = ["round", "num_workers", "prefetch_factor", "samples_per_s", "wait_share", "service_s", "step_s", "failure_kind"]\n'
        "frame[columns].round(4)"
    ),
    MARKDOWN(
        "## Pictures\n\nWhat failed is a cross. A loaded result has no single batches, so `plot_timeline()` works where it was tuned."
    ),
    CODE("result.plot_workers()"),
    CODE("result.plot_stages()"),
    MARKDOWN("## What if\n\nThe model of the loader answers for what was not run, and for machines that are not here."),
    CODE(
        "import pandas as pd\n\n"
        "counts = [0, 1, 2, 4, 6]\n"
        "rows = {\n"
        '    "here": [round(result.predict(count).samples_per_s.value) for count in counts],\n'
        '    "with 16 cores": [round(result.predict(count, cores=16).samples_per_s.value) for count in counts],\n'
        "}\n"
        'pd.DataFrame(rows, index=pd.Index(counts, name="workers"))'
    ),
    MARKDOWN(
        "## Optuna's own plots\n\nThe study is an ordinary one: its values are samples/s, its parameters those of `DataLoader`."
    ),
    CODE(
        "from optuna.visualization import matplotlib as visualization\n\n"
        "tried = [] if study is None else [name for trial in study.trials if trial.value for name in trial.params]\n"
        'params = [name for name in ("num_workers", "prefetch_factor") if name in tried]\n'
        "if params:\n"
        '    visualization.plot_slice(study, params=params, target_name="samples/s")'
    ),
    CODE('if params:\n    visualization.plot_parallel_coordinate(study, params=params, target_name="samples/s")'),
    CODE("if study is not None:\n    visualization.plot_timeline(study)"),
    MARKDOWN(
        "## The sampler in a study of your own\n\n`TwinSampler` proposes in any `study.optimize()` that maximises samples/s. This one "
        "knows nothing of bursts; the objective is a formula."
    ),
    CODE(
        "def objective(trial):\n"
        '    workers = trial.suggest_int("num_workers", 0, 64)\n'
        "    if workers:\n"
        '        trial.suggest_int("prefetch_factor", 1, 8, log=True)\n'
        "    return 1000 * min(1 + workers, 9)\n\n\n"
        "sampler = TwinSampler()\n"
        'own = optuna.create_study(direction="maximize", sampler=sampler)\n'
        "own.optimize(objective, n_trials=20, callbacks=[sampler.stop_when_safe])\n"
        'own.trials_dataframe()[["number", "params_num_workers", "params_prefetch_factor", "value"]]'
    ),
    MARKDOWN(
        "## Does a change help?\n\n`compare()` runs loaders in turns and tells which is faster. It needs no search."
    ),
    CODE(
        "class Batched(Photos):\n"
        '    """The same samples with one request for a whole batch."""\n\n'
        "    def __getitems__(self, indices):\n"
        "        time.sleep(0.010)\n"
        "        seeded = [torch.Generator().manual_seed(index) for index in indices]\n"
        "        return [(torch.rand(3, 32, 32, generator=each), index % 10) for each, index in zip(seeded, indices)]\n\n\n"
        "sides = {\n"
        '    "a request a sample": DataLoader(Photos(), batch_size=32, num_workers=2),\n'
        '    "a request a batch": DataLoader(Batched(), batch_size=32, num_workers=2),\n'
        "}\n"
        'print(compare(sides, budget="20s").report())'
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


def run(notebook: nbformat.NotebookNode, folder: Path, timeout_s: int = 180) -> None:
    """Run every cell in `folder`; an exception in one is raised here."""
    os.environ["PYTHONWARNINGS"] = "ignore"  # of others' libraries, with paths of this machine in them
    NotebookClient(notebook, timeout=timeout_s, resources={"metadata": {"path": str(folder)}}).execute()


def main(folder: Path, *names: str) -> None:
    import tempfile

    for name in names or NOTEBOOKS:
        notebook = make(name)
        with tempfile.TemporaryDirectory() as scratch:
            run(notebook, Path(scratch))
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times of day
        nbformat.write(notebook, folder / f"{name}.ipynb")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE, *sys.argv[2:])
