"""One experiment run by several processes: how they start, agree, and end together.

Every process runs the same command and the same schedule, so each hands JAX the same batches; JAX has each compute for
its own devices and sends between them what a mesh of one process would. `docs/processes.md` has launch lines.
"""

import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import NoReturn

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from ula_jax.report import UserError, or_exit, stderr

START = 60
"""Seconds within which all processes must have started."""
BEAT, SILENCE = 2.0, 30.0
"""Seconds between two signs of life, and without one until a process counts as dead."""
HEARTBEAT = 45
"""The same of JAX's own service, which has the last word where ours cannot speak; it names no host."""
GRACE = 2.0
"""Seconds in which the end of one process explains the errors of others."""
DONE = b"done"


@dataclass(frozen=True)
class Launch:
    """Which of the processes that run one command together this is."""

    processes: int = 1
    """Processes that run this command together, each with an equal part of the devices."""
    process: int | None = None
    """Which of them this is, from 0. None: SLURM or Open MPI says."""
    coordinator: str | None = None
    """HOST:PORT where the others find process 0: its machine, any free port. None: SLURM or Open MPI says."""

    def check(self) -> None:
        """UserError unless the three go together."""
        if self.processes < 1:
            raise UserError(f"processes: expected at least 1, found {self.processes}; pass a positive number")
        if (self.process is None) != (self.coordinator is None):
            raise UserError(
                f"processes: expected --process and --coordinator together, found {self.process} and "
                f"{self.coordinator}; give both, or neither where srun or mpirun starts the processes"
            )
        if self.process is not None and not 0 <= self.process < self.processes:
            raise UserError(
                f"process: expected 0 to {self.processes - 1} of --processes {self.processes}, found {self.process}; "
                "number the processes from 0"
            )
        host, _, port = (self.coordinator or "host:1").rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(
                f"coordinator: expected HOST:PORT, found {self.coordinator!r}; name process 0's machine and a free port"
            )


@contextmanager
def together(launch: Launch) -> Iterator[bool]:
    """Make this one of `launch.processes` processes for as long as the context lasts; call before JAX makes its client.

    Yields whether this is the process that prints and writes files. An error in the context, or the death of any
    process, ends all of them: exit status 1 and a line on stderr that names the process.
    """
    or_exit(Launch.check, launch)
    if launch.processes == 1:
        yield True
        return
    or_exit(_join, launch)
    first = jax.process_index() == 0
    stderr.quiet = not first
    watch = _Watch(launch)
    try:
        yield first
    except BaseException as error:
        watch.fail(error)
    watch.finish()


def agree(what: str, value: object) -> None:
    """ValueError unless `value` reads the same in every process. To be called by all of them."""
    digest = np.frombuffer(sha256(repr(value).encode()).digest(), np.uint8)
    every = process_allgather(digest)
    others = np.flatnonzero((every != every[0]).any(axis=1)).tolist()
    if others:
        raise ValueError(
            f"{what}: expected the same in all {len(every)} processes, found others than process 0 has in {others}; "
            "start all with the same command, code and files"
        )


def _join(launch: Launch) -> None:
    given = launch.process is not None
    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM from ending a process
    if launch.process == 0:
        port = int(str(launch.coordinator).rpartition(":")[2])
        try:
            socket.create_server(("", port)).close()
        except OSError as wrong:
            raise UserError(f"coordinator: expected a free port, found {port} taken ({wrong}); use another") from wrong
    late = threading.Timer(START, _give_up, [launch])
    late.start()
    try:
        jax.distributed.initialize(
            launch.coordinator, launch.processes, launch.process,
            cluster_detection_method="deactivate" if given else None,
            initialization_timeout=2 * START, heartbeat_timeout_seconds=HEARTBEAT,
        )  # fmt: skip
    except ValueError as wrong:
        raise UserError(
            f"processes: expected --process and --coordinator, or a start by srun or mpirun, found neither ({wrong}); "
            "docs/processes.md has launch lines"
        ) from wrong
    finally:
        late.cancel()
    devices = [sum(d.process_index == p for d in jax.devices()) for p in range(jax.process_count())]
    if len(set(devices)) > 1:
        raise UserError(f"devices: expected as many in each process, found {devices}; give each the same number")


