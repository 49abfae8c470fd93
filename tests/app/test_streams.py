"""Output to streams that are closed early, or that lack characters."""

import io
import os
import subprocess
import sys

import pytest

from pyro_bdl.app import streams


def test_a_narrow_encoding_gets_other_characters_of_the_same_width():
    raw = io.BytesIO()
    stream = streams.LenientStream(io.TextIOWrapper(raw, encoding="ascii"))
    print("1.0 ± 0.2  –  MMD²  größe", file=stream, flush=True)
    assert raw.getvalue() == b"1.0 +-0.2  -  MMD2  gr\\xf6\\xdfe\n"
    assert stream.encoding == "ascii" and not stream.isatty()


def test_a_stream_that_is_closed_or_none():
    closed = io.StringIO()
    closed.close()
    for stream in (streams.LenientStream(closed), streams.LenientStream(None)):
        print("text", file=stream, flush=True)
        stream.flush()
        assert not stream.isatty() and stream.encoding == "utf-8"


@pytest.mark.skipif(os.name != "posix", reason="of POSIX pipes")
def test_a_pipe_that_was_closed_ends_nothing(tmp_path):
    """``| true``: the work goes on to its end, without a traceback and with its own exit code."""
    script = tmp_path / "work.py"
    script.write_text(
        "import importlib.util, sys, pathlib, time\n"
        "spec = importlib.util.spec_from_file_location('files', sys.argv[1])\n"
        "files = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(files)\n"
        "sys.stdout = files.LenientStream(sys.stdout)\n"
        "for _ in range(50): print('x' * 10000, flush=True)\n"
        "pathlib.Path(sys.argv[2]).write_text('done')\n"
        "sys.exit(3)\n"
    )
    module = streams.__file__
    done = tmp_path / "done"
    reader, writer = os.pipe()
    os.close(reader)
    work = subprocess.run(
        [sys.executable, str(script), module, str(done)],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert work.returncode == 3 and work.stderr == b"" and done.read_text() == "done"
