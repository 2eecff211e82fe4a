"""What does it take to watch and to tune scripts that nobody here wrote, and what is their waiting before and after?

    python -m studies.scripts [NAME ...] [--mirror FOLDER] [--limit SECONDS] [--traceml ROUNDS]

A script is fetched once into ~/.cache/autotune_loader_scripts: from a bare repository OWNER+NAME/repo below --mirror,
else from GitHub. Each script is run plainly, under `watch` and under `run`, from equal copies; it is interrupted after --limit
seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.libraries.environments import Environment
from studies.scripts.jobs import JOBS, Job

ROOT = Path(__file__).parents[2]
CACHE = Path.home() / ".cache" / "autotune_loader_scripts"
RESULTS = Path(__file__).with_name("results.jsonl")
LIMIT_S = 90.0
"""Long enough to settle; what trains for longer is ended as by Ctrl-C."""
GRACE_S = 20.0
TRACEML = Environment("scripts-traceml", ("traceml-ai",))


@dataclass(frozen=True)
class Run:
    """How a script ended."""

    code: int
    seconds: float
    was_ended: bool
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any] | None:
        """The report that `--json` puts on the last line."""
        for line in reversed(self.err.splitlines()):
            if line.startswith('{"verb"'):
                report: dict[str, Any] = json.loads(line)
                return report
        return None


def source_of(job: Job, mirror: Path | None) -> Path:
    """What the job needs of its repository."""
    folder = CACHE / job.name.replace(" ", "-")
    if folder.exists():
        return folder
    bare = mirror / job.repository.replace("/", "+") / "repo" if mirror is not None else None
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        if bare is None or not bare.exists():
            bare = Path(scratch, "bare")
            clone = ["git", "clone", "-q", "--bare", "--depth", "1", "--filter=blob:none"]
            subprocess.run([*clone, f"https://github.com/{job.repository}", bare], check=True)
        made = Path(scratch, "files")
        made.mkdir()
        archive = ["git", f"--git-dir={bare}", "archive", "HEAD", *job.files]
        tar = subprocess.run(archive, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", made], input=tar, check=True)
        made.rename(folder)
    return folder


def run(job: Job, folder: Path, limit_s: float, *before: str) -> Run:
    """Run its script in a folder, after these arguments of Python, for so long at most."""
    command = [job.environment.python, *before, job.script, *job.arguments]
    return _run(command, folder, _environ(job, folder, str(ROOT)), limit_s)


def run_with_traceml(job: Job, folder: Path, limit_s: float) -> Run:
    """Run its script by `traceml run`, with its training step marked as TraceML's guide says, where no framework has it."""
    if job.step is not None:
        enter = "traced_step = traceml_ai.trace_step(model); traced_step.__enter__()"
        job.step.mark(folder, "import traceml_ai; traceml_ai.init()", enter, "traced_step.__exit__(None, None, None)")
    command = [str(Path(TRACEML.python).with_name("traceml")), "run", job.script, "--args", *job.arguments]
    libraries = Path(job.environment.python).parents[1].glob("lib/python*/site-packages")
    return _run(command, folder, _environ(job, folder, *map(str, libraries)), limit_s)


def _environ(job: Job, folder: Path, *paths: str) -> dict[str, str]:
    own = dict(job.environ)
    if "PYTHONPATH" in own:
        paths = (*paths, str(folder / own["PYTHONPATH"]))
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)}


def _run(command: list[str], folder: Path, environ: dict[str, str], limit_s: float) -> Run:
    began, was_ended = time.monotonic(), False
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        was_ended = True
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
    return Run(process.returncode, time.monotonic() - began, was_ended, out, err)


def traceml_says(done: Run, folder: Path) -> dict[str, Any]:
    """The verdict of TraceML, and the share of a step that it calls waiting for input, from its summary."""
    texts = [path.read_text() for path in folder.glob("logs/*/final_summary.txt")]
    if not texts:
        return {"problem": f"exit code {done.code}: {(done.err.strip().splitlines() or ['?'])[-1][:200]}"}
    verdict = re.search(r"Verdict: (.*?) {2,}", texts[0])
    waits = re.search(r"Input Wait +[\d.]+ ms +(<?\d+%)", texts[0])
    return {"verdict": verdict and verdict[1], "waits": waits and waits[1]}


