"""Builds and runs the notebooks: `python notebooks/build.py [folder]`. Their text is here, so that a change can be read.

quickstart       from a loader to the saved file
autoloader       tuning during training
inspect_study    any loader.json and any Optuna study
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
        "# Quickstart\n\nFind the `DataLoader` settings that keep a training loop fed, and measure the speedup. The job is a small CNN "
        "on 1,200 JPEG files behind a simulated object store, which answers each request after 20 ms. Put your own loader and model "
        "into the first cell."
    ),
    CODE("from autotune_loader import demo, load_config, tune\n\nloader, model = demo.job()"),
    MARKDOWN("## 1. How long does training wait for data?\n\n`%%watch` measures a cell as it is."),
    CODE("%load_ext autotune_loader"),
    CODE(
        "%%watch\n"
        "import itertools\n\n"
        "import torch\n\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for x, y in itertools.islice(loader, 20):\n"
        "    loss = torch.nn.functional.cross_entropy(model(x), y)\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()"
    ),
    MARKDOWN("## 2. Tune\n\nOne call. Interrupt the cell to keep the best settings found so far."),
    CODE('result = tune(loader, model, budget="45s", output="loader.json", progress=False)\nprint(result.report())'),
    MARKDOWN(
        "If it says *not significantly faster or slower*, a larger budget may show a difference; otherwise keep your settings.\n\n## 3. Plot\n\nPoints "
        "are measured; the band is what the model expects. Beyond the peak, more workers do not help."
    ),
    CODE("result.plot_workers()"),
    MARKDOWN("Where the time of a sample goes in a worker. On top is what takes most of what limits training."),
    CODE("result.plot_stages()"),
    MARKDOWN("The last batches of one trial, numbered."),
    CODE("result.plot_timeline()"),
    MARKDOWN("## 4. Train\n\nIn this process, your loader with the new settings:"),
    CODE("loader = result.apply_to(loader)\nnext(iter(loader))[0].shape"),
    MARKDOWN("In another process, the file is all that is needed:"),
    CODE('load_config("loader.json").to_kwargs()'),
    MARKDOWN(
        "**What to do**: pass these arguments to the `DataLoader` of your training script, and commit `loader.json` beside it. Tune "
        "again on another kind of machine, or when the dataset or the model changes."
    ),
)

LIVE = (
    MARKDOWN(
        "# Tune during training\n\n`AutoLoader` replaces `DataLoader`: the same batches in the same order, and a number of workers "
        "that changes during training. The job reads 1,200 JPEG files from a simulated object store, 20 ms a request."
    ),
    CODE(
        "import time\n\n"
        "import torch\n\n"
        "from autotune_loader import AutoLoader, demo\n\n"
        "plain, model = demo.job()\n"
        "loader = AutoLoader(plain.dataset, batch_size=16, shuffle=True)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)"
    ),
    CODE(
        "for epoch in range(8):\n"
        "    begun = time.monotonic()\n"
        "    for pixels, labels in loader:\n"
        "        loss = torch.nn.functional.cross_entropy(model(pixels), labels)\n"
        "        optimizer.zero_grad()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        '    print(f"epoch {epoch}: {time.monotonic() - begun:.1f} s, now {loader.config}")'
    ),
    MARKDOWN("What it tried, compared in A/B rounds with the setting it started with:"),
    CODE("print(loader.report())"),
    CODE("loader.result.plot_workers()"),
    CODE('loader.save("loader.json")'),
    MARKDOWN(
        "**What to do**: leave AutoLoader in your script. The next job starts with what this one found: "
        '`AutoLoader(dataset, config="loader.json", ...)`.'
    ),
)

INSPECT = (
    MARKDOWN(
        "# Inspect a study\n\nWorks with any `loader.json` and any Optuna study: set the two lines below. As they are, the notebook "
        "tunes a small CNN on 1,200 JPEG files behind a simulated object store, and keeps the study in `study.db`."
    ),
    CODE('PATH, STORAGE = "loader.json", "sqlite:///study.db"  # yours; STORAGE = None without a study'),
    CODE(
        "from pathlib import Path\n\n"
        "import optuna\n\n"
        "from autotune_loader import TuningResult, TwinSampler, compare, demo, tune\n\n"
        "optuna.logging.set_verbosity(optuna.logging.WARNING)\n"
        "loader, model = demo.job()\n"
        "if not Path(PATH).exists():\n"
        '    study = optuna.create_study(study_name="loader", storage=STORAGE, direction="maximize")\n'
        '    tune(loader, model, study=study, budget="45s", output=PATH, progress=False)'
    ),
    CODE(
        "result = TuningResult.load(PATH)\n"
        "study = None if STORAGE is None else optuna.load_study(study_name=None, storage=STORAGE)\n"
        "print(result.report())"
    ),
    MARKDOWN("## Trials as a pandas frame\n\nSI units; `round` is missing for single trials; NA means not measured."),
    CODE(
        "frame = result.to_dataframe()\n"
        'columns = ["round", "num_workers", "prefetch_factor", "samples_per_s", "wait_share", "service_s", "step_s", "failure_kind"]\n'
        "frame[columns].round(4)"
    ),
    MARKDOWN("## Plots\n\nA loaded result has no single batches, so `plot_timeline()` works only where it was tuned."),
    CODE("result.plot_workers()"),
    CODE("result.plot_stages()"),
    MARKDOWN("## Predict\n\nThe model of the loader predicts settings that did not run, and other numbers of cores."),
    CODE(
        "import pandas as pd\n\n"
        "counts = [0, 2, 4, 8, 16, 32]\n"
        "rows = {\n"
        '    "samples/s here": [round(result.predict(count).samples_per_s.value) for count in counts],\n'
        '    "samples/s with 16 cores": [round(result.predict(count, cores=16).samples_per_s.value) for count in counts],\n'
        "}\n"
        'pd.DataFrame(rows, index=pd.Index(counts, name="workers"))'
    ),
    MARKDOWN("## Optuna's plots\n\nThe values of the study are samples/s, its parameters those of `DataLoader`."),
    CODE(
        "from optuna.visualization import matplotlib as visualization\n\n"
        "tried = [] if study is None else [name for trial in study.trials if trial.value for name in trial.params]\n"
        'params = [name for name in ("num_workers", "prefetch_factor") if name in tried]\n'
        "if params:\n"
        '    axes = visualization.plot_slice(study, params=params, target_name="samples/s")\n'
        '    if "prefetch_factor" in params:\n'
        "        last = axes if len(params) == 1 else axes[-1]\n"
        "        last.set_xticks([1, 2, 4, 8], [1, 2, 4, 8])\n"
        "        last.minorticks_off()"
    ),
    CODE("if study is not None:\n    visualization.plot_timeline(study)"),
    MARKDOWN(
        "## The sampler in your own study\n\n`TwinSampler` works in any `study.optimize()` that maximizes samples/s. Here the objective "
        "is a formula."
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
    MARKDOWN("## Does a change help?\n\n`compare()` runs two loaders in A/B rounds and says which is faster. It needs no search."),
    CODE(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from urllib.request import urlopen\n\n"
        "from torch.utils.data import DataLoader\n\n\n"
        "class AllAtOnce(type(loader.dataset)):\n"
        '    """The same pictures; the requests of a batch are sent at the same time."""\n\n'
        "    def read(self, name):\n"
        '        return urlopen(f"{self.source}/{name}").read()\n\n'
        "    def __getitems__(self, indices):\n"
        "        with ThreadPoolExecutor(len(indices)) as pool:\n"
        "            return list(pool.map(self.__getitem__, indices))\n\n\n"
        "sides = {\n"
        '    "one by one": DataLoader(loader.dataset, batch_size=16, num_workers=2),\n'
        '    "all at once": DataLoader(AllAtOnce(loader.dataset.source), batch_size=16, num_workers=2),\n'
        "}\n"
        'print(compare(sides, budget="20s").report())'
    ),
    MARKDOWN("**What to do**: use the settings of the report, and measure each change of the pipeline with `compare()`."),
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
