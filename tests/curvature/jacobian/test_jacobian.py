"""Jacobians as factors against autograd, for every layer, and the algebra of their blocks."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_bdl import bayesianize, models
from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.jacobian.jacobian import DenseBlock, joint_gram
from pyro_bdl.curvature.jacobian.linearization import VJP
from pyro_bdl.program import Program
from pyro_bdl.program.subset import Subset

# networks that torch cannot vectorize
pytestmark = pytest.mark.filterwarnings("ignore:.*#one-by-one")

N = 5


class Function(nn.Module):
    """A forward function over given layers and parameters."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x):
        return self.function(self, x)


class Square(torch.autograd.Function):
    """An operation that no function mode sees."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


def sequence(layer, out=2, dims=4, **parts):
    """Embed, run the layer over (N, T, d) or (T, N, d), average."""
    return Function(layer, embed=nn.Embedding(7, dims), out=nn.Linear(dims, out), **parts)


def self_attention():
    def forward(m, x):
        h = m.embed(x)
        return m.out(m.a(h, h, h)[0].mean(1))

    return sequence(forward, a=nn.MultiheadAttention(4, 2, batch_first=True))


def transformer(batch_first):
    def forward(m, x):
        h = m.embed(x) if batch_first else m.embed(x).transpose(0, 1)
        return m.out(m.a(h).mean(1 if batch_first else 0))

    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=batch_first)
    return sequence(forward, a=layer)


def cross_attention(kdim=None):
    def forward(m, x):
        keys = m.k(m.embed(x).tanh())
        queries = m.embed(x.flip(1)[:, :3])
        return m.out(m.a(queries, keys, keys)[0].flatten(0, 1)).reshape(len(x), -1, 2).sum(1)

    attention = nn.MultiheadAttention(4, 2, batch_first=True, kdim=kdim, vdim=kdim)
    return sequence(forward, a=attention, k=nn.Linear(4, kdim or 4))


def recurrent(kind):
    def forward(m, x):
        return m.out(m.r(m.embed(x))[0][:, -1])

    return sequence(forward, r=kind(4, 4, batch_first=True))


def flattened(m, x):
    """A linear layer over all (time, datum) pairs at once; only the first step is used."""
    h = m.embed(x).transpose(0, 1)
    return m.out(h.flatten(0, 1).tanh()).unflatten(0, h.shape[:2])[0]


def last_step_of_attention(m, x):
    """Time before data, with as many steps as data; only the first step is used."""
    h = m.embed(x).transpose(0, 1)
    return m.out(m.a(h, h, h)[0])[0]


def tied(m, x):
    return m.o(m.a(m.a(x).tanh()) * m.s) * m.b + (x @ m.a.weight.T)[:, :2]


def shared_partly(m, x):
    """Rows of one matrix in two products, and the whole matrix in a third."""
    first, second = m.w.chunk(2)
    h = torch.cat([F.linear(x, first).tanh(), F.linear(x, second)], 1)
    return m.o(h + F.linear(x, m.w))


def unpacked(m, x):
    first, second = m.w
    return torch.stack([(x * first).sum(1), (x * second).sum(1)], 1) + F.linear(x, m.w)


def unseen(m, x):
    return F.linear(x, m.w) + F.linear(x, Square.apply(m.w))


def kernel_as_bias(m, x):
    """w.T as a matrix and w[:, 0] as a bias: the same entries, of the same shape."""
    return x[:, :1] @ m.w.T + m.w[:, 0]


def loop_over_rows(m, x):
    return torch.stack([torch.stack([(row * w).sum() for w in m.w]) for row in x])


RNN = ("weight_ih_l0", "weight_hh_l0")
IMAGE, SEQUENCE, VOLUME = (2, 6, 6), (2, 6), (2, 4, 4, 3)


def image(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(2))


# name: the network, the shape of one datum (tokens: None), the matrices that are not products
CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3,), ()),
    "conv2d": (
        lambda: image(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 3, 2, dilation=2, padding=1),
            nn.GELU(),
        ),
        IMAGE,
        (),
    ),
    "conv2d, same": (lambda: image(nn.Conv2d(2, 2, (2, 3), padding="same", dilation=2)), IMAGE, ()),
    "conv2d, circular": (
        lambda: image(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")),
        IMAGE,
        (),
    ),
    "conv1d": (
        lambda: image(
            nn.Conv1d(2, 4, 3, padding="same"), nn.ReLU(), nn.Conv1d(4, 2, 2, stride=2, groups=2)
        ),
        SEQUENCE,
        (),
    ),
    "conv3d": (
        lambda: image(
            nn.Conv3d(2, 2, 2, groups=2, stride=(1, 2, 1), padding=1, dilation=(1, 1, 2))
        ),
        VOLUME,
        (),
    ),
    "transposed": (
        lambda: image(nn.ConvTranspose2d(2, 2, 2)),
        IMAGE,
        ("0.weight",),
    ),
    "batchnorm1d": (lambda: image(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), SEQUENCE, ()),
    "batchnorm2d": (lambda: image(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3)), IMAGE, ()),
    "batchnorm of rows": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        (3,),
        (),
    ),
    "groupnorm": (lambda: image(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4)), SEQUENCE, ()),
    "layernorm": (
        lambda: image(nn.LayerNorm([2, 6]), nn.Tanh(), nn.LayerNorm(6)),
        SEQUENCE,
        ("0.weight", "0.bias"),
    ),
    "rmsnorm": (lambda: image(nn.RMSNorm(6), nn.Tanh()), SEQUENCE, ()),
    "embedding": (lambda: sequence(lambda m, x: m.out(m.embed(x).tanh().sum(1))), None, ()),
    "self-attention": (self_attention, None, ()),
    "cross-attention": (cross_attention, None, ()),
    "cross-attention, other sizes": (lambda: cross_attention(3), None, ()),
    "transformer": (lambda: transformer(True), None, ()),
    "transformer, time first": (lambda: transformer(False), None, ()),
    "gru": (lambda: recurrent(nn.GRU), None, tuple(f"r.{name}" for name in RNN)),
    "lstm": (lambda: recurrent(nn.LSTM), None, tuple(f"r.{name}" for name in RNN)),
    "tied": (
        lambda: Function(
            tied, a=nn.Linear(3, 3), o=nn.Linear(3, 2), s=torch.randn(3), b=torch.randn(())
        ),
        (3,),
        (),
    ),
    "shared partly": (
        lambda: Function(shared_partly, w=torch.randn(4, 3), o=nn.Linear(4, 2)),
        (3,),
        (),
    ),
    "right product": (
        lambda: Function(
            lambda m, x: (x @ m.w).tanh() @ m.v - m.b,
            w=torch.randn(3, 4),
            v=torch.randn(4, 2),
            b=torch.randn(2),
        ),
        (3,),
        (),
    ),
    "left product": (
        lambda: Function(lambda m, x: torch.matmul(m.w, x.T.sin()).T, w=torch.randn(2, 3)),
        (3,),
        (),
    ),
    "addmm": (
        lambda: Function(
            lambda m, x: torch.addmm(m.b, x, m.w), w=torch.randn(3, 2), b=torch.randn(2)
        ),
        (3,),
        (),
    ),
    "addmm, scaled": (
        lambda: Function(
            lambda m, x: torch.addmm(m.b, x, m.w, beta=2, alpha=0.5),
            w=torch.randn(3, 2),
            b=torch.randn(2),
        ),
        (3,),
        ("w",),
    ),
    "elementwise": (
        lambda: Function(
            lambda m, x: (2.0 * m.a * (x - m.b) + (m.c - x) * m.d + m.c * 3).sin()[:, :2],
            a=torch.randn(3),
            b=torch.randn(1, 3),
            c=torch.randn(()),
            d=torch.randn(1),
        ),
        (3,),
        ("b",),
    ),
    "einsum": (
        lambda: Function(lambda m, x: torch.einsum("oi,ni->no", m.w, x), w=torch.randn(2, 3)),
        (3,),
        (),
    ),
    "einsum over two axes": (
        lambda: Function(lambda m, x: torch.einsum("nti,oit->no", x, m.w), w=torch.randn(2, 3, 4)),
        (4, 3),
        (),
    ),
    "einsum that is no product": (
        lambda: Function(
            lambda m, x: torch.einsum("ni,oi->nio", x, m.w).tanh().sum(1), w=torch.randn(2, 3)
        ),
        (3,),
        ("w",),
    ),
    "matrix by vector": (
        lambda: Function(lambda m, x: torch.stack([x @ m.w, x @ m.w.exp()], 1), w=torch.randn(3)),
        (3,),
        (),
    ),
    "flattened (T N), first step": (lambda: sequence(flattened), None, ()),
    "first step of attention": (
        lambda: sequence(last_step_of_attention, a=nn.MultiheadAttention(4, 2)),
        None,
        (),
    ),
    "unpacked": (lambda: Function(unpacked, w=torch.randn(2, 3)), (3,), ("w",)),
    "unseen": (lambda: Function(unseen, w=torch.randn(2, 3)), (3,), ("w",)),
    "kernel as bias": (lambda: Function(kernel_as_bias, w=torch.randn(2, 1)), (3,), ()),
    "loop over data": (lambda: Function(loop_over_rows, w=torch.randn(2, 3)), (3,), ("w",)),
    "expanded": (
        lambda: Function(lambda m, x: F.linear(x, m.w.expand(2, 3)).tanh(), w=torch.randn(1, 3)),
        (3,),
        ("w",),
    ),
    "detached": (
        lambda: Function(lambda m, x: F.linear(x, m.w) + x @ m.w.detach().T, w=torch.randn(2, 3)),
        (3,),
        (),
    ),
    "statistics of the batch": (
        lambda: Function(
            lambda m, x: m.o((m.l(x) - m.l(x).mean(0)).tanh()), l=nn.Linear(3, 4), o=nn.Linear(4, 2)
        ),
        (3,),
        ("l.weight", "o.weight"),  # no row is what it is alone
    ),
}


def made(name, n=N):
    torch.manual_seed(3)
    make, shape, others = CASES[name]
    net = make()
    x = torch.randint(0, 7, (n, N)) if shape is None else torch.randn(n, *shape)
    with torch.no_grad():
        net(x)  # lazy layers, running statistics
        for parameter in net.parameters():  # biases and norms start at 0 and 1
            parameter += 0.3 * torch.randn_like(parameter)
    return net, x, others


def jacobian(oracle, net, x, indices=None, rows="alone"):
    """Rows (K, n, p) of the network's outputs as blocks, and by autograd."""
    model = models.Regression(bayesianize(net), noise=0.5)
    program, vector = oracle.program(model, x, torch.zeros(len(x), 2))
    expected = oracle.jacobian(program, vector, lambda run: run.deterministic["f"])
    expected = expected.reshape(len(x), -1, program.size).transpose(0, 1)
    subset = Subset(program.layout, indices(program.size) if indices else None)
    linearization = ProgramAtPoint(model, subset, vector, rows).linearize((x,), {})
    vjp = VJP(linearization, [linearization.run.deterministic["f"]], len(x))
    f = vjp.outputs[0]
    columns = [torch.zeros_like(f) for _ in range(expected.shape[0])]
    for k, column in enumerate(columns):
        column.reshape(len(x), -1)[:, k] = 1.0
    return vjp.jacobian([[column] for column in columns]), subset.take(expected), vjp


