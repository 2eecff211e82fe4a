"""Everything that can be said of a run, one row a sentence. Rows are called with their figures and give a `Finding`.

`Bottleneck.CPU()` is `Finding(kind="cpu", sentence="Bottleneck: CPU.")`. Figures are written in the unit that the row names.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from autotune_loader.diagnosis.units import Units, is_claimed, is_slower
from autotune_loader.results.record import Finding
from autotune_loader.values import Interval

_UNITS = Units()


class Table(Enum):
    """Rows of sentences by name."""

    def __call__(self, **figures: Any) -> Finding:
        """What the row says of these figures.

        Raises:
            KeyError: the row needs a figure that was not given.
        """
        return Finding(kind=self.kind, sentence=_UNITS.format(self.value, **figures))

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
    CORES = "Bottleneck: waiting for a core."
    HAND_OVER = "Bottleneck: handing batches over from workers to the training process."
    COPY = "Bottleneck: copying batches to the device."
    MEMORY = "Bottleneck: memory."
    START_UP = "Bottleneck: starting epochs, which takes {share:share} of the time."
    IN_MEMORY = "Bottleneck: none. Fetching a batch takes {fetch:seconds}, so no worker is needed."
    LITTLE = "This loader is {share:share} of the time with all loaders."
    UNCLEAR = "Bottleneck: unclear."
    TOO_SHORT = "{batches:# batch}: too few to say anything."
    NO_STEP = "No step could be timed: each epoch was left after its first batch."
    NOTHING = "Nothing was measured."


class Fact(Table):
    """The figures behind a bottleneck."""

    WAITS = "The loop waits for data {wait:share} of the time."
    AT_MOST = "A loader without any cost would make training at most {factor:.2f}x as fast."
    OF_CEILING = "That is {rate:rate} of the {ceiling:rate} that the step alone can do."
    CPU_OF_BATCH = "A batch takes {cpu:seconds} of CPU to fetch and {step:seconds} of step."
    CORES = "{share:share} of {cores:# core} are in use."
    WAITED = "Of {fetch:seconds} per batch, a fetch computes for {cpu:seconds}."
    FOR_A_CORE = (
        "{share:share} of the waiting is for a core: more is ready to run than the {cores:# core} can run at once."
    )
    SHARED_CORES = (
        "A step takes {step:seconds} in the loop and {alone:seconds} alone, as loader and step share the cores."
    )
    FETCHES = "A worker fetches for {share:share} of its time."
    STAGE_WAITS = "{stage} takes {share:share} of a worker's waiting ({where})."
    RECEIVING = "Receiving a batch of {size:bytes} takes {receive:seconds}."
    COPYING = "Copying a batch of {size:bytes} adds {copy:seconds} to its step."
    RECEIVING_ONE = "Receiving a batch takes {receive:seconds}."
    RAN_OUT = "{config} ran out of it ({kind})."
    BUSY = "Other processes kept {share:share} of the cores busy."


class Advice(Table):
    """What to do next."""

    LEAVE_IT = "Leave the loader as it is."
    SPEED_UP_STEP = "Speed up the step (torch.compile, mixed precision, a larger batch), not the loader."
    MORE_CORES = "Use a machine with more cores, or run less beside the training."
    FEWER_WORKERS = "Use fewer workers than {workers}, or a machine with more cores."
    SPREAD_SHARDS = "Use at most {busy:# worker}, or make more shards: each worker needs one of its own."
    CHEAPER_STAGE = "Make {stage} cheaper ({where}){how}: {share:share} of a worker's CPU, {cpu:seconds} per sample."
    CHEAPER_TRANSFORMS = "Make transforms cheaper (smaller images, a faster decoder): {cpu:seconds} of CPU per sample."
    LARGER_READS = "Read larger pieces (tar shards, Parquet), or from a local disk."
    SEND_LESS = "Send less per batch (uint8 instead of float32, cropped in the worker): it carries {size:bytes}."
    COPY_AHEAD = 'Copy ahead of the step: tune(..., allow="device_prefetch") tries it, DevicePrefetcher does it.'
    HAND_OVER_LESS_OFTEN = "Hand over less often, in larger batches: even a small one takes {receive:seconds}."
    AUTOLOADER_HANDS_OVER = "Try AutoLoader(dataset, num_workers={workers}, tune=False), which hands over at less cost."
    MORE_SHARED_MEMORY = "Give the container more shared memory (docker run --shm-size=8g), or make batches smaller."
    SMALLER_WORKERS = "Make a worker smaller: numpy arrays, Arrow or memory-mapped files instead of lists of objects."
    KEEP_WORKERS = "Keep workers (persistent_workers=True), unless they have to see what training changes."
    WITHOUT_WORKERS = "Try num_workers=0: receiving a batch from a worker takes longer than fetching it."
    KEEP_ITERATOR = "Call iter(loader) once an epoch: next(iter(loader)) begins an epoch for each batch."
    BATCHED_FETCH = "Fetch a whole batch at once, by __getitems__(indices): a sample takes only {sample:seconds}."
    RUN = "`{command}` tries other settings."
    RUN_WITH_WORKERS = "`{command}` tries workers (safe if the dataset works with num_workers=2)."


class Choice(Table):
    """What to use, and what it brings."""

    USE = "Use {best}{rate}."
    KEEP = "Keep {best}, which you have{rate}."
    NOTHING_FASTER = "Nothing that was tried is faster by more than {tolerance:share}."
    COSTS_LESS = "It costs less, and counts as equally fast."
    IF_MEMORY = "Keep your settings if memory matters."
    NOT_COMPARED = "It was not timed in turns with {baseline}."
    SO_FAR = "This is the best so far."
    NOT_SETTLED = "{best} so far, {factor:.1f}x the rate of {baseline}; not settled yet."
    NOTHING_YET = "{baseline} so far; nothing else has been measured yet."
    REPORT = "{name}.report() has the table."


class Undecided(Table):
    """Why a choice is a guess, and what would decide it."""

    NO_ROUNDS = "No paired round fitted into the budget; a larger budget would decide it."
    FEW_ROUNDS = "Only {rounds:# paired round} fitted into the budget; a larger budget would decide it."
    CLOSE = "After {rounds:# paired round} others may be {tolerance:share} faster; a larger budget would decide it."
    TOO_NOISY = "After {rounds:# paired round} others may be {tolerance:share} faster; rates vary too much to tell."
    BUSY = "Other processes kept the cores busy in {busy} of {rounds:# paired round}; a quiet machine would decide it."
    ONE_TRIED = "The budget ended before a second configuration was measured; a larger budget would decide it."


class Ended(Table):
    """Why a search tried nothing more."""

    SAFE = "Search ended: no other setting{which} is likely to be more than {tolerance:share} faster."
    CEILING = "Search ended: it is as fast as the step alone."
    NOT_WORTH_IT = "Search ended: no further burst was worth its seconds."
    BUDGET = "Search ended: the next burst or round would not have fitted into the budget."
    FAILING = "Search ended: one burst after the other failed."
    INTERRUPTED = "Search ended: it was interrupted."
    ASKED = "Search ended: the study was told to stop."
    FALLBACK = "No configuration worked; torch's defaults are given as a fallback."


class Kept(Table):
    """Why the number of workers stays what was asked for."""

    NO_CONSENT = (
        "num_workers is 0, so no worker is used: AutoLoader without num_workers=0, or `run --workers`, may use some."
    )
    FROZEN = "tune=False was asked for."
    OWN_ITERATOR = "{kind} makes iterators of its own."
    NOT_TUNED = "AutoLoader cannot tune it: {error}"
    ITERABLE = "An IterableDataset reads by itself: its workers are as asked."
    OUT_OF_ORDER = "in_order=False leaves the order to the workers that were asked for."
    ONE_WORKER = (
        "num_workers=1 was asked for: one worker makes all batches, one after the other; 2 would let it change."
    )
    WORKER_INIT = "worker_init_fn is the script's own and may depend on the number of workers."
    WORKER_INFO = "The dataset asks get_worker_info() for the number of its worker, or of workers."
    START_METHOD = "Workers are started by {method}, so none is used unless num_workers asks for them."
    NOT_WAITING = "The loop hardly waits for data ({wait:share} of the time)."
    TOO_SHORT = "The training was too short to try anything."
    NOT_FASTER = "No other number of workers was shown to be faster."
    NOT_SETTLED = "Other numbers of workers were still being tried."
    SAMPLES_DIFFER = "Batch {batch} of a worker was not the loop's own ({what}): samples depend on who makes them."
    WORKER_ERROR = "A worker raised what the loop does not: {error}"
    WORKERS_LOST = "Workers ended again and again: {error}"
    DATASET_CHANGES = "Fetching a sample changes {what}, which the loop would not see from workers."
    SAMPLER_DRAWS = "The sampler draws from a global generator between two batches; one of its own would allow workers."
    DAEMONIC = "This process is daemonic, so it may have no children."


class Caution(Table):
    """What should be known before a configuration is used."""

    FAILED = "{trials:# trial} failed ({kind}): {message}"
    BATCH_SIZE = "The batch size was tuned from {old} to {new}: tune the learning rate and its schedule again."
    OUT_OF_ORDER = "in_order=False: the order differs from run to run, even with a seed."
    EPOCH_NOT_SEEN = "persistent_workers=True: set_epoch() on the dataset does not reach workers that live on."
    EPOCH_STARTS = (
        "Workers start anew in each epoch, and epochs are short: the choice is by whole epochs, rates and ratios are without "
        "the starts."
    )
    FEWER_SAMPLES = "drop_last=True: each of {workers} workers drops its own last batch, so an epoch has fewer samples."
    DISTURBED = "Other processes kept more than {limit:share} of the cores busy in {busy} of {rounds:# paired round}."
    NOT_WRITTEN = "{path} was not written ({why}). result.save() elsewhere keeps the result."
    CEILING_PASSED = "The step alone had {alone:rate}, and in the loop {rate:rate}: the ceiling is left out."
    BATCH_SIZES_DIFFER = "Batch sizes differ ({sizes}): samples/s are compared, which tells nothing of learning."
    READ_AHEAD = "Thread {thread} takes the batches ahead of the training: waiting is the thread's, not the training's."
    WAITS_TOO_LONG = "{name}: the loop waits {share:share} of its time, and --fail-if-wait allows {most:share}."
    IDLE_WORKERS = "{idle} of {workers:# worker} delivered nothing."
    NOTE = "{text}"


class Source(Table):
    """Where bursts had their samples from, and where training will have them from."""

    NOT_STORAGE = "Bursts read nothing from storage: their samples were in memory, or came over a network."
    STORAGE = "Bursts read {sample:bytes} per sample from storage."
    STORAGE_ALWAYS = (
        "Bursts read {sample:bytes} per sample from storage. Training will, too: the data, about {data:bytes}, do not fit "
        "into {memory:bytes} of memory."
    )
    STORAGE_AT_FIRST = (
        "Bursts read {sample:bytes} per sample from storage. Training will in its first epoch: the data, about {data:bytes}, "
        "then fit into memory."
    )


class Answer(Table):
    """Which of two is faster: the one wording, wherever a gain is told."""

    FASTER = "{name} is {ratio:ratio} as fast as {other} in {rounds:# paired round}."
    SLOWER = "{name} is slower: {ratio:ratio} as fast as {other} in {rounds:# paired round}."
    EQUAL = "{name} is as fast as {other}, within {tolerance:share}: {ratio:ratio} in {rounds:# paired round}."
    NOT_SHOWN = "{name} is not shown to be faster than {other}: {ratio:ratio} as fast in {rounds:# paired round}."
    UNSURE = "{name} was {ratio:ratio} as fast as {other} in {rounds:# paired round}: too few, or too noisy, for an interval."
    FAILED = "{name} failed: {error}"
    ALONE = "{name} is the only side that worked."
    NONE = "No side worked."


def answer(name: str, ratio: Interval, other: str, tolerance: float = 0.02) -> Finding:
    """How many times as fast something was shown to be in paired rounds."""
    if is_claimed(ratio):
        row = Answer.FASTER
    elif is_slower(ratio):
        row = Answer.SLOWER
    elif 1 - tolerance <= ratio.low and ratio.high <= 1 + tolerance:
        row = Answer.EQUAL
    else:
        row = Answer.NOT_SHOWN if ratio.is_telling else Answer.UNSURE
    return row(name=name, ratio=ratio, other=other, rounds=ratio.count, tolerance=tolerance)
