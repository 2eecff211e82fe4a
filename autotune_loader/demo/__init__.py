"""A small real job with much to gain: a CNN on 1,200 JPEG files behind a simulated object store.

    train.py  the script of a user: watched, tuned, and trained with what was found

Here: the store, `job()` with loader and model for a notebook, and `tour()`, which is `autotune-loader demo`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune_loader.values import MissingExtraError
from autotune_loader.values.units import rate_text

PICTURES, SIDE = 1200, 64
BEFORE, AFTER = 400, 6000
"""Samples of the training before and after tuning: some seconds each on two cores."""
LATENCY_S = 0.02
"""Of a request. An object store of a cloud takes 10 to 100 ms to the first byte."""
_kept = contextlib.ExitStack()
"""The stores of `job()`, which end with this process."""
atexit.register(_kept.close)


def make_jpegs(folder: Path) -> None:
    """Write the pictures, soft noise with sides of 64 pixels, as 00000.jpg and so on.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    import numpy as np

    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("the demo", "pillow", "demo") from error
    coarse = np.random.default_rng(0).integers(0, 256, (PICTURES, SIDE // 8, SIDE // 8, 3), np.uint8)
    for index, pixels in enumerate(coarse):
        Image.fromarray(pixels).resize((SIDE, SIDE)).save(folder / f"{index:05d}.jpg", quality=85)


@contextlib.contextmanager
def store(latency_s: float = LATENCY_S) -> Iterator[str]:
    """The URL of a simulated object store with the pictures; the folder that they lie in where `latency_s` is 0."""
    with tempfile.TemporaryDirectory(prefix="autotune-loader-demo-") as folder:
        make_jpegs(Path(folder))
        if not latency_s:
            yield folder
            return
        serving = f"import asyncio; from {__name__} import serve; asyncio.run(serve({folder!r}, {latency_s}))"
        pipe = subprocess.PIPE  # a session of its own: Ctrl-C is for those that read from it
        process = subprocess.Popen(
            [sys.executable, "-c", serving], stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        assert process.stdout is not None
        url = process.stdout.readline().strip()  # by then it has the pictures in memory
    with process:
        try:
            yield url
        finally:
            process.terminate()


async def serve(folder: str, latency_s: float) -> None:
    """Real HTTP on 127.0.0.1: print the URL, and answer with the files of a folder, each so long after it was asked for."""
    files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = files.get(head.split(b" ", 2)[1].decode().lstrip("/"))
                await asyncio.sleep(latency_s)
                status = b"404 Not Found" if body is None else b"200 OK"
                writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body or b""), body or b""))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}", flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)  # until the process that started this one closes it, or is gone


def job(latency_s: float = LATENCY_S) -> tuple[Any, Any]:
    """A loader and a model, as for `tune(*job())`; the store lives as long as this process."""
    from autotune_loader.demo.train import make_job

    return make_job(_kept.enter_context(store(latency_s)))


def tour(latency_s: float = LATENCY_S, budget: str = "45s") -> int:
    """Watch the script, tune it, train with what was found, and print both rates; the exit code of what failed, or 0.

    All files lie in a temporary folder, which is gone afterwards.

    Raises:
        ValueError: `budget` is none that `tune()` takes.
        MissingExtraError: The extra `demo` is not installed.
    """
    try:
        from autotune_loader.tuning.run import TuneOptions
    except ModuleNotFoundError as error:
        raise MissingExtraError("the demo", str(error.name), "demo") from error
    TuneOptions(budget=budget)  # now, and not after the first step
    with tempfile.TemporaryDirectory(prefix="autotune-loader-demo-") as folder, store(latency_s) as source:
        where = f"a simulated object store, {1000 * latency_s:.0f} ms a request" if latency_s else "the local disk"
        print(f"The job: a small CNN on {PICTURES:,} JPEG files from {where}. All files are temporary.", flush=True)
        shutil.copy(Path(__file__).with_name("train.py"), folder)
        watch, tune = ["watch", "--json", "report.json", "train.py", source], ["tune", "train.py:make_job"]
        before = BEFORE if latency_s else AFTER
        rates, titles = [], ("1. Measure how long the script waits", "2. Tune its loader", "3. Train with loader.json")
        commands = ([*watch, str(before)], [*tune, "--budget", budget, "--", source], [*watch, str(AFTER)])
        for title, command in zip(titles, commands, strict=True):
            print(f"\n## {title}\n\n$ autotune-loader {shlex.join(command)}\n", flush=True)
            if code := _run(command, folder):
                return code
            if command[0] == "watch":
                rates.append(json.loads(Path(folder, "report.json").read_text())["loaders"][0]["samples_per_s"])
        settings = json.loads(Path(folder, "loader.json").read_text())["dataloader_kwargs"]
        slow, fast = rates
        told = f"With loader.json: {rate_text(fast)}, {fast / slow:.1f}x faster"
        if not settings["num_workers"]:
            told = f"With loader.json, which has the same settings: {rate_text(fast)}. Nothing to gain here"
        print(
            f"\nBefore: {rate_text(slow)}. {told} (single runs, worker start-up included).\n"
            f"loader.json: {settings}\n"
            "Your own script: autotune-loader watch train.py"
        )
    return 0


def _run(command: list[str], folder: str) -> int:
    """Run one command line; after Ctrl-C, which it gets, too, its own end is awaited."""
    process = subprocess.Popen([sys.executable, "-m", "autotune_loader", *command], cwd=folder)
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code  # by a signal, as a shell tells it
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
