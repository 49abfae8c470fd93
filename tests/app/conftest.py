"""A small file, the command run on it, and posteriors that are counted or take no time."""

import csv

import numpy as np
import pytest
import torch

from pyro_bdl import Comparison, Samples, posteriors
from pyro_bdl.app.command import main
from pyro_bdl.comparison.costs import Costs
from pyro_bdl.posteriors import registry


@pytest.fixture(autouse=True)
def _quick(no_collection):
    pass


@pytest.fixture
def table(tmp_path):
    """A file of 20 rows: a size and a price."""
    random = np.random.default_rng(0)
    rows = [f"{random.normal():.3f},{random.normal():.3f}" for _ in range(20)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["size,price", *rows]) + "\n")
    return path


@pytest.fixture
def run(tmp_path, capsys):
    """Run the command; exit code, stdout and stderr. The results are in the folder "out"."""

    def run(*arguments, folder="out"):
        code = main(["compare", *map(str, arguments), "--out", str(tmp_path / folder)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def tiny(run, table):
    """Run the command on the small file with a small network for three steps."""

    def tiny(*arguments, guides="map", **options):
        given = ["--data", table, "--target", "price", "--steps", "3", "--hidden", "2"]
        return run(*given, "--guides", guides, *arguments, **options)

    return tiny


@pytest.fixture
def no_figures(monkeypatch):
    """Figures take long."""
    monkeypatch.setattr(Comparison, "figures", lambda self, **options: {})


@pytest.fixture
def rows_of():
    """The rows of the table in a folder by name, without some columns."""

    def rows_of(folder, *without):
        with open(folder / "table.csv", newline="", encoding="utf-8") as file:
            rows = {row["posterior"]: row for row in csv.DictReader(file)}
        return {n: {k: v for k, v in row.items() if k not in without} for n, row in rows.items()}

    return rows_of


@pytest.fixture
def fitted(monkeypatch):
    """The names of the posteriors that are fitted; ``fitted.before`` is called with each name."""
    fit = posteriors.fit

    class Fitted(list):
        before = staticmethod(lambda name: None)

    names = Fitted()

    def counted(name, *args, **kwargs):
        names.before(name)
        names.append(name)
        return fit(name, *args, **kwargs)

    monkeypatch.setattr(posteriors, "fit", counted)
    return names


@pytest.fixture
def with_draws(monkeypatch):
    """ "nuts" takes no time, and has these draws of every site."""
    fit = posteriors.fit

    def install(change=lambda values: values):
        def fitted(name, problem, **options):
            if name != "nuts":
                return fit(name, problem, **options)
            guide = fit("map", problem).posterior
            latents = {
                site: change(value[None] + 0.1 * torch.randn(2, 10, *value.shape[1:]))
                for site, value in guide.sample_latents(1).items()
            }
            latents = {n: v.abs() if n == "noise" else v for n, v in latents.items()}
            return registry.Fit("nuts", Samples(latents), Costs(1.5))

        monkeypatch.setattr(posteriors, "fit", fitted)

    return install