def _give_up(launch: Launch) -> None:
    """JAX would abort with a stack trace; it does not say who is missing either."""
    me = "" if launch.process is None else f" by process {launch.process}"
    where = launch.coordinator or "the coordinator that srun or mpirun named"
    print(
        f"error: processes: expected all {launch.processes} at {where} within {START} s, found{me} that some are "
        "missing; start all with the same --processes and --coordinator, and read the stderr of those that ended",
        file=sys.stderr,
    )
    _exit()


class _Watch:
    """Process 0 holds a connection to each of the others, tells them who ended, and is watched by them in turn.

    The kernel closes the connections of a process that dies, at once; a machine that is gone falls silent.
    """

    def __init__(self, launch: Launch):
        me, count = jax.process_index(), jax.process_count()
        listener, key = None, secrets.token_hex(16)
        if me == 0:
            listener = Listener(("", 0), backlog=count, authkey=key.encode())
        port = listener.address[1] if listener else 0
        about = f"{socket.gethostname()} {os.getpid()} {port} {key}".encode().ljust(256)
        every = [bytes(row).decode().split() for row in process_allgather(np.frombuffer(about, np.uint8))]
        self._names = [f"process {i} ({host}, pid {pid})" for i, (host, pid, _, _) in enumerate(every)]
        self._me = self._names[me]
        self._bonds: dict[Connection, str] = {}
        if listener:
            for _ in range(count - 1):
                bond = listener.accept()
                self._bonds[bond] = self._names[int(bond.recv_bytes())]
            listener.close()
        else:
            host, _, port, key = every[0]
            if launch.coordinator:
                host = launch.coordinator.rpartition(":")[0]
            bond = Client((host, int(port)), authkey=key.encode())
            bond.send_bytes(str(me).encode())
            self._bonds[bond] = self._names[0]
        self._sending, self._over, self._ended = threading.Lock(), threading.Event(), threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def finish(self) -> None:
        """Leave once all have come so far."""
        self._over.set()
        self._say(DONE)
        jax.distributed.shutdown()

    def fail(self, error: BaseException) -> NoReturn:
        """End this process and, through the others' watches, all. Who ended before has caused it."""
        if not self._ended.wait(GRACE):
            if isinstance(error, SystemExit):
                print(error.code, file=sys.stderr)
            else:
                sys.excepthook(type(error), error, error.__traceback__)
            reason = traceback.format_exception_only(error)[-1].strip()
            self._say(f"{self._me} failed: {reason}".encode())
        _exit()

    def _listen(self) -> None:
        heard = dict.fromkeys(self._bonds, time.monotonic())
        spoke = 0.0
        while self._bonds and not self._over.is_set():
            for bond in wait(list(self._bonds), BEAT):
                assert isinstance(bond, Connection)
                try:
                    word = bond.recv_bytes()
                except (EOFError, OSError):
                    return self._end(f"{self._bonds[bond]} died".encode())
                heard[bond] = time.monotonic()
                if word == DONE:
                    del self._bonds[bond]
                elif word:
                    return self._end(word)
            now = time.monotonic()
            for bond, name in self._bonds.items():
                if now - heard[bond] > SILENCE:
                    return self._end(f"{name} has been silent for {SILENCE:.0f} s".encode())
            if now - spoke >= BEAT:
                self._say(b"")
                spoke = now

    def _end(self, word: bytes) -> None:
        if self._over.is_set():
            return
        print(f"error: {word.decode()}; {self._me} ends with it", file=sys.stderr, flush=True)
        self._ended.set()
        self._say(word)
        time.sleep(GRACE)
        _exit()

    def _say(self, word: bytes) -> None:
        with self._sending:
            for bond in list(self._bonds):
                with suppress(OSError):  # it is gone: reading from it tells
                    bond.send_bytes(word)


def _exit() -> NoReturn:
    """Without JAX's farewell, which would wait for processes that wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
