"""The shipped reference posteriors: their size, checks, and use as the reference of ``compare``."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.references import reference


def test_they_are_small_and_passed_their_checks():
    folder = Path(reference.__file__).parent / "data"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5e6
    assert len(bdl.references.names()) == len(list(folder.iterdir()))
    for name in bdl.references.names():
        found = bdl.references.load(name)
        assert found.name == name and found.function.isfinite().all()
        assert found.info["rhat"] < 1.005 and found.info["divergences"] == 0
        assert found.info["ess_min"] > 400 and found.seconds > 0
        assert found.function.shape[1] == len(found.dataset.x_test) == len(found.dataset.y_test)


def test_the_kept_draws_agree_between_chains():
    """R-hat of the thinned draws too, up to what 500 draws a chain resolve."""
    found = bdl.references.load("wine")
    by_chain = found.function[..., :-1].unflatten(0, (found.chains, -1)).flatten(2)
    rhat, _, _ = bdl.diagnostics.convergence(by_chain)
    assert rhat.max() < 1.02


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="no reference 'wien'; there are: breast-cancer"):
        bdl.references.load("wien")


def test_draws_are_those_of_the_program():
    """Log likelihoods of the predictive draws by the program's own observation."""
    found = bdl.references.load("diabetes")
    assert max(len(repr(each)) for each in (found, found.dataset, found.draws())) < 100
    draws, y = found.draws(), found.dataset.y_test
    assert draws.chains == found.chains == 4
    exact = torch.distributions.Normal(found.function[7], found.noise[7]).log_prob(y)
    assert torch.equal(draws.log_likelihood[7], exact)
    z = (draws.targets - draws.function) / found.noise[:, None]
    assert z.mean().abs() < 0.01 and (z.std() - 1).abs() < 0.01
    assert torch.equal(draws.targets, found.draws().targets)
    assert found.program().num_data == len(found.dataset.x_train)


def test_a_guide_is_compared_with_it_and_a_halved_reference_is_alike():
    found = bdl.references.load("in-between")
    model, data = found.program(), found.dataset
    guide = bdl.guides.AutoMeanField(model).prototype(data.x_train, data.y_train)
    draws = found.draws()
    half = bdl.PredictiveDraws(draws.function[::2], chains=4)
    table = bdl.compare(
        model, {"guide": guide, "half": half, "nuts": draws}, data.x_test, data.y_test,
        num_samples=100,
    )  # fmt: skip
    assert {table.judgments[name].group for name in ("half", "guide")} == {"alike", "far"}
    assert table.numbers()["nuts"]["nlpd"] and not table.warnings


def test_published_means_are_read_from_the_users_file(tmp_path):
    """Images of one color each, which JPEG keeps up to rounding."""
    from PIL import Image

    colors, parts = np.array([[250, 10, 20], [30, 200, 90], [5, 5, 5]], np.uint8), []
    for color in colors:
        stream = io.BytesIO()
        Image.fromarray(np.tile(color, (32, 32, 1))).save(stream, "JPEG", quality=100)
        parts.append(stream.getvalue())
    offsets = np.cumsum([0, *map(len, parts)])
    path, p = tmp_path / "test.npz", np.eye(10, dtype=np.float32)[:2] * 0.5 + 0.05
    content = {"jpeg": np.frombuffer(b"".join(parts), np.uint8), "offsets": offsets}
    np.savez(path, **content, labels=np.array([0, 3, 1], np.uint8), hmc_probs=p)
    found = bdl.references.load("cifar10-hmc", path)
    assert found.dataset.x_test.shape == (2, 3, 32, 32)  # those with probabilities
    assert found.dataset.x_test.is_contiguous()
    expected = torch.tensor(colors[:2] / 255).float()
    torch.testing.assert_close(found.dataset.x_test.mean((2, 3)), expected, atol=0.01, rtol=0)
    assert found.dataset.y_test.tolist() == [0, 3]
    own = torch.eye(10)[[0, 5]][None]
    assert bdl.metrics.agreement(own, found.function) == 0.5
    assert float(bdl.metrics.total_variation(own, found.function)) == pytest.approx(0.7)
    with pytest.raises(UnsupportedProgramError, match="the mean of the draws alone"):
        found.draws()
    with pytest.raises(UnsupportedProgramError, match="not in this package"):
        found.program()
    np.savez(path, **content, hmc_probs=p)
    with pytest.raises(ValueError, match="has no labels"):
        bdl.references.load("cifar10-hmc", path)
    with pytest.raises(ValueError, match="does not come with the package"):
        bdl.references.load("cifar10-hmc")
    with pytest.raises(ValueError, match="takes no path"):
        bdl.references.load("wine", path)
