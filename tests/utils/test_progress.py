"""One policy for progress bars."""

import io
import sys

import pytest

from pyro_bdl.utils import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "stream, shown", [(Terminal(), True), (io.StringIO(), False), (None, False)]
)
def test_bars_are_for_terminals(stream, shown, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    assert progress.is_silent(None) == (not shown)
    assert not progress.is_silent(True) and progress.is_silent(False)


def test_bars_are_for_notebooks(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert not progress.is_silent(None)
