"""The paired rounds of a tuning run: who enters them, and one round after the other until the policy has enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune_loader.decision.acquisition import shortlist
from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.evidence import Ask, Evidence, EvidenceSource, Kind
from autotune_loader.decision.policy import Compare, compare
from autotune_loader.decision.posterior import TYPICAL_NOISE
from autotune_loader.decision.race import LEAST_OF_WINNER, Race, RaceOutcome, RaceRules
from autotune_loader.decision.selection import cost
from autotune_loader.decision.variants import faster_variants
from autotune_loader.tuning.burst_source import BurstSource
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.paired import paired
from autotune_loader.tuning.schedule import (
    FINALS_PATIENCE_S,
    EpochLength,
    as_trained,
    with_fewer_rounds,
)
from autotune_loader.tuning.state import Job, SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure

CEILINGS = 3
"""So often the step alone is timed between the rounds: once after each of the first."""

MOST_OVERRUN, LEAST_OVERRUN_S = 0.1, 2.0
"""A first round that would overrun the budget by more than this share, and by more than these seconds, is not begun."""


class Finals:
    """Rounds between the shortlist and the baseline.

    Args:
        source: observes.
        beliefs: what the search knows; the rounds add to it.
        state: of the search; told whether whole epochs are run.
        options: how to search.
        job: what is known of the training job.
    """

    def __init__(
        self, source: BurstSource, beliefs: Beliefs, state: SearchState, options: TuneOptions, job: Job
    ) -> None:
        self._source = source
        self._beliefs = beliefs
        self._state = state
        self._options = options
        self._job = job

    def run(
        self,
        seconds_left: Callable[[], float],
        on_round: Callable[[int, dict[LoaderConfig, float], float], None],
    ) -> RaceOutcome | None:
        """The outcome; None where nothing can race or no round was completed."""
        epoch = EpochLength.of(self._state.trials, self._job.epoch_batches)
        short = epoch if epoch is not None and epoch.is_short(seconds_left()) else None
        self._state.whole_epochs = short is not None
        candidates = self._candidates(seconds_left())
        if not candidates:
            return None
        # What is believed is believed of steady rates; also few rounds of epochs choose better without it.
        believe = self._beliefs.posterior if short is None else lambda: None
        entrants = [self._as_trained(config) for config in candidates]
        baseline = self._state.baseline
        runs = self._beliefs.feasible(baseline) is None
        race = Race(entrants, baseline, self._rules(short), believe, baseline_runs=runs)
        return run_rounds(
            race,
            self._source,
            self._state.kind,
            seconds_left=seconds_left,
            seed=self._options.seed,
            learn=lambda gathered: self._learn(race, gathered, seconds_left()),
            on_round=on_round,
        )

    def _candidates(self, seconds_left: float) -> list[LoaderConfig]:
        """Who races, as time allows: best guess first."""
        whole, tolerance = self._state.whole_epochs, self._options.tolerance
        known = self._beliefs.over_epochs(self._as_trained) if whole else self._beliefs.posterior()
        if known is None:
            return []
        space = self._beliefs.space
        chosen = [*faster_variants(self._state.trials, space, tolerance), *shortlist(known, space, tolerance)]
        rule = self._beliefs.plain_rule()
        chosen += [rule] if rule is not None else []
        # One that hangs in a round takes the time of many rounds.
        chosen = [config for config in chosen if not self._beliefs.is_unproven(config)]
        if not chosen:
            return []
        if whole:
            # Of these the search's bursts, which know steady rates alone, tell least; and no belief decides between them.
            chosen[1:1] = with_fewer_rounds(chosen[0], self._job.epoch_batches or 1, space.max_workers)
        least_rounds = LEAST_OF_WINNER if whole else 1
        while len(chosen) > 1 and least_rounds * self._round_s(chosen) > seconds_left:
            chosen.pop()
        late_s = self._round_s(chosen) - seconds_left
        return chosen if late_s <= max(MOST_OVERRUN * self._options.budget_s, LEAST_OVERRUN_S) else []

    def _rules(self, epoch: EpochLength | None) -> RaceRules:
        return RaceRules(
            tolerance=self._options.tolerance,
            cost=lambda config: cost(config, self._beliefs.space),
            patience_s=FINALS_PATIENCE_S,
            noise_sd=TYPICAL_NOISE if epoch is None else epoch.noise_sd,
            ceiling=lambda config: rate.value if (rate := self._state.ceiling_of(config)) is not None else None,
        )

    def _learn(self, race: Race, gathered: Sequence[Evidence], seconds_left: float) -> None:
        """What a round adds to the beliefs, and who else becomes a candidate by it."""
        for evidence in gathered:
            self._beliefs.log.add(evidence)
        if seconds_left > 0:
            self._time_step_alone(race)
        self._beliefs.log.leave_out(race.disturbed())
        known = None if self._state.whole_epochs else self._beliefs.posterior()
        if known is not None and race.is_admitting():
            nominated = shortlist(known, self._beliefs.space, self._options.tolerance)
            race.admit([self._name_in(race, each) for each in nominated if not self._beliefs.is_unproven(each)])

    def _time_step_alone(self, race: Race) -> None:
        """The step alone once more, under the load that the rounds run under."""
        incumbent = race.incumbent()
        if not self._job.has_step or incumbent is None:
            return
        beside = self._state.ceilings_beside.setdefault(incumbent.batch_size, [])
        if len(beside) < CEILINGS:
            threads = incumbent.consumer_threads if incumbent.batch_size is not None else self._state.best_threads
            measured = self._source.step_ceiling(threads, incumbent.batch_size)
            if not isinstance(measured, Failure):
                beside.append(measured)

    def _name_in(self, race: Race, config: LoaderConfig) -> LoaderConfig:
        """As what a nominated configuration races: as the one that cannot be told from it, if that races already."""
        same = [each for each in race.configs if each.key() == config.key()]
        return same[0] if same else self._as_trained(config)

    def _as_trained(self, config: LoaderConfig) -> LoaderConfig:
        return as_trained(config, self._beliefs.space, self._state.trials, self._job.epoch_batches)

    def _round_s(self, candidates: Sequence[LoaderConfig]) -> float:
        ask = Ask(phase="compare", kind=self._state.kind)
        return round_s(self._source, [*candidates, self._state.baseline], ask)


def run_rounds(
    race: Race,
    source: EvidenceSource,
    kind: Kind = "steady",
    *,
    seconds_left: Callable[[], float],
    seed: int = 0,
    learn: Callable[[Sequence[Evidence]], None] = lambda gathered: None,
    on_round: Callable[[int, dict[LoaderConfig, float], float], None] = lambda number, rates, seconds_left: None,
) -> RaceOutcome | None:
    """Run rounds until the policy has enough of them.

    Args:
        race: who takes part.
        source: observes.
        kind: what is observed.
        seconds_left: until the budget is spent.
        seed: of the order within the rounds.
        learn: told the evidence of each round, which the race has recorded.
        on_round: told its number from 1, its rates, and the seconds left.
    """

    def sides(_number: int) -> Sequence[LoaderConfig]:
        todo = compare(race, seconds_left())
        return todo.configs if isinstance(todo, Compare) else ()

    def observe(config: LoaderConfig, number: int) -> Evidence:
        return source.gather(config, Ask(phase="compare", kind=kind, group=number))

    def record(gathered: Sequence[tuple[LoaderConfig, Evidence]], seconds: float) -> None:
        done = race.record([(config, each.outcome) for config, each in gathered], seconds)
        learn([each for _, each in gathered])
        on_round(len(race.rounds), dict(done.rates), seconds_left())

    paired(sides, observe, record, seed=seed, clock=lambda: -seconds_left())
    return race.outcome()


def round_s(source: EvidenceSource, configs: Sequence[LoaderConfig], ask: Ask | None = None) -> float:
    """Seconds that one round of these will take."""
    ask = Ask(phase="compare") if ask is None else ask
    return sum(source.cost_s(config, ask) for config in {each.key(): each for each in configs}.values())
