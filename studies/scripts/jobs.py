"""Training scripts that nobody here wrote, each with tiny data of its own; their code is fetched, and never kept here."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from studies.libraries.environments import NO_DEPS, TORCHVISION, Environment

Prepare = Callable[[Path], None]


@dataclass(frozen=True)
class Step:
    """Where a training step begins and where it is over, for tools that have to be told; lines are named by what they hold."""

    file: str
    first: str
    behind: str

    def mark(self, folder: Path, enable: str, enter: str, leave: str) -> None:
        """Put lines at the file's top, before the step and behind it."""
        path = folder / self.file
        lines = path.read_text().splitlines()
        first = next(number for number, line in enumerate(lines) if self.first in line)
        behind = next(number for number, line in enumerate(lines) if self.behind in line and number > first)
        for number, line in ((behind, leave), (first, enter)):
            indent = lines[number][: -len(lines[number].lstrip())]
            lines.insert(number, indent + line)
        path.write_text("\n".join([enable, *lines]))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A script in its repository."""

    name: str
    repository: str
    """On GitHub: owner/name."""
    script: str
    """Its path in the repository, from whose root it runs, ..."""
    prepare: Prepare
    """... once this has made its data."""
    environment: Environment
    files: tuple[str, ...] = ()
    """Of the repository, what is fetched; all of it where none is named."""
    arguments: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    step: Step | None = None
    """None where a framework has it."""


def _text(path: Path, words: int) -> None:
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(400)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("O God, O God! " + " ".join(rng.choices(vocabulary, k=words)))


def _pictures_with_masks(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for index in range(120):
        picture = rng.integers(0, 256, (480, 640, 3), dtype=np.uint8)
        mask = (rng.random((480, 640)) < 0.5).astype(np.uint8)
        for kind, array in (("imgs", picture), ("masks", mask)):
            path = folder / "data" / kind / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(path)


def _mnist(folder: Path) -> None:
    import torch

    where = folder / "examples" / "Datasets" / "MNIST" / "complete"
    where.mkdir(parents=True, exist_ok=True)
    for name, size in (("training", 60_000), ("test", 2_000)):
        pictures = torch.randint(0, 256, (size, 28, 28), dtype=torch.uint8)
        torch.save((pictures, torch.randint(0, 10, (size,))), where / f"{name}.pt")


def _graphs(folder: Path) -> None:
    """MUTAG's file format with random graphs: node numbers count from 1 over all graphs."""
    rng, raw = random.Random(0), folder / "data" / "TU" / "MUTAG" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    edges, graph_of, labels, node_labels, edge_labels = [], [], [], [], []
    for graph in range(1, 1001):
        nodes = [len(graph_of) + place + 1 for place in range(rng.randint(10, 28))]
        graph_of += [graph] * len(nodes)
        node_labels += [rng.randint(0, 6) for _ in nodes]
        labels.append(rng.choice((-1, 1)))
        for a, b in pairwise(nodes):
            edges += [f"{a}, {b}", f"{b}, {a}"]
            edge_labels += [0, 0]
    columns = {
        "A": edges,
        "graph_indicator": graph_of,
        "graph_labels": labels,
        "node_labels": node_labels,
        "edge_labels": edge_labels,
    }
    for name, column in columns.items():
        (raw / f"MUTAG_{name}.txt").write_text("\n".join(map(str, column)) + "\n")


def _tiny_gpt(folder: Path) -> None:
    """A random model, its tokenizer, and text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

    _text(folder / "tiny" / "train.txt", 120_000)
    _text(folder / "tiny" / "test.txt", 8_000)
    for name, rows in (("train", 2_000), ("test", 200)):
        rng = random.Random(rows)
        words = [word for word in (folder / "tiny" / f"{name}.txt").read_text().split() if word.isalpha()]
        lines = [f"{' '.join(rng.choices(words, k=40))},{rng.randint(0, 1)}" for _ in range(rows)]
        (folder / "tiny" / f"{name}.csv").write_text("\n".join(["sentence1,label", *(line for line in lines)]))
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train([str(folder / "tiny/train.txt")], trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>"]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
    fast.model_max_length = 128
    config = GPT2Config(vocab_size=len(fast), n_positions=128, n_embd=32, n_layer=1, n_head=2, pad_token_id=1)
    config.bos_token_id = config.eos_token_id = 1
    for name, kind in (("lm", GPT2LMHeadModel), ("classifier", GPT2ForSequenceClassification)):
        kind(config).save_pretrained(folder / "tiny" / name)
        fast.save_pretrained(folder / "tiny" / name)


def _tiny_gpt_for_clm(folder: Path) -> None:
    """And a name that accelerate no longer has, without which the script ends under plain Python, too."""
    script = folder / EXAMPLES / "language-modeling" / "run_clm_no_trainer.py"
    script.write_text(script.read_text().replace("DistributedType.TPU", "DistributedType.XLA"))
    _tiny_gpt(folder)


def _tiny_gpt_for_glue(folder: Path) -> None:
    """And the metric that would be fetched from the Hub."""
    (folder / "accuracy").mkdir()
    (folder / "accuracy" / "accuracy.py").write_text(ACCURACY)
    _tiny_gpt(folder)


ACCURACY = """
import datasets
import evaluate

