"""Several processes decode what one does, and end together."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ula_jax.process_worker import CASES, DEVICES, decode
from ula_jax.processes import Launch, together
from ula_jax.report import UserError

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@contextmanager
def started(processes: int, folder: Path, *arguments: str, job: int | None = None):
    """Workers, of DEVICES devices in all, with stdout and stderr in files; none of them outlives the context. `job`:
    as SLURM starts them."""
    each = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", each, os.environ["XLA_FLAGS"])
    command = [sys.executable, "-m", "tests.ula_jax.process_worker", "--out", str(folder), *arguments]
    command += ["--processes", str(processes)]
    port, workers = free_port(), []
    try:
        for process in range(processes):
            told, slurm = ["--process", str(process), "--coordinator", f"localhost:{port}"], {}
            if job:
                names = {
                    "JOB_ID": job,
                    "STEP_NODELIST": "localhost",
                    "NTASKS": processes,
                    "PROCID": process,
                    "LOCALID": 0,
                }
                told, slurm = [], {f"SLURM_{name}": str(value) for name, value in names.items()}
            with (folder / f"{process}.out").open("w") as out, (folder / f"{process}.err").open("w") as err:
                environment = {**os.environ, "XLA_FLAGS": flags, **slurm}
                workers.append(subprocess.Popen([*command, *told], stdout=out, stderr=err, cwd=ROOT, env=environment))
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def said(folder: Path, process: int) -> str:
    return (folder / f"{process}.err").read_text()


@pytest.fixture(scope="module")
def alone():
    """What one process with as many devices finds, asked for once."""
    found = {}

    def ask(case):
        if case not in found:
            found[case] = decode(case)
        return found[case]

    return ask


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "cases"), [(2, ["tp gpu_only", "tp ula", "dp hisparse"]), (4, ["tp hisparse", "dp ula"])]
)
def test_several_processes_decode_what_one_does(processes, cases, alone, tmp_path):
    """Tokens, logits bit for bit, every counter and every copy; invariants are checked after each step."""
    with started(processes, tmp_path, "--cases", *cases) as workers:
        codes = [worker.wait(timeout=240) for worker in workers]
    assert codes == [0] * processes, said(tmp_path, 0)[-2000:]
    for process in range(processes):
        found = json.loads((tmp_path / f"{process}.json").read_text())
        assert list(found) == cases
        for case in cases:
            expected = alone(case)
            for what in expected:
                assert found[case][what] == expected[what], (process, case, what)


def test_the_cases_move_rows_and_compile_once(alone):
    for case in CASES:
        assert (alone(case)["evictions"] > 0) == ("gpu_only" not in case)
        assert alone(case)["compiled"] == 1


def until_ready(folder: Path, workers) -> None:
    limit = time.monotonic() + 120
    while not all("ready" in (folder / f"{i}.out").read_text() for i in range(len(workers))):
        assert time.monotonic() < limit
        assert all(worker.poll() is None for worker in workers), [said(folder, i)[-1000:] for i in range(len(workers))]
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "victim"), [(4, 2), (2, 0)])
def test_a_process_that_dies_ends_the_others_with_its_name(processes, victim, tmp_path):
    """Killed while all decode; process 0 is the one that the others meet at."""
    with started(processes, tmp_path, "--do", "forever") as workers:
        until_ready(tmp_path, workers)
        pid, killed = workers[victim].pid, time.monotonic()
        workers[victim].kill()
        others = [i for i in range(processes) if i != victim]
        codes = [workers[i].wait(timeout=60) for i in others]
        assert time.monotonic() - killed < 60
    assert all(code != 0 for code in codes)
    for other in others:
        line = rf"error: process {victim} \({socket.gethostname()}, pid {pid}\) died; process {other} \(.*\) ends"
        assert re.search(line, said(tmp_path, other)), said(tmp_path, other)[-3000:]


def test_a_process_that_fails_ends_the_others_with_its_reason(tmp_path):
    with started(2, tmp_path, "--do", "fail") as workers:
        assert [worker.wait(timeout=60) for worker in workers] == [1, 1]
    assert "ValueError: no reason" in said(tmp_path, 1)
    assert re.search(r"error: process 1 \(.*\) failed: ValueError: no reason; process 0", said(tmp_path, 0))


def slurm_job() -> int:
    """A job number from which JAX derives a free port."""
    for job in range(4096, 8192):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", job % 4096 + 61440)):
                return job
    raise RuntimeError("no free port")


def test_processes_that_differ_are_told_and_slurm_is_understood(tmp_path):
    with started(2, tmp_path, "--do", "differ", job=slurm_job()) as workers:
        assert [worker.wait(timeout=60) for worker in workers] == [1, 1]
    message = r"prompts: expected the same in all 2 processes, found others than process 0 has in \[1\]; start all"
    assert re.search(message, said(tmp_path, 0) + said(tmp_path, 1))


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch(0), "processes: expected at least 1, found 0"),
        (Launch(2, 1), "expected --process and --coordinator together, found 1 and None"),
        (Launch(2, 2, "localhost:1"), "process: expected 0 to 1 of --processes 2, found 2"),
        (Launch(2, 0, "localhost"), "coordinator: expected HOST:PORT, found 'localhost'"),
    ],
)
def test_bad_launches_are_refused(launch, message):
    with pytest.raises(UserError, match=message):
        launch.check()


def test_a_taken_port_is_refused():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        message = f"coordinator: expected a free port, found {port} taken"
        with pytest.raises(SystemExit, match=message), together(Launch(2, 0, f"localhost:{port}")):
            pass
