"""Networks of transformers, tiny and of random weights: the same outputs as the plain module, the
same densities as by hand, and every method."""

import copy
import warnings
from functools import cache

import pyro
import pytest
import torch
from torch import nn
from torch.func import functional_call

import pyro_bdl as bdl
from pyro_bdl.elbo import CompiledELBO, TemperedTraceMeanField_ELBO

N, CLASSES, TOKENS = 5, 3, 7


def _labels():
    return torch.tensor([0, 2, 1, 1, 0])


def _inputs(full=False):
    """Token ids and their mask; with zeros in it unless ``full``."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, TOKENS, (N, 4), generator=generator)
    mask = torch.ones_like(ids)
    if not full:
        mask[0, 2:], mask[3, 3:] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@cache
def _made(kind):
    """BERT, GPT-2 and GPT-2's language model from their configurations."""
    transformers = pytest.importorskip("transformers")
    shared = {"vocab_size": TOKENS, "num_labels": CLASSES, "pad_token_id": 0}
    torch.manual_seed(0)
    if kind == "bert":
        config = transformers.BertConfig(
            **shared, hidden_size=4, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=5, max_position_embeddings=6,
        )  # fmt: skip
        net = transformers.BertForSequenceClassification(config)
    else:
        config = transformers.GPT2Config(
            **shared, n_embd=4, n_layer=1, n_head=2, n_positions=6, bos_token_id=1, eos_token_id=1
        )
        kinds = {"gpt2": "GPT2ForSequenceClassification", "language": "GPT2LMHeadModel"}
        net = getattr(transformers, kinds[kind])(config)
    for parameter in net.parameters():  # away from zero biases, and from the tiny start
        nn.init.normal_(parameter, std=0.5)
    return net.double().eval()


@pytest.fixture(params=["bert", "gpt2"])
def net(request):
    return _made(request.param)


@pytest.fixture
def model(net):
    return bdl.models.Classification(bdl.bayesianize(net, bdl.priors.Normal(0.7)), num_data=N)


def _values(program):
    latents = {}
    for name, value in program.initial.items():
        latents[name] = value + 0.1 * torch.randn_like(value)
    return latents


def test_outputs_and_densities_by_hand(net, model):
    x, y = _inputs(), _labels()
    program = bdl.Program(model, x, y)
    assert set(program.latents) == {name for name, _ in net.named_parameters()}
    latents = _values(program)
    logits = functional_call(net, latents, (), x).logits
    expected = -nn.functional.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(program.log_likelihood(latents)["y"], expected)
    torch.testing.assert_close(program.log_likelihood(latents, **x, y=y)["y"], expected)
    prior = sum(pyro.distributions.Normal(0.0, 0.7).log_prob(v).sum() for v in latents.values())
    torch.testing.assert_close(program.log_joint(latents), expected.sum() + prior)
    guide = bdl.guides.AutoMAP(model).prototype(x, y)  # starts at the network's own values
    found = bdl.Predictive(model, guide, num_samples=1)(x)["f"][0]
    torch.testing.assert_close(found, net(**x).logits)


def test_a_batch_of_a_tokenizer(net, model):
    transformers = pytest.importorskip("transformers")
    x, y = _inputs(), _labels()
    batch = transformers.BatchEncoding(x)
    program = bdl.Program(model, batch, y)
    expected = program.log_joint(program.initial, x, y)
    assert torch.equal(program.log_joint(program.initial), expected)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="diag").prototype(batch, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bdl.errors.BdlWarning)
        found = guide.laplace_approximation((batch, y)).variances()
        expected = guide.laplace_approximation((x, y)).variances()
    torch.testing.assert_close(found, expected)


