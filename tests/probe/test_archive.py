"""A value in a file without a name: every byte once, nothing of the user's changed, nothing left."""

from __future__ import annotations

import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from autotune_loader.probe.archive import Archive, TooLargeError, size_of

MIB = 1 << 20


def written(value, max_bytes=256 * MIB):
    archive = Archive()
    archive.write(value, max_bytes)
    return archive


def windows_of(series):
    return [series[begin : begin + 4096] for begin in range(0, 45_000, 10)]


ROWS, SERIES = torch.rand(1000, 4096), np.arange(50_000, dtype=np.float32)


@pytest.mark.parametrize(("own", "values"), [(ROWS, list(ROWS)), (SERIES, windows_of(SERIES))])
def test_memory_that_values_share_is_in_the_file_once(own, values):
    archive = written(values)

    assert os.fstat(archive.fd).st_size < own.nbytes + MIB
    assert size_of(values) < own.nbytes + MIB
    assert all(np.array_equal(a, b) and type(a) is type(b) for a, b in zip(values, archive.read(), strict=True))


@pytest.mark.parametrize(
    "held",
    [
        torch.zeros(0),
        torch.rand(30, 30).T,
        torch.ones(9, 9, dtype=torch.bfloat16)[::2],
        torch.nn.Parameter(torch.rand(99)),
        torch.rand(99, requires_grad=True),
        torch.rand(99, dtype=torch.complex64).conj(),
        torch.rand(9, 9).to_sparse(),
    ],
)
def test_unusual_tensors_travel(held):
    with torch.device("cpu" if held.is_sparse else "meta"):  # a default of the caller's, such as "cuda"
        back = written(held).read()

    assert torch.equal(back.detach().to_dense(), held.detach().to_dense())
    for name in ("dtype", "requires_grad", "layout", "__class__"):
        assert getattr(back, name) == getattr(held, name)


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000), st.booleans()), min_size=1, max_size=20)
)
def test_any_slices_come_back_as_they_were(slices):
    memory = np.arange(6000, dtype=np.int16)
    values = [
        torch.from_numpy(memory)[begin : begin + size] if is_tensor else memory[begin : begin + size]
        for begin, size, is_tensor in slices
    ]

    assert all(np.array_equal(a, b) for a, b in zip(values, written(values).read(), strict=True))


def test_what_is_a_map_of_a_file_is_named_and_the_file_is_safe(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(MIB, dtype=np.int64).tofile(path)
    tokens = np.memmap(path, dtype=np.int64, mode="r+")

    archive = written([tokens, tokens[1000:2000]])

    assert os.fstat(archive.fd).st_size < MIB // 8
    whole, part = archive.read()
    assert np.array_equal(whole, tokens)
    assert np.array_equal(part, tokens[1000:2000])
    whole[0] = 7
    assert np.fromfile(path, dtype=np.int64)[0] == 0


@pytest.mark.parametrize("held", [torch.zeros(MIB), np.zeros(MIB), b"x" * 2 * MIB, ["word"] * MIB])
def test_what_is_too_large_is_refused_with_its_limit(held):
    for measure in (written, size_of):
        with pytest.raises(TooLargeError, match="larger than 1 MiB"):
            measure(held, MIB)
