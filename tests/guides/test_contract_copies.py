"""The contract of every guide: states, copies and names in the store."""

import copy
import io
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.guide_programs import (
    X,
    Y,
    losses_of,
    regression,
    same_medians,
    trained,
)

from pyro_bdl.elbo import TemperedTrace_ELBO

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*#dropout"),  # programs without hidden units to drop
    pytest.mark.filterwarnings("ignore:.*#last-layer-draws"),  # outputs without a closed form
]


@pytest.mark.parametrize("prototyped", [True, False], ids=["made", "fresh"])
def test_state_dict(kind, prototyped):
    model = regression()
    guide = trained(kind, model)
    file = io.BytesIO()
    torch.save(guide.state_dict(), file)
    file.seek(0)
    fresh = kind(model)
    if prototyped:
        fresh.prototype(X, Y)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    fresh.prototype(X, Y)
    assert same_medians(guide, fresh)
    saved = guide.median()
    losses_of(fresh, model, TemperedTrace_ELBO(), 2)
    assert all(torch.equal(guide.median()[name], value) for name, value in saved.items())


def test_a_state_inside_a_larger_one(kind):
    model = regression()
    loss = TemperedTrace_ELBO()(model, trained(kind, model))
    other = copy.deepcopy(model)
    fresh = TemperedTrace_ELBO()(other, kind(other))
    fresh.load_state_dict(loss.state_dict())
    fresh(X, Y)
    assert same_medians(loss.guide, fresh.guide)


def test_values_come_back_from_pyros_store(kind, tmp_path):
    model = regression()
    guide = trained(kind, model)
    pyro.get_param_store().save(tmp_path / "store")
    saved = guide.median()
    losses_of(guide, model, TemperedTrace_ELBO(), 2)
    later = guide.median()
    pyro.get_param_store().load(tmp_path / "store")
    guide(X, Y)
    assert all(torch.equal(guide.median()[name], value) for name, value in saved.items())
    losses_of(guide, model, TemperedTrace_ELBO(), 2)  # and the optimizer moves the guide's own
    assert not any(torch.equal(guide.median()[name], value) for name, value in saved.items())
    assert not all(torch.equal(saved[name], value) for name, value in later.items())


def test_a_state_that_does_not_fit_is_refused_and_can_be_replaced(kind):
    small, large = regression(noise=1.0), regression()
    fresh = kind(large)
    fresh.load_state_dict(trained(kind, small).state_dict())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"another program \(no value for: 'noise'\)"):
            fresh.prototype(X, Y)
    right = trained(kind, large)
    fresh.load_state_dict(right.state_dict())
    fresh.prototype(X, Y)
    assert same_medians(right, fresh)


def _of_sites(*sites):
    def model(x, y):
        total = sum(
            pyro.sample(n, dist.Normal(torch.zeros(s), 1.0).to_event(1)).sum() for n, s in sites
        )
        pyro.sample("y", dist.Normal(total, 1.0), obs=y[0])

    return model


@pytest.mark.parametrize(
    "sites, word",
    [
        ([("a", 2), ("c", 3)], "no value for: 'c'"),
        ([("a", 3), ("b", 2)], r"other shapes: 'a' \(2,\) for \(3,\)"),
        ([("b", 3), ("a", 2)], "another order"),
        ([("a", 5)], r"sites that the program does not have: 'b'"),
    ],
)
def test_a_state_of_other_sites_is_refused_and_changes_nothing(kind, sites, word):
    state = kind(_of_sites(("a", 2), ("b", 3))).prototype(X, Y).state_dict()
    guide = kind(_of_sites(*sites)).prototype(X, Y)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    with pytest.raises(RuntimeError, match=word):
        guide.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())
    late = kind(_of_sites(*sites))
    late.load_state_dict(state)
    with pytest.raises(RuntimeError, match=word):
        late.prototype(X, Y)


def test_a_state_without_sites_is_taken_as_it_is(kind):
    model = regression()
    guide = trained(kind, model)
    state = {k: v for k, v in guide.state_dict().items() if "extra_state" not in k}
    fresh = kind(model).prototype(X, Y)
    fresh.load_state_dict(state)
    assert same_medians(guide, fresh)


def test_names_in_the_store_do_not_depend_on_the_order_of_construction(kind):
    programs = [_of_sites(("a", 2)), _of_sites(("b", 2)), _of_sites(("a", 3))]

    def names(order):
        pyro.clear_param_store()
        guides = {i: kind(programs[i]) for i in order}
        found = {}
        for i, guide in guides.items():
            before = set(pyro.get_param_store().keys())
            losses_of(guide, programs[i], TemperedTrace_ELBO(), 1)
            found[i] = set(pyro.get_param_store().keys()) - before
        return found

    first = names([0, 1, 2])
    assert first == names([2, 0, 1])
    assert len(set.union(*first.values())) == sum(map(len, first.values()))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_stand_alone(kind, how):
    model = regression()
    guide = trained(kind, model)
    saved = guide.median()
    if how == "deepcopy":
        clone = copy.deepcopy(guide)
        assert clone.model is guide.model
    else:
        clone = pickle.loads(pickle.dumps(guide))
    assert same_medians(guide, clone)
    assert clone.sample_latents(3)["0.weight"].shape == (3, 3, 2)
    losses_of(clone, model, TemperedTrace_ELBO(), 3)
    assert not same_medians(guide, clone)
    assert all(torch.equal(guide.median()[name], value) for name, value in saved.items())
    losses_of(guide, model, TemperedTrace_ELBO(), 1)  # the original still has its program
    names = set(pyro.get_param_store().keys())
    assert len(names) == 2 * len(list(guide.parameters()))


def test_two_guides_share_nothing(kind):
    model = regression()
    first = trained(kind, model)
    saved = first.median()
    second = trained(kind, model, 1)
    assert not same_medians(first, second)
    assert all(torch.equal(first.median()[name], value) for name, value in saved.items())
    assert len(set(pyro.get_param_store().keys())) == 2 * len(list(first.parameters()))


def test_model_and_guide_travel_together(kind):
    model = regression()
    guide = trained(kind, model)
    pair = copy.deepcopy({"model": model, "guide": guide})
    assert same_medians(guide, pair["guide"])
    losses_of(pair["guide"], pair["model"], TemperedTrace_ELBO(), 2)
    assert not same_medians(guide, pair["guide"])
