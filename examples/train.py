"""A training script like many: `python examples/train.py`, or `autotune-loader watch examples/train.py`."""

import sys

import torch
from torch.utils.data import DataLoader, Subset

from autotune_loader.demo import JpegFolder, SmallCnn, cache_folder, make_jpegs


def main(epochs: int = 1) -> None:
    torch.manual_seed(0)
    make_jpegs(cache_folder())
    pictures = JpegFolder(cache_folder())
    train = DataLoader(Subset(pictures, range(480)), batch_size=32, shuffle=True)
    test = DataLoader(Subset(pictures, range(480, 640)), batch_size=32)
    model = SmallCnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        model.train()
        for x, y in train:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [torch.nn.functional.cross_entropy(model(x), y).item() for x, y in test]
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.2f} on the test pictures")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