@contextlib.contextmanager
def copy_of(job: Job, source: Path) -> Iterator[Path]:
    """A copy of its files, with its data."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "job")
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git"))
        job.prepare(folder)
        yield folder


def study(job: Job, mirror: Path | None, limit_s: float) -> dict[str, Any]:
    """One line of the table."""
    told: dict[str, Any] = {"name": job.name, "script": f"{job.repository}: {job.script}"}
    if (failed := job.environment.make()) is not None:
        return {**told, "problem": failed}
    try:
        source = source_of(job, mirror)
    except subprocess.CalledProcessError as error:
        return {**told, "problem": f"cannot be fetched: {error}"}
    codes = {}
    for verb in ("plain", "watch", "run"):
        with copy_of(job, source) as folder:
            done = run(job, folder, limit_s, *([] if verb == "plain" else ["-m", "autotune_loader", verb, "--json"]))
        codes[verb] = "ended" if done.was_ended else str(done.code)
        if done.code and not done.was_ended:
            told.setdefault("problem", f"{verb}: {(done.err.strip().splitlines() or ['?'])[-1][:300]}")
        if (report := done.report) is not None:
            told[verb] = report["loaders"]
        told[f"{verb}_s"] = round(done.seconds, 1)
    told["codes"] = codes
    return told


def compare(job: Job, mirror: Path | None, limit_s: float, rounds: int) -> dict[str, Any]:
    """TraceML's verdict, and the seconds of each whole run: plainly, under `watch` and under TraceML, in turns."""
    source = source_of(job, mirror)
    says: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {"plain": [], "watch": [], "traceml": []}
    for _ in range(rounds):
        for name, taken in seconds.items():
            with copy_of(job, source) as folder:
                if name == "traceml":
                    done = run_with_traceml(job, folder, limit_s)
                    says = traceml_says(done, folder)
                else:
                    done = run(job, folder, limit_s, *(["-m", "autotune_loader", "watch"] if name == "watch" else []))
            if not done.was_ended:
                taken.append(round(done.seconds, 2))
    return {**says, "seconds": seconds}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| script | what it took | loader | settings | waits | what binds | under `run` | waits then |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        took = row.get("problem", "nothing")
        if not row.get("watch"):
            lines.append(f"| {row['name']} | {took} | | | | | | |")
            continue
        after = {each["name"]: each for each in row.get("run", ())}
        for number, each in enumerate(row["watch"]):
            then = after.get(each["name"])
            cells = [
                *((row["name"], took) if not number else ("", "")),
                f"`{each['name']}` {each['contents']}",
                _settings(each["settings"]),
                _share(each["wait_share"]),
                each["binding"],
                "-" if then is None else then["why_watched"] or _settings(then["settings_now"]),
                "-" if then is None else _share(then["wait_share"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| script | TraceML says | its input wait | plain, s | `watch`, s | TraceML, s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if (said := row.get("traceml")) is not None:
            took = [", ".join(map(str, each)) or "ended" for each in said["seconds"].values()]
            says = said.get("problem") or said["verdict"]
            lines.append(f"| {' | '.join([row['name'], says, said.get('waits') or '-', *took])} |")
    return "\n".join(lines)


def _settings(kwargs: dict[str, Any]) -> str:
    prefetch = f", prefetch {kwargs['prefetch_factor']}" if kwargs.get("prefetch_factor") else ""
    return f"{kwargs['num_workers']} workers{prefetch}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="parts of the names of jobs; all by default")
    parser.add_argument("--mirror", type=Path, help="folder of bare repositories")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of each run")
    parser.add_argument("--traceml", type=int, metavar="ROUNDS", help="compare with TraceML instead")
    wanted = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    if wanted.traceml and (failed := TRACEML.make()) is not None:
        raise SystemExit(failed)
    known = {}
    if RESULTS.exists():
        known = {row["name"]: row for row in map(json.loads, RESULTS.read_text().splitlines())}
    for job in JOBS:
        if not wanted.names or any(name in job.name for name in wanted.names):
            if wanted.traceml:
                found = {"traceml": compare(job, wanted.mirror, wanted.limit, wanted.traceml)}
                known[job.name] = known.get(job.name, {"name": job.name}) | found
            else:
                kept = {name: each for name, each in known.get(job.name, {}).items() if name == "traceml"}
                known[job.name] = study(job, wanted.mirror, wanted.limit) | kept
            RESULTS.write_text("".join(json.dumps(known[each.name]) + "\n" for each in JOBS if each.name in known))
    print(table([known[job.name] for job in JOBS if job.name in known]))


if __name__ == "__main__":
    main()
