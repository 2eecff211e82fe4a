"""What a training loop has shown of a loader, as a result."""

from __future__ import annotations

from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.evidence import Ask
from autotune_loader.decision.space import Space
from autotune_loader.live.result import result_of
from autotune_loader.pipeline.site import NOWHERE, Site
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from tests.support import FakeClock, SimulatedMachine, SimulatedSource


def test_what_is_as_fast_and_dearer_is_marked_in_the_table() -> None:
    # GIVEN blocks of a machine on which seven workers are enough
    machine = SimulatedMachine(cores=16, cpu_s=0.001, wait_s=0.05, step_s=0.01, noise_sd=0.002)
    beliefs = Beliefs(Space(max_workers=16), TwinContext(usable_cores=16, consumer_cores=0.1))
    source = SimulatedSource(machine, FakeClock())
    for count in (1, 2, 7, 8, 7, 8):
        beliefs.log.add(source.gather(LoaderConfig(num_workers=count), Ask()))
    one, seven, eight = (LoaderConfig(num_workers=count) for count in (1, 7, 8))
    site = Site(line=NOWHERE, dataset="Numbers", samples=None, batch_size=8, is_shuffled=False)

    # WHEN seven were chosen
    result = result_of(beliefs, site=site, asked=one, best=seven, seconds=9.0, said=())

    # THEN eight count as equally fast, and nothing cheaper does
    assert result.finals.as_fast == (eight,)
    assert any(line.lstrip().startswith("=") and " 8 " in line for line in result.report().splitlines())
    # AND where something is chosen that the belief does not call the fastest, nothing is said to be as fast
    assert result_of(beliefs, site=site, asked=one, best=one, seconds=9.0, said=()).finals.as_fast == ()
