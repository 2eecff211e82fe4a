"""Everything that can be said of a run: a row is a sentence, whose figures are written in the unit that it names.

A row is called with its figures: `Bottleneck.CPU()` is `Finding(kind="cpu", sentence="Bottleneck: CPU.")`.
"""

from __future__ import annotations

import string
from enum import Enum
from typing import Any

from autotune_loader.results.result import Finding
from autotune_loader.values import WORTH_CLAIMING, Interval
from autotune_loader.values.units import bytes_text, counted, factor_text, number_text, seconds_text, share_text

_TEXTS = {
    "share": share_text,
    "bytes": bytes_text,
    "seconds": seconds_text,
    "number": number_text,
    "ratio": Interval.as_ratio,
    "confidence": lambda ratio: f"95% CI {ratio.limits(factor_text)}, " if ratio.is_telling else "",
}


class _Units(string.Formatter):
    """Fills in a template whose fields name their unit: "{wait:share} of the time", "{size:bytes}", "{rounds:# round}"."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("# "):
            return counted(int(value), format_spec[2:])
        text_of: Any = _TEXTS.get(format_spec)
        return str(super().format_field(value, format_spec) if text_of is None else text_of(value))


class Table(Enum):
    """Rows of sentences by name."""

    def __call__(self, **figures: Any) -> Finding:
        """What the row says of these figures."""
        return Finding(kind=self.kind, sentence=_Units().format(self.value, **figures))

    @property
    def kind(self) -> str:
        """`Finding.kind` of what the row says."""
        return self.name.lower()

    def said_by(self, finding: Finding | None) -> bool:
        """Whether a finding is what this row says."""
        return finding is not None and finding.kind == self.kind


class Bottleneck(Table):
    """What limits the rate."""

    STEP = "Bottleneck: the training step."
    CPU = "Bottleneck: CPU."
    STORAGE = "Bottleneck: waiting for storage or network."
    CORES = "Bottleneck: CPU contention (more runnable processes than cores)."
    TRANSFER = "Bottleneck: transferring batches from the workers to the training process."
    COPY = "Bottleneck: copying batches to the device."
    MEMORY = "Bottleneck: memory."
    START_UP = "Bottleneck: starting epochs, which takes {share:share} of the time."
    IN_MEMORY = "Bottleneck: loading data in the training process, {fetch:seconds} per batch."
    LITTLE = "This loader takes {share:share} of the time of all loaders."
    UNCLEAR = "Bottleneck: unclear."
    TOO_SHORT = "{batches:# batch}: too few to report a bottleneck."
    NO_STEP = "No training step was timed: each epoch ended after its first batch."
    NOTHING = "Nothing was measured."


class Fact(Table):
    """The figures behind a bottleneck."""

    WAITS = "The training loop waits for data {wait:share} of the time."
    AT_MOST = "With instant data, training would be at most {factor:.2f}x faster."
    ABOUT = "With instant data, training would be about {factor:.1f}x faster."
    MUCH = "With instant data, training would be more than 10x faster."
    WORKERS_AT_MOST = "DataLoader's workers could make it at most {factor:.2f}x faster."
    OF_CEILING = "It runs at {rate:number} {unit}; the step alone runs at {ceiling:number} {unit}."
    CPU_OF_BATCH = "Per batch: {cpu:seconds} of CPU to load, {step:seconds} to train."
    CORES = "{share:share} of {cores:# core} are busy."
    WAITED = "Loading a batch takes {fetch:seconds}, of which {cpu:seconds} are CPU time."
    FOR_A_CORE = "{share:share} of the wait is for a CPU core: more processes are ready to run than there are cores."
    SHARED_CORES = (
        "A step takes {step:seconds} in training and {alone:seconds} alone: it shares the CPU cores with the loader."
    )
    FETCHES = "Each worker spends {share:share} of its time loading data."
    STAGE_WAITS = "{share:share} of a worker's waiting is in {stage} ({where})."
    RECEIVING = "Receiving a batch of {size:bytes} takes {receive:seconds}."
    HANDED_OVER = (
        "Workers hand over a ready batch every {handed:seconds}, however many they are; the step alone takes "
        "{alone:seconds}."
    )
    PINNING = "Pinning a batch takes {pin:seconds}."
    COPYING = "Copying a batch of {size:bytes} to the device adds {copy:seconds} to its step."
    RECEIVING_ONE = "Receiving a batch takes {receive:seconds}."
    RAN_OUT = "{config} ran out of memory ({kind})."
    BUSY = "Other processes used {share:share} of the CPU."
    FORKED_INITIALIZED = "Workers are forked after this process initialized {accelerator}: they may crash or hang."
    FORKED_LARGE = (
        "Workers are forked from a process with {memory:bytes} of memory: each fork copies its page tables, and later each "
        "page that is written."
    )


class Cause(Table):
    """Why a loader costs time or memory; `where` is the line of the script that makes it."""

    WORKER_STARTS = "{where} starts {workers:# worker} in each of {epochs:# epoch}: training waits {seconds:seconds}."
    WORKER_IMPORTS = "Each worker of {where} imports or unpickles for {each:seconds}: training waits {seconds:seconds}."
    WORKER_INIT = "Each worker of {where} runs worker_init_fn for {each:seconds}: training waits {seconds:seconds}."
    COPIED_PAGES = (
        "A worker of {where} has copied {size:bytes} of shared memory: reading objects writes to their pages."
    )
    PINNING = "Training waits {seconds:seconds} for batches of {where} to be pinned, {each:seconds} per batch."
    MANY_TENSORS = "Training waits {seconds:seconds} for the transfer of batches of {where}, {tensors} tensors each."
    GARBAGE_COLLECTION = "Garbage collections take {share:share} of the time of {process} of {where}."
    SLOW_SAMPLES = (
        "Of {batches:# batch} of {where}, {slow} took {long:seconds} to load, others {usual:seconds}: training waits "
        "{seconds:seconds} for them."
    )
    SLOW_RANK = (
        "Rank {rank} waits {its:seconds} for batches of {where}, rank {other} {others:seconds}: in their steps, the others "
        "wait for rank {rank}."
    )
    IDLE_MEMORY = "{where} keeps {workers:# worker} with {size:bytes} of memory, idle {share:share} of the time."
    CORES = "Training waits {seconds:seconds} while workers of {where}, or its own process, are ready to run and have no core."
    STORAGE = "Training waits {seconds:seconds} while batches of {where} wait for storage, the network or a lock."
    DEVICE_IN_WORKER = "{count} of {started:# worker} of {where} initialized an accelerator: each takes memory of it."
    TRAINING_MEMORY = (
        "Workers of {where} are forked from a process with {memory:bytes} of memory: each fork copies its page tables, and "
        "later each page that is written."
    )


class Advice(Table):
    """What to do next."""

    DO_NOT_PIN = "Set pin_memory=False, or pin batches of the same size, whose memory is used again."
    FREEZE = "Call gc.collect() and gc.freeze() once the dataset is there, before iter(loader)."
    LATE_BATCHES = "`{command}` has other workers load on, and gives a late batch to a second one, in the same order."
    OUT_OF_ORDER = "Pass in_order=False to DataLoader, if batches may come in another order."
    STACK = "Stack the tensors of a batch in collate_fn, so that it has fewer."
    BALANCE_RANKS = "Give the ranks equal samples, or load faster on rank {rank}. There: {bottleneck}"
    LET_WORKERS_GO = "Set persistent_workers=False for this loader: its workers end with each epoch."
    LOAD_ON_CPU = "Load on the CPU in the dataset, and move batches to the device in the training loop."
    START_ONCE = "`{command}` imports and unpickles once, and starts workers from there."
    ONE_MESSAGE = "`{command}` sends a batch as one message; so does a collate_fn that stacks its tensors."
    MORE_WORKERS = "`{command}` tries more workers; larger reads (tar shards, Parquet) or a local disk help, too."

    LEAVE_IT = "Leave the loader as it is."
    SPEED_UP_STEP = "Speed up the step (torch.compile, mixed precision, a larger batch), not the loader."
    MORE_CORES = "Use a machine with more cores, or run fewer other processes during training."
    FEWER_WORKERS = "Use fewer than {workers} workers (num_workers=0 if the samples are in memory), or more cores."
    SPREAD_SHARDS = "Use at most {busy:# worker}, or write more shards: a worker without a shard is idle."
    CHEAPER_STAGE = (
        "Speed up {stage} ({where}), which takes {share:share} of a worker's CPU time ({cpu:seconds} per sample){how}."
    )
    CHEAPER_TRANSFORMS = (
        "Speed up the transforms (smaller images, a faster decoder): they take {cpu:seconds} of CPU per sample."
    )
    LARGER_READS = "Read larger chunks (tar shards, Parquet), or read from a local disk."
    TRANSFER_LESS = "Transfer less data (uint8 instead of float32, crops made in the worker): a batch has {size:bytes}."
    COPY_AHEAD = (
        'Copy batches ahead of the step: let tune(..., allow="device_prefetch") try it, or wrap the loader in '
        "DevicePrefetcher."
    )
    LARGER_BATCHES = "Use larger batches: transferring a small one takes hardly less time."
    AUTOLOADER_TRANSFERS = "Try AutoLoader(dataset, num_workers={workers}, tune=False), which transfers at less cost."
    MORE_SHARED_MEMORY = "Give the container more shared memory (docker run --shm-size=8g), or use smaller batches."
    SMALLER_WORKERS = "Use less memory per worker: numpy arrays, Arrow or memory-mapped files, not lists of objects."
    KEEP_WORKERS = "Set persistent_workers=True, unless workers must see changes that training makes to the dataset."
    WITHOUT_WORKERS = "Try num_workers=0: receiving a batch from a worker takes longer than loading it."
    KEEP_ITERATOR = "Call iter(loader) once per epoch: next(iter(loader)) starts a new epoch for every batch."
    BATCHED_FETCH = "Load a whole batch at once with __getitems__(indices): a sample takes only {sample:seconds}."
    FORKSERVER = (
        'Use multiprocessing_context="forkserver": the dataset is pickled once, and workers start as fast as with fork. The '
        'script needs `if __name__ == "__main__":`.'
    )
    FORKSERVER_BY_AUTOLOADER = (
        'Use AutoLoader or `run` with multiprocessing_context="forkserver": DataLoader would import and unpickle in each '
        'worker. The script needs `if __name__ == "__main__":`.'
    )
    RUN = "`{command}` tries other settings."
    RUN_WITH_WORKERS = "`{command}` tries worker processes (safe if your dataset works with num_workers>0)."


class Choice(Table):
    """What to use, and what it brings."""

    USE = "Use {best}{rate}."
    KEEP = "Keep {best}, your current setting{rate}."
    NOTHING_FASTER = "No other setting that was tried is more than {tolerance:share} faster."
    COSTS_LESS = "It uses fewer resources."
    IF_MEMORY = "Keep your settings if memory matters."
    NOT_COMPARED = "It was not compared with {baseline} in A/B rounds."
    SO_FAR = "This is the best so far."
    NOT_SETTLED = "Fastest trial so far: {best}, {factor:.1f}x faster than {baseline}. It is not confirmed yet."
    NOTHING_YET = "Best so far: {baseline}. Nothing else has been measured yet."
    REPORT = "{name}.report() shows the table."


class Undecided(Table):
    """Why a choice is a guess, and what would decide it."""

    NO_ROUNDS = "Inconclusive: no A/B round fit into the budget. Rerun with a larger budget."
    FEW_ROUNDS = "Inconclusive: only {rounds:# A/B round} fit into the budget. Rerun with a larger budget."
    CLOSE = (
        "Inconclusive: after {rounds:# A/B round} others may be {tolerance:share} faster. Rerun with a larger budget."
    )
    TOO_NOISY = "Inconclusive: others may be {tolerance:share} faster; in {rounds:# A/B round} the rates vary too much."
    BUSY = "Inconclusive: other processes used the CPU in {busy} of {rounds:# A/B round}. Rerun on an idle machine."
    FAILS_NOW = "Inconclusive: every setting that worked at first has failed since."
    ONE_TRIED = "Inconclusive: the budget ended before a second setting was measured. Rerun with a larger budget."


class Ended(Table):
    """Why a search tried nothing more."""

    SAFE = "Search ended: no other setting{which} is likely to be more than {tolerance:share} faster."
    CEILING = "Search ended: training is as fast as {ceiling}."
    EXPECTED = "Search ended: no other setting{which} is expected to be more than {tolerance:share} faster."
    ROUNDS = "Search ended: so many A/B rounds have run that further ones would hardly tell more."
    BUDGET = "Search ended: the next trial or A/B round would exceed the budget."
    FAILING = "Search ended: one trial after another failed."
    INTERRUPTED = "Search ended: it was interrupted."
    ASKED = "Search ended: study.stop() was called."
    FALLBACK = "No setting worked. Falling back to PyTorch's defaults."


class Kept(Table):
    """Why the number of workers stays what was asked for."""

    NO_CONSENT = "num_workers=0 disables workers: omit it in AutoLoader, or use `run --allow-workers`."
    FROZEN = "tune=False turns tuning off."
    OWN_ITERATOR = "{kind} has its own iterator."
    NOT_TUNED = "AutoLoader cannot tune it: {error}"
    ITERABLE = "The number of workers of an IterableDataset stays as it is."
    OUT_OF_ORDER = "in_order=False makes the order of batches depend on the number of workers."
    ONE_WORKER = "num_workers=1: one worker loads all batches in order. With num_workers=2 the number may change."
    WORKER_INIT = "worker_init_fn may depend on the number of workers."
    WORKER_INFO = "The dataset calls get_worker_info() and may depend on the number of workers."
    NO_GUARD = "Start method {method} would run the script again in each worker: add `if __name__ == '__main__':`."
    NOT_BEGUN = "Workers could not start with start method {method}: {error}"
    NOT_WAITING = "The training loop hardly waits for data ({wait:share} of the time)."
    TOO_SHORT = "The training was too short to try other settings."
    NOT_FASTER = "No other number of workers was significantly faster."
    NOT_SETTLED = "The training ended before the comparison of other numbers of workers."
    SAMPLES_DIFFER = "Batch {batch} of a worker differs from that of the training process."
    NOT_COMPARED = "A worker's batch cannot be compared with that of the training process: {error}"
    WORKER_ERROR = "A worker raised an exception that the training process does not: {error}"
    WORKERS_LOST = "Workers died repeatedly: {error}"
    DATASET_CHANGES = "Loading a sample modifies {what}; in a worker that change would be lost."
    SAMPLER_DRAWS = "The sampler draws from a global random generator between batches; give it its own generator."
    DAEMONIC = "This process is daemonic, so it cannot start workers."


class Caution(Table):
    """What should be known before a configuration is used."""

    FAILED = "{trials:# trial} failed ({kind}): {message}"
    BATCH_SIZE = "The batch size changes from {old} to {new}: adjust the learning rate and its schedule."
    OUT_OF_ORDER = "in_order=False: the order of batches differs between runs, even with a seed."
    EPOCH_NOT_SEEN = "persistent_workers=True: workers do not see set_epoch() of the dataset."
    WORKERS_KEPT = (
        "persistent_workers=True: workers do not see what is set on the dataset between epochs (such as dataset.size = 16). "
        "Try persistent_workers=False in DataLoader if they must."
    )
    STORAGE_LOST = "The storage of study={name!r} failed ({why}): the search went on in memory, in result.study."
    EPOCH_STARTS = (
        "Workers restart in each epoch, and epochs are short: whole epochs were compared; the rates shown exclude worker "
        "start-up."
    )
    FEWER_SAMPLES = "drop_last=True: each of {workers} workers drops its own last batch, so an epoch has fewer samples."
    DISTURBED = "Other processes used more than {limit:share} of the CPU in {busy} of {rounds:# A/B round}."
    NOT_WRITTEN = "{path} was not written ({why}). Save the result elsewhere with result.save()."
    CEILING_PASSED = "Steps ran at {alone:number} {unit} alone, at {rate:number} in training: no ceiling is reported."
    BATCH_SIZES_DIFFER = "Batch sizes differ ({sizes}): samples/s are compared, which says nothing about convergence."
    READ_TWICE = "Some of the {samples} samples were read twice, perhaps from memory: the first epoch may be slower."
    READ_AHEAD = "Thread {thread} reads batches ahead of training: the wait is that of the thread, not of training."
    WAITS_TOO_LONG = "{name}: the training loop waits {share:share} of its time; --fail-if-wait allows {most:share}."
    STARTS_ANEW = "With start method {method} each worker imports and unpickles everything again in each epoch: {why}."
    IDLE_WORKERS = "{idle} of {workers:# worker} delivered no batch."
    NOTE = "{text}"
    LACKS = "Samples and steps of the training may take another time than in trials ({step:seconds} a step): {text}"


class Source(Table):
    """Where bursts had their samples from, and where training will have them from."""

    NOT_STORAGE = "The trials read nothing from a disk: samples came from memory or over the network."
    STORAGE = "The trials read {sample:bytes} per sample from storage."
    STORAGE_ALWAYS = (
        "The trials read {sample:bytes} per sample from storage. So does training: the data (about {data:bytes}) do not fit "
        "into {memory:bytes} of memory."
    )
    STORAGE_AT_FIRST = (
        "The trials read {sample:bytes} per sample from storage. So does the first epoch; later, the data (about {data:bytes}) "
        "fit into memory."
    )


class Answer(Table):
    """Which of two is faster: the one wording, wherever a gain is told."""

    FASTER = "{name} is {ratio:ratio} faster than {other} ({ratio:confidence}{rounds:# A/B round})."
    SLOWER = "{name} is slower than {other}: {ratio:ratio} its rate ({ratio:confidence}{rounds:# A/B round})."
    EQUAL = (
        "{name} is as fast as {other} within {tolerance:share}: {ratio:ratio} its rate ({ratio:confidence}"
        "{rounds:# A/B round})."
    )
    NOT_SHOWN = (
        "{name} is not significantly faster or slower than {other}: {ratio:ratio} its rate ({ratio:confidence}"
        "{rounds:# A/B round})."
    )
    UNSURE = (
        "{name} ran at {ratio:ratio} the rate of {other} in {rounds:# A/B round}: too few rounds, or too noisy, for "
        "a confidence interval."
    )
    AT_SWITCH = "{name} ran at {ratio:ratio} the rate of {other} when it took over, without A/B rounds."
    FAILED = "{name} failed: {error}"
    ALONE = "Only {name} worked."
    NONE = "No loader worked."


def answer(name: str, ratio: Interval, other: str, tolerance: float = 0.02) -> Finding:
    """How much faster something was shown to be in A/B rounds; what lies within the tolerance is not called slower."""
    if ratio > WORTH_CLAIMING:
        row = Answer.FASTER
    elif 1 - tolerance <= ratio.low and ratio.high <= 1 + tolerance:
        row = Answer.EQUAL
    elif ratio < 1 / WORTH_CLAIMING:
        row = Answer.SLOWER
    else:
        row = Answer.NOT_SHOWN if ratio.is_telling else Answer.UNSURE
    return row(name=name, ratio=ratio, other=other, rounds=ratio.count, tolerance=tolerance)
