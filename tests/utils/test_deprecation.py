"""Deprecated names warn, and leave with the release that they name."""

import inspect
import pkgutil
import warnings
from importlib import import_module

import pytest
from packaging.version import Version

import pyro_bdl
from pyro_bdl.utils.names import deprecated


@deprecated(since="0.2", until="0.3", instead="new")
def old(value):
    """Add one."""
    return value + 1


@deprecated(since="0.2", until="0.3", instead="New")
class Old:
    """A value."""

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(("call", "instead"), [(old, "new"), (lambda v: Old(v).value + 1, "New")])
def test_the_call_warns_where_it_stands_and_does_the_same(call, instead):
    message = rf"is deprecated since pyro_bdl 0\.2 and leaves with 0\.3: use {instead}$"
    with pytest.warns(DeprecationWarning, match=message) as found:
        assert call(1) == 2
    assert found[0].filename == __file__


def test_what_is_marked_stays_what_it_was():
    assert inspect.getdoc(old) == "Add one."
    assert list(inspect.signature(old).parameters) == ["value"]
    assert inspect.isclass(Old)
    with warnings.catch_warnings(action="ignore"):
        assert isinstance(Old(1), Old)


def overdue(names, version):
    return [name for name, until in names.items() if Version(until) <= Version(version)]


def test_a_name_that_should_be_gone_is_noticed():
    marked = {"old": old.__leaves_with__, "Old": Old.__leaves_with__}
    assert overdue(marked, "0.2.1") == []
    assert overdue(marked, "0.3.0") == ["old", "Old"]


def test_no_name_of_the_package_is_overdue():
    found = {}
    for module in pkgutil.walk_packages(pyro_bdl.__path__, "pyro_bdl."):
        if module.name.endswith("__main__") or ".botorch" in module.name:
            continue
        for name, value in vars(import_module(module.name)).items():
            if until := getattr(value, "__dict__", {}).get("__leaves_with__"):
                found[f"{module.name}.{name}"] = until
    assert overdue(found, pyro_bdl.__version__) == []
