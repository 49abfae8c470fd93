"""Files that are written completely or not at all, and what saved work is recognized by; output to
streams that may be closed early."""

import io
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

# Substitutes of the same length for characters in tables that an encoding may lack.
_PLAIN = {"± ": "+-", "±": "~", "–": "-", "²": "2"}
_SAME = 1e-4  # relative: sums in float32 depend on the number of threads


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it replaces ``path`` when the block ends.

    If the block raises, for example on a full disk or by Ctrl-C, ``path`` stays as it was. Missing
    folders are made. Special files such as /dev/stdout are written to directly.

    :param path: the file; symbolic links are followed.
    :raises IsADirectoryError: if the path is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"'{path}' is a folder: name a file, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()
    part = target.with_name(f".{target.stem}.{secrets.token_hex(4)}{target.suffix}")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def require_same(place: str, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Check that saved work is of a run with this run's fingerprint.

    :param place: the saved work in words, for errors.
    :param saved: its settings (numbers, strings, sequences) and arrays, such as log densities.
    :param ours: those of this run. Settings must be equal, arrays up to 1e-4 of their largest.
    :raises ValueError: if they differ, with the first name that does.
    """
    for name in {**saved, **ours}:
        theirs, own = saved.get(name), ours.get(name)
        if isinstance(own, np.ndarray | Tensor):
            if theirs is None or not _equal(np.asarray(theirs), np.asarray(own)):
                raise ValueError(
                    f"{place} is of another run (its {name} differ): it belongs to another "
                    "program, other data or other starts; give the same, or name another place"
                )
        elif theirs != own:
            raise ValueError(
                f"{place} is of a run with {name}={theirs!r}, and this one has {name}={own!r}: "
                "give the same, or name another place"
            )


def _equal(theirs: np.ndarray, own: np.ndarray) -> bool:
    if theirs.shape != own.shape:
        return False
    scale = np.abs(own[np.isfinite(own)]).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        near = (theirs == own) | (np.abs(theirs - own) <= _SAME * scale)
    return bool((near | (np.isnan(theirs) & np.isnan(own))).all())


class LenientStream(io.TextIOBase):
    """A text stream that drops its text once the underlying stream is closed.

    A reader such as ``head`` may close a pipe early, or the stream may be closed from the start;
    neither raises an error. Characters that the stream's encoding lacks are replaced.

    :param stream: a stream such as ``sys.stdout``; None if the process has none.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write as much of the text as possible; return the length of ``text``."""
        if self.stream is not None:
            try:
                self.stream.write(_encodable(text, self.encoding))
            except (OSError, ValueError):  # ValueError is raised by a closed stream
                self._give_up()
        return len(text)

    def flush(self) -> None:
        """Flush the underlying stream."""
        if self.stream is not None:
            try:
                self.stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def fileno(self) -> int:
        """Return the file descriptor of the underlying stream.

        :raises OSError: if there is none.
        """
        if self.stream is None:
            raise OSError("the stream is closed")
        return self.stream.fileno()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        try:
            return self.stream is not None and self.stream.isatty()
        except ValueError:
            return False

    def _give_up(self) -> None:
        """Drop all later text. Python flushes the stream again at exit, which must not fail."""
        stream, self.stream = self.stream, None
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            pass


def _encodable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        for character, plain in _PLAIN.items():
            text = text.replace(character, plain)
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text