def test_pointwise_log_likelihood_of_draws(net, model):
    x, y = _inputs(), _labels()
    program = bdl.Program(model, x, y)
    draws = [_values(program) for _ in range(3)]
    samples = bdl.Samples({n: torch.stack([d[n] for d in draws])[None] for n in draws[0]})
    with warnings.catch_warnings():  # the forward pass has a batching rule for every operator
        warnings.simplefilter("error", bdl.errors.BdlWarning)
        found = bdl.Predictive(model, samples).log_likelihood(x, y)["y"]
    for draw, densities in zip(draws, found, strict=True):
        logits = functional_call(net, draw, (), x).logits
        expected = -nn.functional.cross_entropy(logits, y, reduction="none")
        torch.testing.assert_close(densities, expected)


def test_the_compiled_elbo():
    """Masks that are arguments are asked whether they are full: such steps run uncompiled."""
    losses = []
    for elbo in (TemperedTraceMeanField_ELBO(), CompiledELBO()):
        model = bdl.models.Classification(bdl.bayesianize(_made("bert")), num_data=N)
        guide = bdl.guides.AutoMeanField(model)
        pyro.set_rng_seed(0)
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bdl.errors.BdlWarning)
            losses.append([svi.step(_inputs(), _labels()) for _ in range(3)])
    torch.testing.assert_close(*map(torch.tensor, losses))
    assert elbo.num_replays == 0


@pytest.mark.slow  # XLA compiles for seconds
def test_the_density_in_jax_is_torchs():
    jax = pytest.importorskip("jax")
    from pyro_bdl.tracing.jax.translate import to_jax

    net, x, y = _made("gpt2"), _inputs(), _labels()
    program = bdl.Program(bdl.models.Classification(bdl.bayesianize(net)), x, y)
    point = program.flatten(_values(program))
    with jax.enable_x64(True):
        both = jax.value_and_grad(to_jax(program.log_density, point))
        both = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})
        value, gradient = both(jax.numpy.asarray(point.numpy()))
    point.requires_grad_()
    expected = program.log_density(point)
    (slope,) = torch.autograd.grad(expected, point)
    torch.testing.assert_close(torch.tensor(float(value)).double(), expected.detach())
    torch.testing.assert_close(torch.tensor(gradient.tolist()).double(), slope)


# Curvature by brute force


def _ggn(function, point):
    """sum_n J' (diag(p) - p p') J of a function of a dict to logits (..., classes), dense."""
    found = torch.func.jacrev(function)(point)
    logits = function(point)
    rows = torch.cat([found[name].reshape(logits.numel(), -1) for name in point], 1)
    rows = rows.reshape(-1, logits.shape[-1], rows.shape[-1])
    p = logits.softmax(-1).reshape(rows.shape[:2])
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.einsum("nip,nij,njq->pq", rows, fisher, rows)


def _precision(model, data, structure):
    """The curvature of a Laplace approximation at the network's own weights, and its guide."""
    guide = bdl.guides.AutoLaplaceGGN(model, structure=structure).prototype(*data)
    posterior = guide.laplace_approximation(data)
    size = posterior.subset.size
    covariance = posterior.precision.solve(torch.eye(size).double())
    return torch.linalg.inv(covariance) - torch.eye(size).double(), posterior


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_full_laplace_by_brute_force(net):
    x, y = _inputs(), _labels()
    model = bdl.models.Classification(bdl.bayesianize(net))
    found, _ = _precision(model, (x, y), "full")
    values = {name: value.detach() for name, value in net.named_parameters()}
    expected = _ggn(lambda v: functional_call(net, v, (), x).logits, values)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    diagonal, _ = _precision(model, (x, y), "diag")
    torch.testing.assert_close(diagonal.diagonal(), expected.diagonal(), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_tied_embeddings_have_the_curvature_of_both_uses():
    net = _made("language")
    x = {"input_ids": torch.tensor([[3]])}
    y = torch.tensor([[2]])  # the next token of a sequence of length 1
    tied = {name: value.detach() for name, value in net.named_parameters()}
    assert "lm_head.weight" not in tied and net.lm_head.weight is net.transformer.wte.weight
    apart = tied | {"lm_head.weight": tied["transformer.wte.weight"]}
    blocks = _ggn(lambda v: functional_call(net, v, (), x, tie_weights=False).logits, apart)
    size = tied["transformer.wte.weight"].numel()
    sizes = [value.numel() for value in apart.values()]
    first, last = slice(0, size), slice(sum(sizes) - size, sum(sizes))
    model = bdl.models.Classification(bdl.bayesianize(net))
    full, posterior = _precision(model, (x, y), "full")
    where = posterior.require_layout().slices["transformer.wte.weight"]
    uses = [blocks[a, b] for a in (first, last) for b in (first, last)]
    torch.testing.assert_close(full[where, where], sum(uses), rtol=1e-6, atol=1e-6)
    kron, _ = _precision(model, (x, y), "kron")
    for part in posterior.require_layout().slices.values():  # exact for one datum with one token
        torch.testing.assert_close(kron[part, part], full[part, part], rtol=1e-6, atol=1e-6)


# Adapters


def _moved(net):
    """The same network with adapters that are not zero."""
    torch.manual_seed(2)
    for name, parameter in net.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.5)
    return net.eval()


