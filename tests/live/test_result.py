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
    # GIVEN blocks of a machine on which eight workers are enough
    machine = SimulatedMachine(cores=16, cpu_s=0.001, wait_s=0.05, step_s=0.01, noise_sd=0.02)
    beliefs = Beliefs(Space(max_workers=16), TwinContext(usable_cores=16, consumer_cores=0.1))
    source = SimulatedSource(machine, FakeClock())
    for count in (1, 2, 8, 12, 8, 12):
        beliefs.log.add(source.gather(LoaderConfig(num_workers=count), Ask()))
    one, eight, twelve = (LoaderConfig(num_workers=count) for count in (1, 8, 12))
    site = Site(line=NOWHERE, dataset="Numbers", samples=None, batch_size=8, is_shuffled=False)

    # WHEN eight were chosen
    result = result_of(beliefs, site=site, asked=one, best=eight, seconds=9.0, said=())

    # THEN twelve count as equally fast, and nothing cheaper does
    assert result.finals.as_fast == (twelve,)
    assert any(line.lstrip().startswith("=") and " 12 " in line for line in result.report().splitlines())
    # AND where something is chosen that the belief does not call the fastest, nothing is said to be as fast
    assert result_of(beliefs, site=site, asked=one, best=one, seconds=9.0, said=()).finals.as_fast == ()
