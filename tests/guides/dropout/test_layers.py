"""Dropout layers read as a guide: the same law of functions, and nothing dropped twice."""

import copy
import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Trace_ELBO
from torch import nn

from pyro_bdl import bayesianize, models
from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoMCDropout
from pyro_bdl.program import record

D = torch.float64
LAYERED = AutoMCDropout.from_dropout_layers


def _made(net, x, **options):
    model = models.Regression(bayesianize(net), noise=0.5)
    guide = LAYERED(model, **options).prototype(x, torch.randn(len(x), dtype=x.dtype))
    return model, guide


def _rates(guide):
    return {name: rate.item() for name, rate in guide.rates().items()}


def _mlp():
    return nn.Sequential(
        nn.Linear(2, 3), nn.ReLU(), nn.Dropout(0.25), nn.Linear(3, 3), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(3, 1),
    ).to(D)  # fmt: skip


def _functions(model, guide, x, count):
    with torch.no_grad():
        draws = guide.sample_latents(count)
        model.eval()
        return torch.stack(
            [
                record(model, {n: v[i] for n, v in draws.items()}, (x,)).deterministic["f"]
                for i in range(count)
            ]
        )


def test_the_functions_have_the_law_of_the_layers():
    """On one input, where a mask per datum and a mask per draw are the same: all values of the
    function and their probabilities, by enumeration of the masks."""
    net, x = _mlp(), torch.randn(1, 2, dtype=D)
    model, guide = _made(net, x)
    assert _rates(guide) == {"3.weight": 0.25, "6.weight": 0.5}
    expected = {}
    for kept in itertools.product([0.0, 1.0], repeat=6):
        first, second = (torch.tensor(part, dtype=D) for part in (kept[:3], kept[3:]))
        probability = math.prod(0.75 if k else 0.25 for k in kept[:3]) * 0.5**3
        hidden = torch.relu(net[0](x)) * first / 0.75
        value = net[6](torch.relu(net[3](hidden)) * second / 0.5)
        key = round(value.item(), 9)
        expected[key] = expected.get(key, 0.0) + probability
    found = [round(value.item(), 9) for value in _functions(model, guide, x, 1000)]
    assert set(found) <= set(expected)
    for value, probability in expected.items():
        error = (probability * (1 - probability) / 1000) ** 0.5
        assert found.count(value) / 1000 == pytest.approx(probability, abs=4.5 * error)


