"""Help, messages on stderr and exit codes."""

import os
import signal
import subprocess
import sys
import warnings

import jax
import pytest

from pyro_bdl.app import command, run
from pyro_bdl.app.ahead import keep_compiled
from pyro_bdl.app.command import main, messages, script, shown_once
from pyro_bdl.errors import BdlWarning
from pyro_bdl.utils.progress import logger


def test_ctrl_c_while_the_process_exits_is_left_to_the_system(ctrl_c, monkeypatch):
    """Python's own handler would print a traceback from whatever cleans up."""
    monkeypatch.setattr(command, "main", lambda: 3)
    monkeypatch.setattr(command, "keep_compiled", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        script()
    assert stopped.value.code == 3 and signal.getsignal(signal.SIGINT) is signal.SIG_DFL


_COMPILE = """
import jax
from pyro_bdl.app.ahead import keep_compiled
keep_compiled()
jax.jit(lambda x: jax.lax.fori_loop(0, 9, lambda i, x: jax.numpy.linalg.qr(x)[0], x))(
    jax.numpy.eye(9)).block_until_ready()
"""


def test_compiled_functions_are_kept_in_the_users_cache(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _COMPILE], check=True, env=environment)
    assert any((tmp_path / "pyro_bdl" / "jax").iterdir())


def test_a_cache_that_the_user_chose_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", "chosen")
    try:
        keep_compiled()
        assert jax.config.jax_compilation_cache_dir == "chosen"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert not any(tmp_path.iterdir())


def test_messages_of_the_logger_are_lines_of_ours(capsys):
    with messages():
        logger.warning("mind the gap")
    logger.warning("nobody hears this")
    assert capsys.readouterr().err == "pyro-bdl: mind the gap\n"


def test_a_warning_is_shown_once_and_those_of_others_are_not_ours(capsys):
    shown = shown_once()
    with messages(), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown
        for _ in range(3):
            warnings.warn("the same", BdlWarning, stacklevel=1)
            warnings.warn("torch.jit.script is deprecated", DeprecationWarning, stacklevel=1)
    assert capsys.readouterr().err == "pyro-bdl: warning: the same\n"


def test_warnings_are_one_line_and_the_line_is_passed_on(capsys, monkeypatch):
    def warned(options, line):
        warnings.warn(f"mind {line}", BdlWarning, stacklevel=2)
        return 0

    monkeypatch.setattr(run, "run", warned)
    shown = warnings.showwarning
    assert main(["compare", "--seed", "3"]) == 0
    assert capsys.readouterr().err == "pyro-bdl: warning: mind pyro-bdl compare --seed 3\n"
    assert warnings.showwarning is shown


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--version"], "pyro-bdl 0."),
        (["--help"], "compare"),
        (["compare", "--help"], "mean-field-tempered"),
        (["compare", "--help"], "breast-cancer"),
    ],
)
def test_help_and_version(arguments, words, capsys):
    assert main(arguments) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["sweep"]])
def test_no_command_and_unknown_ones(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
