"""AutoLoader on ranks under torchrun's agent: they change at the same batches, and each reads its own share."""

from __future__ import annotations

from pathlib import Path

import pytest
from preloaded import PreloadedPython
from test_two_ranks import HARD_DEADLINE_S, run_ranks

pytestmark = [pytest.mark.system, pytest.mark.timeout(HARD_DEADLINE_S + 20)]

DDP = """
    import torch.distributed as dist
    from torch.utils.data import DistributedSampler
    from autotune_loader import AutoLoader

    class Slower(Points):
        def __len__(self):
            return 512 * dist.get_world_size()
        def __getitem__(self, index):
            time.sleep(0.004 if os.environ["RANK"] == "1" else 0.002)  # one rank's storage is slower
            return torch.full((4,), index / 2048), index % 2, index

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = DistributedSampler(Slower(), shuffle=True)
        loader = AutoLoader(Slower(), batch_size=8, sampler=sampler)
        seen = []
        for epoch in range(6):
            sampler.set_epoch(epoch)
            seen.append([])
            for x, y, index in loader:
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen[-1] += index.tolist()
        changes = [[c.batch, c.config.num_workers] for c in loader.traces.changes if c.reason == "change"]
        say(seen=seen, changes=changes, config=loader.config.to_dict(), settled=loader._tuning.tuner.is_settled,
            blocks=len(loader.history), weights=model.module.weight.flatten().tolist())
        dist.barrier()
        leave()
        dist.destroy_process_group()
"""


def test_all_ranks_change_at_the_same_batches(tmp_path: Path, preloaded: PreloadedPython) -> None:
    ranks = 3
    said = run_ranks(DDP, tmp_path, preloaded, ranks=ranks)

    assert said[0]["changes"]
    for other in said[1:]:
        assert other["changes"] == said[0]["changes"]
        assert other["config"] == said[0]["config"]
        assert other["weights"] == pytest.approx(said[0]["weights"])
    for shares in zip(*(each["seen"] for each in said), strict=True):
        assert sorted(index for share in shares for index in share) == list(range(512 * ranks))