class Accuracy(evaluate.Metric):
    def _info(self):
        integer = datasets.Value("int32")
        features = datasets.Features({"predictions": integer, "references": integer})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(references)}
"""
# A fork that holds the examples of transformers 4.57 as released, and is small.
TRANSFORMERS = "PerforatedAI/PerforatedAI-Transformers"
EXAMPLES = "examples/pytorch"
# wandb and what it imports beside what the study runs in.
WANDB = (
    "wandb==0.18.7",
    "appdirs",
    "docker-pycreds",
    "setproctitle",
    "gitpython",
    "gitdb",
    "smmap",
    "protobuf<6",
    "six",
    "sentry-sdk",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
)
JOBS = (
    Job(
        name="minGPT chargpt",
        repository="karpathy/minGPT",
        script="projects/chargpt/chargpt.py",
        prepare=lambda folder: _text(folder / "input.txt", 60_000),
        step=Step("mingpt/trainer.py", "# forward the model", "self.trigger_callbacks('on_batch_end')"),
        environment=Environment("torch"),
        arguments=("--model.model_type=gpt-nano", "--trainer.max_iters=400", "--trainer.device=cpu"),
        environ=(("PYTHONPATH", "."),),
    ),
    Job(
        name="Pytorch-UNet",
        repository="milesial/Pytorch-UNet",
        script="train.py",
        prepare=_pictures_with_masks,
        step=Step("train.py", "images, true_masks = batch", "pbar.update(images"),
        environment=Environment("scripts-unet", (TORCHVISION, *WANDB), NO_DEPS),
        arguments=("--epochs", "2", "--batch-size", "2", "--scale", "0.1", "--validation", "10"),
        environ=(("WANDB_MODE", "disabled"),),
    ),
    Job(
        name="MONAI unet_training_dict",
        repository="Project-MONAI/tutorials",
        script="2d_segmentation/torch/unet_training_dict.py",
        prepare=lambda folder: None,  # it makes its own
        files=("2d_segmentation/torch",),
        step=Step("2d_segmentation/torch/unet_training_dict.py", "step += 1", "epoch_loss += loss.item()"),
        environment=Environment("scripts-monai", ("monai", "tensorboard")),
    ),
    Job(
        name="PyTorch Geometric mutag_gin",
        repository="pyg-team/pytorch_geometric",
        script="examples/mutag_gin.py",
        prepare=_graphs,
        files=("examples/mutag_gin.py",),
        step=Step("examples/mutag_gin.py", "optimizer.zero_grad()", "total_loss += float(loss)"),
        environment=Environment("torch_geometric", ("torch_geometric",)),
        arguments=("--epochs", "25"),
    ),
    Job(
        name="Lightning autoencoder",
        repository="Lightning-AI/pytorch-lightning",
        script="examples/pytorch/basics/autoencoder.py",
        files=("examples/pytorch/basics",),
        prepare=_mnist,
        environment=Environment(
            "scripts-lightning", (TORCHVISION, "jsonargparse", "docstring-parser", "typeshed-client"), NO_DEPS
        ),
        arguments=("--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--trainer.logger=false"),
        environ=(("PL_USE_MOCKED_MNIST", "1"),),
    ),
    Job(
        name="transformers run_clm_no_trainer",
        repository=TRANSFORMERS,
        script=f"{EXAMPLES}/language-modeling/run_clm_no_trainer.py",
        files=(f"{EXAMPLES}/language-modeling",),
        prepare=_tiny_gpt_for_clm,
        step=Step(
            f"{EXAMPLES}/language-modeling/run_clm_no_trainer.py", "with accelerator.accumulate(model)", "# Checks if"
        ),
        environment=Environment("scripts-transformers", ("evaluate", "scikit-learn")),
        arguments=(
            *("--model_name_or_path", "tiny/lm", "--train_file", "tiny/train.txt"),
            *("--validation_file", "tiny/test.txt", "--block_size", "64", "--num_train_epochs", "2"),
        ),
        environ=(("HF_HUB_OFFLINE", "1"),),
    ),
    Job(
        name="transformers run_glue_no_trainer",
        repository=TRANSFORMERS,
        script=f"{EXAMPLES}/text-classification/run_glue_no_trainer.py",
        files=(f"{EXAMPLES}/text-classification",),
        prepare=_tiny_gpt_for_glue,
        step=Step(
            f"{EXAMPLES}/text-classification/run_glue_no_trainer.py",
            "outputs = model(**batch)",
            "if isinstance(checkpointing_steps, int)",
        ),
        environment=Environment("scripts-transformers", ("evaluate", "scikit-learn")),
        arguments=(
            *("--model_name_or_path", "tiny/classifier", "--train_file", "tiny/train.csv"),
            *("--validation_file", "tiny/test.csv", "--num_train_epochs", "2"),
        ),
        environ=(("HF_HUB_OFFLINE", "1"),),
    ),
)
