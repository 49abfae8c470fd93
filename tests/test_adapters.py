"""Low-rank adapters: outputs at B = 0, merged weights, and posteriors over A and B."""

import copy

import pytest
import torch
from helpers.conjugate import Conjugate
from torch import nn
from torch.func import functional_call

import pyro_bdl as bdl
from pyro_bdl.adapters import LoRA
from pyro_bdl.curvature.structures.kron.factors import WeightFactors
from pyro_bdl.training import train

N, CLASSES = 6, 3
RANK, ALPHA = 2, 3.0


pytestmark = pytest.mark.usefixtures("double")


class Attention(nn.Module):
    """Layers of which torch's attention reads the weights, and an ordinary one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)[:, None]).squeeze(1))


def _mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.second(self.first(x).tanh())


NETS = {"mlp": _mlp, "attention": Attention, "shared": Shared, "linear": lambda: nn.Linear(3, 3)}


def _moved(net):
    """The same network with adapters that are not zero."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.5)
    return net


def _data():
    return torch.randn(N, 3), torch.arange(N) % CLASSES


@pytest.fixture(params=NETS)
def net(request):
    return NETS[request.param]()


@pytest.mark.parametrize("training", [True, False])
def test_adapters_start_as_the_network(net, training):
    x, _ = _data()
    before = copy.deepcopy(net.state_dict())
    adapted = bdl.nn.lora(net.train(training), RANK, alpha=ALPHA)
    torch.testing.assert_close(adapted(x), net(x))
    assert all(module.training == training for module in adapted.modules())
    learned = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert learned and all(name.endswith(("lora_A", "lora_B")) for name in learned)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.parametrize("grad", [True, False], ids=["plain", "fast path"])
def test_merged_weights_give_the_same_outputs(net, grad):
    x, _ = _data()
    adapted = _moved(bdl.nn.lora(net.eval(), RANK, alpha=ALPHA))
    merged = bdl.nn.merged(adapted)
    assert merged.state_dict().keys() == net.state_dict().keys()
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(merged(x), adapted(x))
        assert (adapted(x) - net(x)).abs().max() > 1e-2
    kept = {id(parameter) for parameter in adapted.parameters()}
    assert not kept & {id(parameter) for parameter in merged.parameters()}


def test_the_equation():
    x, _ = _data()
    layer = _moved(LoRA(nn.Linear(3, 4), RANK, alpha=ALPHA))
    change = ALPHA / RANK * layer.lora_B @ layer.lora_A
    expected = x @ (layer.base.weight + change).T + layer.base.bias
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.weight, layer.base.weight + change)
    assert layer.lora_A.shape == (RANK, 3) and layer.lora_B.shape == (4, RANK)
    merged = layer.merged()
    torch.testing.assert_close(merged(x), expected)
    assert type(merged) is nn.Linear and merged is not layer.base
    assert not torch.equal(merged.weight, layer.base.weight)


def test_targets_choose_layers():
    def adapted(**options):
        found = bdl.nn.lora(Attention(), RANK, **options).named_modules()
        return {name for name, part in found if isinstance(part, LoRA)}

    inside = {"encoder.linear1", "encoder.linear2"}
    assert adapted() == {"embed", "encoder.self_attn.out_proj", "head"} | inside
    assert adapted(targets="encoder.linear?") == inside
    assert adapted(targets=["head", "*.out_proj"]) == {"head", "encoder.self_attn.out_proj"}
    assert adapted(targets=lambda name: name[-1] == "1") == {"encoder.linear1"}
    again = bdl.nn.lora(bdl.nn.lora(Attention(), RANK, "head"), RANK)
    assert sum(isinstance(part, LoRA) for part in again.modules()) == 5
    shared = bdl.nn.lora(Shared(), RANK)
    assert shared.first is shared.second


def test_bad_arguments():
    with pytest.raises(ValueError, match="the network's 2 linear layers, such as '0', '2'"):
        bdl.nn.lora(_mlp(), RANK, "*.query")
    with pytest.raises(ValueError, match="the network's 0 linear layers"):
        bdl.nn.lora(nn.Tanh(), RANK)
    with pytest.raises(TypeError, match="targets must be a pattern"):
        bdl.nn.lora(_mlp(), RANK, 3)
    with pytest.raises(ValueError, match="rank"):
        bdl.nn.lora(_mlp(), 0)
    with pytest.raises(TypeError, match="change its layers first"):
        bdl.nn.lora(bdl.bayesianize(_mlp()), RANK)
    with pytest.raises(TypeError, match="net must be"):
        bdl.nn.lora(lambda x: x, RANK)


