"""Reading and writing traces by file name."""

from pathlib import Path

from ula_jax.traces import cachesim, parquet
from ula_jax.traces.trace import Trace

ORACLE = (".oracleGeneral", ".bin")


def load(path: Path, rounds: cachesim.Rounds = "time") -> Trace:
    """A trace from `.parquet` (ours), `.oracleGeneral`, `.bin` (libCacheSim's) or `.csv`, the last three also `.zst`.

    `rounds` says what a round is in a foreign file: all records of one time, or each record. ValueError if the file is
    missing, foreign or damaged.
    """
    kind = _kind(path)
    if kind == ".parquet":
        return parquet.read_trace(path)
    read = cachesim.read_csv if kind == ".csv" else cachesim.read_oracle_general
    return read(path, rounds=rounds)


def save(trace: Trace, path: Path, stream: int | None = None) -> None:
    """Write a trace in the format that the file name says.

    Foreign formats hold one stream and no scores; ValueError unless `stream` says which of several.
    """
    kind = _kind(path)
    if kind == ".parquet":
        return parquet.write_trace(trace, path)
    count = len(trace.positions)
    if (stream is None and count > 1) or not 0 <= (stream or 0) < count:
        raise ValueError(
            f"{path}: expected a stream from 0 to {count - 1} ({', '.join(trace.stream_names[:8])}, ...), found "
            f"{stream}; this format holds one, say which"
        )
    write = cachesim.write_csv if kind == ".csv" else cachesim.write_oracle_general
    write(trace, path, stream=stream or 0)


def _kind(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix == ".zst" else path
    kind = plain.suffix
    if kind not in (".parquet", ".csv", *ORACLE) or (kind == ".parquet" and plain != path):
        raise ValueError(
            f"{path}: expected a name ending in .parquet, .csv, {', '.join(ORACLE)} (the last three also with .zst), "
            f"found {path.suffix or 'no ending'!r}; rename the file"
        )
    return kind
