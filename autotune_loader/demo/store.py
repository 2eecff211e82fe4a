"""A simulated object store: real HTTP on 127.0.0.1, by one process that answers each request after a while.

python -m autotune_loader.demo.store FOLDER SECONDS prints its URL, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path


async def serve(files: dict[str, bytes], latency_s: float) -> None:
    """Answer with these files, each `latency_s` after it was asked for."""

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


if __name__ == "__main__":
    folder, latency_s = Path(sys.argv[1]), float(sys.argv[2])
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve({path.name: path.read_bytes() for path in folder.iterdir()}, latency_s))