def dense_sites(vjp):
    """The matrices whose gradients are no factors."""
    latents = vjp.at.subset.layout.latents
    uses = [] if vjp.rows is None else vjp.rows.uses
    dense = {use.site for use in uses if use.kind == "dense"}
    found = set(latents) if vjp.rows is None else dense
    return {site for site in found if len(latents[site].shape) > 1}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
def test_jacobians_by_autograd(oracle, name, some):
    """Their rows, and products and sums of their blocks, for all entries and for every third."""
    net, x, others = made(name)
    indices = (
        (lambda size: torch.randperm(size)[: max(1, size // 3)].sort().values) if some else None
    )
    declared = "together" if name == "statistics of the batch" else "alone"
    found, rows, vjp = jacobian(oracle, net, x, indices, declared)
    close = torch.testing.assert_close
    close(found.rows(), rows, rtol=1e-10, atol=1e-12)
    assert some or dense_sites(vjp) == set(others)
    weights, vectors = torch.rand(found.size), torch.randn(2, found.size)
    combined, gram = torch.randn(2, N, 2), torch.zeros(N, 2, 2)
    close(found.apply(vectors), torch.einsum("kne,se->snk", rows, vectors))
    close(found.combined(combined), torch.einsum("kne,snk->se", rows, combined))
    covered = torch.zeros(found.size)
    for block in found.blocks:
        covered[block.position.indices] += 1
        mine = rows[..., block.position.indices]
        close(block.squares().flatten(), mine.square().sum((0, 1)))
        own = block.position.spread(weights, block.shape)
        gram += block.gram(own)
        close(joint_gram(block, own), joint_gram(DenseBlock(block.position, mine), own.flatten()))
        close(block.norms(own), block.gram(own).diagonal(dim1=1, dim2=2))
    close(gram, torch.einsum("kne,lne,e->nkl", rows, rows, weights))
    assert (covered <= 1).all() and (rows[..., covered == 0] == 0).all()


def test_a_padding_row_gets_no_gradient(oracle):
    net = sequence(lambda m, x: m.out(m.embed(x).tanh().sum(1)))
    net.embed = nn.Embedding(7, 4, padding_idx=-2)
    with torch.no_grad():
        net.embed.weight.normal_()
    x = torch.randint(0, 7, (N, 6))
    assert (x == 5).any()
    found, expected, vjp = jacobian(oracle, net, x)
    assert not dense_sites(vjp)
    table = expected[..., :28].unflatten(-1, (7, 4))
    assert (table[..., 5, :] == 0).all()
    torch.testing.assert_close(found.rows(), expected)


@pytest.mark.parametrize("name", ["mlp", "conv2d", "transformer, time first", "tied", "gru"])
def test_one_datum(oracle, name):
    net, x, _ = made(name)
    found, expected, _ = jacobian(oracle, net, x[:1])
    torch.testing.assert_close(found.rows(), expected)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 9])
@pytest.mark.parametrize("name", ["flattened (T N), first step", "first step of attention"])
def test_data_are_told_from_steps_whatever_their_numbers(oracle, name, n):
    net, x, _ = made(name, n)
    for length in {1, 2, n}:
        found, expected, _ = jacobian(oracle, net, x[:, :length])
        torch.testing.assert_close(found.rows(), expected)


def test_one_number_for_all_data(oracle):
    """Gradients in latents with the plate's shape are not sums over data."""

    def model(x, y=None):
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Normal(torch.zeros(N), 1.0))
            pyro.deterministic("f", z * x)
            pyro.sample("y", dist.Normal(z * x, 1.0), obs=y)

    x = torch.randn(N)
    program, vector = oracle.program(model, x, torch.zeros(N))
    linearization = ProgramAtPoint(model, Subset(program.layout), vector).linearize((x,), {})
    vjp = VJP(linearization, [linearization.run.deterministic["f"]], N)
    rows = vjp.jacobian([[torch.ones(N)]]).rows()[0]
    torch.testing.assert_close(rows, torch.diag(x))