@pytest.mark.parametrize("elbo", [Trace_ELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO])
def test_nothing_is_dropped_twice_and_the_network_is_not_touched(elbo):
    net, x, y = _mlp(), torch.randn(5, 2, dtype=D), torch.randn(5, dtype=D)
    before = copy.deepcopy(net.state_dict())
    model = models.Regression(bayesianize(net), noise=0.5)
    guide = LAYERED(model)
    bound = elbo()
    for _ in range(2):  # also after the user has switched them on again
        model.train()
        torch.manual_seed(0)
        bound.loss(model, guide, x, y)
        values = {name: value.detach() for name, value in guide().items()}
        runs = [record(model, values, (x, y)).deterministic["f"] for _ in range(5)]
        assert all(torch.equal(run, runs[0]) for run in runs)
    assert all(part.training for part in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [type(part) for part in guide.layers] == [nn.Dropout, nn.Dropout]
    others = [part for part in model.modules() if not isinstance(part, nn.Dropout)]
    assert all(part.training for part in others)


def test_a_copied_pair_silences_the_copied_layers():
    model, guide = _made(_mlp(), torch.randn(5, 2, dtype=D))
    pair = copy.deepcopy({"model": model, "guide": guide})
    pair["model"].train()
    pair["guide"].sample_vectors(1)
    silent = [m.training for m in pair["model"].modules() if isinstance(m, nn.Dropout)]
    assert silent == [False, False]
    alone = copy.deepcopy(guide)
    assert alone.layers == guide.layers


def test_two_layers_in_a_row_and_one_at_the_inputs():
    net = nn.Sequential(
        nn.Dropout(0.05), nn.Linear(2, 3), nn.Dropout(0.3), nn.LeakyReLU(), nn.Dropout(0.5),
        nn.Dropout(0.0), nn.Linear(3, 1),
    )  # fmt: skip
    _, guide = _made(net, torch.randn(4, 2))
    assert _rates(guide) == pytest.approx({"1.weight": 0.05, "6.weight": 1 - 0.7 * 0.5})


def test_channels_stay_together_through_pooling_and_flattening():
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2),
        nn.Dropout2d(0.4), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 1),
    ).to(D)  # fmt: skip
    x = torch.randn(2, 1, 12, 12, dtype=D)
    model, guide = _made(net, x)
    assert _rates(guide) == pytest.approx({"4.weight": 0.2, "8.weight": 0.4})
    assert guide.weights["8.weight"].units.tolist() == [[i // 4 for i in range(16)]]
    factors = guide.sample_latents(50)["8.weight"] / guide.mean_latents()["8.weight"]
    assert (factors.reshape(50, 4, 4).std(-1) < 1e-12).all()
    assert len(factors.detach().reshape(-1).round(decimals=6).unique()) == 2
    # by hand: the layers' own factors give the same function as the weights'
    with torch.no_grad():
        values = {name: value[0] for name, value in guide.sample_latents(1).items()}
        a = (values["4.weight"] / net[4].weight)[0, :, 0, 0]
        b = (values["8.weight"] / net[8].weight)[0].reshape(4, 4)[:, 0]
        hidden = F.max_pool2d(torch.relu(net[0](x)) * a[:, None, None], 2)
        hidden = F.avg_pool2d(net[4](hidden) * b[:, None, None], 2)
        model.eval()
        found = record(model, values, (x,)).deterministic["f"]
        torch.testing.assert_close(found, net[8](hidden.flatten(1))[:, 0])


class Skipping(nn.Module):
    """The dropped units go to a weight and past it."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(2, 2), nn.Dropout(0.2)
        self.other, self.last = nn.Dropout(0.3), nn.Linear(2, 1)

    def forward(self, x):
        dropped = self.drop(x)
        return self.last(self.other(dropped + self.inner(dropped)))


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.recur = nn.LSTM(4, 3, 2, dropout=0.3, batch_first=True)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        return self.last(self.recur(self.attend(x))[0][:, -1])


class Functional(nn.Module):
    def __init__(self, inplace):
        super().__init__()
        self.inner, self.last, self.inplace = nn.Linear(2, 4), nn.Linear(4, 1), inplace

    def forward(self, x):
        hidden = torch.relu(self.inner(x))
        dropped = F.dropout(hidden, 0.25, self.training, self.inplace)
        return self.last(hidden if self.inplace else dropped)


class Often(nn.Module):
    """A weight that is used with dropout once, and once without."""

    def __init__(self):
        super().__init__()
        self.again, self.last = nn.Linear(2, 2), nn.Linear(2, 1)
        self.drop, self.end = nn.Dropout(0.3), nn.Dropout(0.4)

    def forward(self, x):
        return self.last(self.end(self.again(self.drop(self.again(x)))))


class Heads(nn.Module):
    """A layer that feeds two weights."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(2, 4), nn.Dropout(0.2)
        self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.drop(torch.relu(self.inner(x)))
        return self.left(hidden) + self.right(hidden)


class Cell(nn.Module):
    """The hidden state is dropped at every step (Gal & Ghahramani 2016b)."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.inputs, self.states = cell, nn.Dropout(0.1), nn.Dropout(0.4)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        state, rest = x.new_zeros(len(x), 3), (x.new_zeros(len(x), 3),)
        for step in x.unbind(1):
            state, *rest = self._next(self.inputs(step), self.states(state), rest)
        return self.last(state)

    def _next(self, step, state, rest):
        if isinstance(self.cell, nn.LSTMCell):
            return self.cell(step, (state, *rest))
        return self.cell(step, state), *rest


class PackedSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.recur = nn.LSTM(4, 3, 2, dropout=0.3, batch_first=True)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        lengths = torch.tensor([5, 4, 2])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.last(self.recur(packed)[1][0][-1])


@pytest.mark.parametrize(
    ("net", "x", "rates", "said"),
    [
        (Skipping(), (4, 2), {"last.weight": 0.3}, [r"\.drop' is left out.*enters 'add'"]),
        (
            Sequence(),
            (3, 5, 4),
            {"attend.linear2.weight": 0.1, "recur.weight_ih_l1": 0.3},
            [
                "attend.self_attn' is left out, since it drops attention weights",
                "attend.dropout1' is left out, since its output enters 'add'",
                "factors of 'attend.linear2.weight', 'recur.weight_ih_l1' are the same",
            ],
        ),
        (
            nn.Sequential(nn.Conv1d(1, 2, 3), nn.Dropout(0.2), nn.Conv1d(2, 1, 4), nn.Flatten()),
            (3, 1, 6),
            {"2.weight": 0.2},
            ["factors of '2.weight' are the same at all positions"],
        ),
        (Often(), (4, 2), {"last.weight": 0.4}, ["'again.weight' is left out, .*other rates"]),
        (
            nn.Sequential(
                nn.Linear(2, 2), nn.AlphaDropout(0.2), nn.Linear(2, 2), nn.Dropout(0.1),
                nn.Linear(2, 1), nn.Dropout(0.6),
            ),
            (4, 2),
            {"4.weight": 0.1},
            [
                r"AlphaDropout.*\.1' is left out.*shifts",
                r"\.5' is left out, since its output enters 'broadcast_tensors'",
            ],
        ),
        (
            nn.Sequential(nn.Conv1d(1, 2, 3), nn.Dropout1d(0.2), nn.Flatten(), nn.Dropout(0.5),
                          nn.Linear(8, 2), nn.Dropout(0.1), nn.Linear(2, 1)),
            (3, 1, 6),
            {"6.weight": 0.1},
            ["'4.weight' is left out, since dropout layers with .*other .*units meet"],
        ),
        (
            nn.Sequential(nn.Conv1d(1, 2, 3), nn.Dropout1d(0.2), nn.Linear(4, 2), nn.Flatten(),
                          nn.Dropout(0.1), nn.Linear(4, 1)),
            (3, 1, 6),
            {"5.weight": 0.1},
            [r"Dropout1d.* is left out, since its channels are no units of the next weight"],
        ),
        (
            nn.Sequential(nn.Conv1d(1, 2, 3), nn.Dropout1d(0.2), nn.Flatten(0, 1), nn.Linear(4, 2),
                          nn.Unflatten(0, (-1, 2)), nn.Flatten(), nn.Dropout(0.1),
                          nn.Linear(4, 1)),
            (3, 1, 6),
            {"7.weight": 0.1},
            [r"Dropout1d.* is left out, since its channels are no units of the next weight"],
        ),
        (
            Heads(),
            (3, 2),
            {"left.weight": 0.2, "right.weight": 0.2},
            ["drop' feeds 'left.weight', 'right.weight', which get separate factors"],
        ),
        (
            Cell(nn.LSTMCell(2, 3)),
            (4, 2, 2),
            {"cell.weight_ih": 0.1, "cell.weight_hh": 0.4},
            ["'cell.weight_ih', 'cell.weight_hh' are the same .* in all calls"],
        ),
        (
            Cell(nn.GRUCell(2, 3)),
            (4, 2, 2),
            {"cell.weight_ih": 0.1},
            ["states' is left out, since its output enters 'gru_cell'"],
        ),
        (
            PackedSequence(),
            (3, 5, 4),
            {"recur.weight_ih_l1": 0.3},
            ["'recur.weight_ih_l1' are the same at all positions"],
        ),
    ],
    ids=[
        "skip", "sequence", "pixels", "twice", "alpha", "two kinds",
        "channels", "rows", "heads", "LSTM cell", "GRU cell", "packed",
    ],
)  # fmt: skip
def test_what_weights_cannot_say_is_told(net, x, rates, said):
    with pytest.warns(BdlWarning) as warned:
        model, guide = _made(net, torch.randn(*x))
    assert _rates(guide) == pytest.approx(rates)
    (message,) = [str(w.message) for w in warned if "dropout layers" in str(w.message)]
    for part in said:
        assert re.search(part, message), message
    y = torch.randn(x[0])
    model.train()
    guide.sample_vectors(1)
    values = guide.mean_latents()
    a, b = (record(model, values, (torch.ones(x), y)).deterministic["f"] for _ in range(2))
    assert torch.equal(a, b)  # all layers are silent, also those left out


def test_no_hook_is_left_behind():
    """Also by attention, whose inside is read as well, and by a network that fails."""
    hooks = torch.nn.modules.module
    with pytest.warns(BdlWarning):
        _made(Sequence(), torch.randn(3, 5, 4))
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.Linear(3, 1))
    guide = LAYERED(models.Regression(bayesianize(net), noise=0.5))
    with pytest.raises(RuntimeError):
        guide.prototype(torch.randn(4, 5), torch.randn(4))
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks
    assert guide.prototype(torch.randn(4, 2), torch.randn(4)).rates()


class AlwaysOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.last(F.dropout(self.first(x).relu(), 0.4))


@pytest.mark.parametrize("inplace", [False, True])
def test_functional_dropout_is_a_layer_too(inplace):
    model, guide = _made(Functional(inplace), torch.randn(4, 2))
    assert _rates(guide) == {"last.weight": 0.25}
    assert guide.layers == (model.network.network,)


def test_what_is_refused():
    x = torch.randn(4, 2)
    with pytest.raises(ValueError, match="no dropout layer with a rate above 0"):
        _made(nn.Linear(2, 1), x)
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.Tanh(), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"no dropout layer can be turned.*\.1'.*enters 'tanh'"):
        _made(net, x)
    certain = nn.Sequential(nn.Linear(2, 3), nn.Dropout(1.0), nn.Linear(3, 1))
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        _made(certain, x)
    with pytest.raises(ValueError, match=r"AlwaysOn\(0.4\) drops in evaluation mode too"):
        _made(AlwaysOn(), x)
    with pytest.raises(ValueError, match="dropout layers determine the sites"):
        LAYERED(models.Regression(bayesianize(net)), sites="all")
