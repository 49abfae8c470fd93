"""Environments of their own for tests and checks: ``nox -s tests-floor tests-newest``.

The floor is what ``setup.cfg`` asks for at least, release by release; the newest is what pip finds.
"""

import configparser

import nox

nox.options.sessions = ["lint", "tests-newest"]
PYTEST = ("pytest", "-n", "auto", "--dist", "worksteal")


def floor():
    """The lower bounds in ``setup.cfg`` as requirements: torch>=2.9 becomes torch==2.9.*."""
    config = configparser.ConfigParser()
    config.read("setup.cfg")
    required = config["options"]["install_requires"].split()
    return [line.replace(">=", "==") + ".*" for line in required if ">=" in line]


def run_tests(session):
    """The default tests, then the smoke test."""
    session.run(*PYTEST, *session.posargs)
    session.run(*PYTEST, "-m", "smoke")


@nox.session(name="tests-floor", python="3.11")
def tests_floor(session):
    """The default tests with the oldest releases."""
    session.install(".[test]", *floor())
    run_tests(session)


@nox.session(name="tests-newest", python="3.11")
def tests_newest(session):
    """The default tests with the newest releases."""
    session.install("--upgrade", ".[test]")
    run_tests(session)
    session.run(*PYTEST, "-m", "accel and not slow")


@nox.session(name="tests", python=["3.11", "3.12", "3.13", "3.14"])
def tests(session):
    """The default tests on each Python: ``nox -s tests-3.13``."""
    session.install(".[test]")
    run_tests(session)


@nox.session(name="smoke-floor", python="3.11")
def smoke_floor(session):
    """Two minutes with the oldest releases: each guide, each structure, NUTS, the command."""
    session.install(".[test]", *floor())
    session.run("pytest", "-m", "smoke", *session.posargs)


@nox.session(python="3.11")
def lint(session):
    """Style, and the order of the imports."""
    session.install(".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session(python="3.11")
def types(session):
    """The package's types, and the public ones as a user sees them."""
    session.install(".[dev,test,types]")
    session.run("mypy")
    session.run("pytest", "-m", "slow", "tests/test_typing.py")


@nox.session(python="3.11")
def docs(session):
    """The site, in build/site."""
    session.install(".[docs]")
    session.run("mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml")


@nox.session(python="3.11")
def build(session):
    """Wheel and sdist in dist, as an index takes them, and both installed away from the sources."""
    session.run(".ci/release", external=True, env={"PYTHONS": "3.11"})