def test_batches_of_other_lengths_have_other_uses(oracle):
    """A network that loops over time uses its weights once for each step."""

    def forward(m, x):
        h = torch.zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = (m.a(h) + m.b(x[:, t])).tanh()
        return m.o(h)

    torch.manual_seed(0)
    net = Function(forward, a=nn.Linear(3, 3), b=nn.Linear(2, 3), o=nn.Linear(3, 2))
    x, y = torch.randn(4, 5, 2), torch.randn(4, 2)
    model = models.Regression(bayesianize(net), noise=0.5)
    program, vector = oracle.program(model, x, y)
    short = Program(model, x[:, :2], y)
    found = oracle.fit(program, vector, [(x, y), (x[:, :2], y)], structure="full").curvature
    expected = oracle.ggn(program, vector) + oracle.ggn(short, vector)
    torch.testing.assert_close(found.matrix, expected)


@pytest.mark.parametrize("name", ["mlp", "conv2d", "transformer, time first", "embedding", "tied"])
def test_on_another_device(oracle, name, device):
    torch.set_default_dtype(torch.float32)
    net, x, others = made(name)
    torch.backends.cudnn.allow_tf32 = False
    x = x.to(device)
    found, expected, vjp = jacobian(oracle, net.to(device), x)
    torch.testing.assert_close(found.rows(), expected, rtol=1e-3, atol=1e-4)
    assert dense_sites(vjp) == set(others)
