"""Messages on stderr, and the second Ctrl-C."""

import os
import signal
import subprocess
import sys
import warnings

import pytest

from pyro_bdl.cli import entry as cli
from pyro_bdl.cli.terminal import gives_up_at_second_interrupt, told_on_stderr
from pyro_bdl.errors import BdlWarning
from pyro_bdl.utils.progress import logger

# It neither ends nor lets Python's own handler run: the first signal is lost.
STUCK = """
import signal, sys, time
from pyro_bdl.cli.terminal import gives_up_at_second_interrupt
with gives_up_at_second_interrupt():
    signal.signal(signal.SIGINT, lambda *_: None)
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
"""


def test_the_second_interrupt_ends_what_is_stuck():
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    try:
        process.wait(0.3)
        raise AssertionError("the first Ctrl-C must leave it to the handler")
    except subprocess.TimeoutExpired:
        pass
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 130 and "given up" in said


@pytest.fixture
def heard():
    """Ctrl-C is heard, also where the tests were started in the background."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_ctrl_c_while_the_process_exits_is_left_to_the_system(heard, monkeypatch):
    """Python's own handler would print a traceback from whatever cleans up."""
    monkeypatch.setattr(cli, "main", lambda: 3)
    with pytest.raises(SystemExit) as stopped:
        cli.script()
    assert stopped.value.code == 3 and signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_one_interrupt_is_handled_as_usual_and_all_is_put_back(heard):
    before = signal.set_wakeup_fd(-1)
    try:
        with gives_up_at_second_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10**7):
                pass
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("there was no KeyboardInterrupt")
    assert signal.set_wakeup_fd(before) == -1


def test_messages_of_the_logger_are_lines_of_ours(capsys):
    with told_on_stderr():
        logger.warning("mind the gap")
    logger.warning("nobody hears this")
    assert capsys.readouterr().err == "pyro-bdl: mind the gap\n"


def test_a_warning_is_shown_once_and_those_of_others_are_not_ours(capsys):
    shown = cli._shown_once()
    with told_on_stderr(), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown
        for _ in range(3):
            warnings.warn("the same", BdlWarning, stacklevel=1)
            warnings.warn("torch.jit.script is deprecated", DeprecationWarning, stacklevel=1)
    assert capsys.readouterr().err == "pyro-bdl: warning: the same\n"
