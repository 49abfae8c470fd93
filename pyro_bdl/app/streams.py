"""Output to streams that may be closed early, or that lack characters."""

import io
import os
from typing import Any

# Substitutes of the same length for characters in tables that an encoding may lack.
_PLAIN = {"± ": "+-", "±": "~", "–": "-", "²": "2"}


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
        self._call("write", _encodable(text, self.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the underlying stream."""
        self._call("flush")

    def fileno(self) -> int:
        """Return the file descriptor of the underlying stream.

        :raises OSError: if there is none.
        """
        if self.stream is None:
            raise OSError("the stream is closed")
        return self.stream.fileno()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return bool(self._call("isatty"))

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method, or drop this and all later text where the stream is closed."""
        if self.stream is None:
            return None
        try:
            return getattr(self.stream, method)(*args)
        except (OSError, ValueError):  # ValueError is raised by a closed stream
            stream, self.stream = self.stream, None
        try:  # Python flushes the stream again at exit, which must not fail
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            pass
        return None


def _encodable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        for character, plain in _PLAIN.items():
            text = text.replace(character, plain)
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text