def _lora(kind):
    targets = {"bert": ["*.query", "*.value"], "gpt2": ["*.c_attn", "*.mlp.c_proj"]}
    return bdl.nn.lora(_made(kind), 2, targets[kind], alpha=3)


def _peft(kind):
    """The same adapters as modules of peft."""
    peft = pytest.importorskip("peft")
    targets = {"bert": ["query", "value"], "gpt2": ["c_attn", "mlp.c_proj"]}
    options = {"r": 2, "lora_alpha": 3, "fan_in_fan_out": kind == "gpt2"}
    config = peft.LoraConfig(target_modules=targets[kind], **options)
    return peft.get_peft_model(copy.deepcopy(_made(kind)), config).double().eval()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_adapters_are_those_of_peft(kind):
    x, logits = _inputs(), _made(kind)(**_inputs()).logits
    ours, theirs = _lora(kind), _peft(kind)
    for adapted in (ours, theirs):  # B = 0
        torch.testing.assert_close(adapted(**x).logits, logits, rtol=0, atol=0)
    _moved(ours), _moved(theirs)
    values = [[p for n, p in net.named_parameters() if "lora_" in n] for net in (ours, theirs)]
    for mine, other in zip(*values, strict=True):
        assert torch.equal(mine, other)
    found = ours(**x).logits
    assert (found - logits).abs().max() > 1e-3
    torch.testing.assert_close(found, theirs(**x).logits)
    merged = bdl.nn.merged(ours)
    assert type(merged) is type(_made(kind))
    torch.testing.assert_close(merged(**x).logits, found)
    torch.testing.assert_close(theirs.merge_and_unload()(**x).logits, found)


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_laplace_over_adapters_of_peft_by_brute_force(kind):
    net, x, y = _moved(_peft(kind)), _inputs(), _labels()
    model = bdl.models.Classification(bdl.bayesianize(net))
    values = {n: p.detach() for n, p in net.named_parameters() if "lora_" in n}
    assert all(p.requires_grad == (n in values) for n, p in net.named_parameters())
    expected = _ggn(lambda v: functional_call(net, v, (), x).logits, values)
    full, posterior = _precision(model, (x, y), "full")
    assert list(posterior.median()) == list(values)
    torch.testing.assert_close(full, expected, rtol=1e-6, atol=1e-6)
    one = {name: value[:1, :1] for name, value in x.items()}
    expected = _ggn(lambda v: functional_call(net, v, (), one).logits, values)
    kron, _ = _precision(model, (one, y[:1]), "kron")
    blocks = torch.zeros_like(kron)
    for part in posterior.require_layout().slices.values():
        blocks[part, part] = expected[part, part]
    torch.testing.assert_close(kron, blocks, rtol=1e-6, atol=1e-6)