# Posteriors over the adapters alone


def _adapted(kind=_mlp):
    return _moved(bdl.nn.lora(kind(), RANK, alpha=ALPHA).eval())


def _model(net):
    return bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(1.0)))


def _curvature(model, data, structure):
    guide = bdl.guides.AutoLaplaceGGN(model, structure=structure).prototype(*data)
    posterior = guide.laplace_approximation(data)
    eye = torch.eye(posterior.subset.size)
    return torch.linalg.inv(posterior.precision.solve(eye)) - eye, posterior


def _ggn(net, x):
    """sum_n J' (diag(p) - p p') J over the adapters, dense."""
    values = {n: p.detach() for n, p in net.named_parameters() if "lora_" in n}
    found = torch.func.jacrev(lambda v: functional_call(net, v, (x,)))(values)
    rows = torch.cat([found[name].reshape(len(x), CLASSES, -1) for name in values], -1)
    p = net(x).detach().softmax(-1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.einsum("nip,nij,njq->pq", rows, fisher, rows)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("kind", [_mlp, Attention, Shared])
def test_laplace_over_adapters_by_brute_force(kind):
    net, data = _adapted(kind), _data()
    model, expected = _model(net), _ggn(net, data[0])
    full, posterior = _curvature(model, data, "full")
    assert set(posterior.median()) == {n for n, _ in net.named_parameters() if "lora_" in n}
    torch.testing.assert_close(full, expected, rtol=1e-6, atol=1e-7)
    diagonal, _ = _curvature(model, data, "diag")
    torch.testing.assert_close(diagonal.diagonal(), expected.diagonal(), rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("kind", [_mlp, Attention])
def test_kron_of_one_datum_has_the_exact_blocks(kind):
    net, (x, y) = _adapted(kind), _data()
    found, posterior = _curvature(_model(net), (x[:1], y[:1]), "kron")
    expected = torch.zeros_like(found)
    for part in posterior.require_layout().slices.values():
        expected[part, part] = _ggn(net, x[:1])[part, part]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    if kind is _mlp:  # A and B have factors of their own, none a dense block
        parts = posterior.curvature.parts.values()
        assert len(parts) == 4 and all(isinstance(part, WeightFactors) for part in parts)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_the_last_layer_is_the_last_b():
    """With Normal noise B of the last adapter is a linear model, whose posterior is exact."""
    net = _adapted(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    x, y = torch.randn(N, 3), torch.randn(N)
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.4)
    guide = bdl.guides.AutoLastLayer(model).prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    assert list(posterior.subset.parts) == ["2.lora_B"]
    hidden = net[1](net[0](x)).detach()
    design = ALPHA / RANK * hidden @ net[2].lora_A.detach().T
    exact = Conjugate(design, (y - net[2].base(hidden)[:, 0]).detach(), 0.4)
    torch.testing.assert_close(posterior.median()["2.lora_B"][0], exact.mean)
    found = torch.linalg.inv(posterior.precision.solve(torch.eye(RANK)))
    torch.testing.assert_close(found, exact.precision)


@pytest.mark.parametrize("optimizer", [None, bdl.optim.IVON])
def test_variational_posteriors_leave_the_network_as_it_is(optimizer):
    net, data = _adapted(Attention), _data()
    model = _model(net)
    guide = bdl.guides.AutoMeanField(model, init_scale=0.05).prototype(*data)
    before = {name: value.clone() for name, value in model.network.network.state_dict().items()}
    options = {} if optimizer is None else {"optimizer": optimizer(guide)}
    losses = train(model, guide, *data, steps=40, **options).losses
    assert losses[-5:].mean() < losses[:5].mean()
    assert set(guide.median()) == {n for n, _ in net.named_parameters() if "lora_" in n}
    assert all(torch.equal(v, before[n]) for n, v in model.network.network.state_dict().items())
    assert bdl.Predictive(model, guide, num_samples=5)(data[0])["f"].std(0).max() > 0


def test_other_parts_may_be_sampled_too():
    net = bdl.nn.lora(_mlp(), RANK, "0")
    net[2].requires_grad_(True)
    program = bdl.Program(_model(net), *_data())
    assert set(program.latents) == {"0.lora_A", "0.lora_B", "2.weight", "2.bias"}
