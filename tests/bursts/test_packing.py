"""A value in a file without a name: every byte once, nothing of the user's changed, nothing left."""

import os

import numpy as np
import pytest
import torch

from autotune_loader.bursts.packing import TooLargeError, read_archive, write_archive

MIB = 1 << 20


def written(value, max_bytes=256 * MIB):
    """The value as it is read, and the bytes of its file."""
    fd = os.memfd_create("test")
    try:
        write_archive(fd, value, max_bytes)
        return read_archive(fd), os.fstat(fd).st_size
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "held",
    [
        torch.zeros(0),
        torch.rand(30, 30).T,
        torch.ones(9, 9, dtype=torch.bfloat16)[::2],
        torch.nn.Parameter(torch.rand(99)),
        torch.rand(99, dtype=torch.complex64).conj(),
        torch.rand(9, 9).to_sparse(),
    ],
)
def test_unusual_tensors_travel(held):
    with torch.device("cpu" if held.is_sparse else "meta"):  # a default of the caller's, such as "cuda"
        back, _ = written(held)
    assert torch.equal(back.detach().to_dense(), held.detach().to_dense())
    for name in ("dtype", "requires_grad", "layout", "__class__"):
        assert getattr(back, name) == getattr(held, name)


def test_shared_memory_travels_once_and_a_map_of_a_file_by_its_name_and_the_file_is_safe(tmp_path):
    rows = torch.rand(1000, 4096)
    back, size = written(list(rows))
    assert size < rows.nbytes + MIB
    assert all(torch.equal(a, b) for a, b in zip(rows, back, strict=True))

    path = tmp_path / "tokens.bin"
    np.arange(MIB, dtype=np.int64).tofile(path)
    tokens = np.memmap(path, dtype=np.int64, mode="r+")
    (whole, part), size = written([tokens, tokens[1000:2000]])
    assert size < MIB // 8
    assert np.array_equal(whole, tokens)
    assert np.array_equal(part, tokens[1000:2000])
    whole[0] = 7
    assert np.fromfile(path, dtype=np.int64)[0] == 0


@pytest.mark.parametrize("held", [torch.zeros(MIB), b"x" * 2 * MIB, ["word"] * MIB])
def test_what_is_too_large_is_refused_with_its_limit(held):
    with pytest.raises(TooLargeError, match="larger than 1 MiB"):
        written(held, MIB)
