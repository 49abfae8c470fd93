"""Files that are written whole or not at all, and output that may end before the work does."""

import io
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Characters of tables that a narrow encoding may lack, in as many characters.
_PLAIN = {"± ": "+-", "±": "~", "–": "-", "²": "2"}


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to, which takes the place of ``path`` when the block ends.

    Where the block raises, such as on a full disk or by Ctrl-C, ``path`` stays what it was. Missing
    folders are made. What is no ordinary file, such as /dev/stdout, is written to as it is.

    :param path: the file; of a link the file that it leads to.
    :raises IsADirectoryError: where it is a folder.
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


class LenientStream(io.TextIOBase):
    """Text for a stream, for as long as the stream takes it; later text is dropped.

    A reader such as ``head`` may close a pipe early, and a stream may be closed from the start:
    neither ends the work. Characters that the stream's encoding lacks are replaced.

    :param stream: such as ``sys.stdout``; None where the process has none.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write what can be written; returns the length of ``text``."""
        if self.stream is not None:
            try:
                self.stream.write(_encodable(text, self.encoding))
            except (OSError, ValueError):  # the latter for a closed stream
                self._give_up()
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        if self.stream is not None:
            try:
                self.stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def fileno(self) -> int:
        """The descriptor of the file behind it.

        :raises OSError: where there is none.
        """
        if self.stream is None:
            raise OSError("the stream is closed")
        return self.stream.fileno()

    def isatty(self) -> bool:
        """Return True where a terminal shows it."""
        try:
            return self.stream is not None and self.stream.isatty()
        except ValueError:
            return False

    def _give_up(self) -> None:
        """Python flushes the stream once more at its exit, which must not fail again."""
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
