"""Functions that can and cannot be traced; the graph gives the function's numbers."""

import pyro
import pytest
import torch
from torch import nn

from pyro_bdl.tracing.step import trace_step
from pyro_bdl.tracing.trace import NotTraceable, trace, trace_pure

X = torch.tensor([0.5, -1.0, 2.0])


def test_outside_tensors_are_the_very_same():
    weight = torch.ones(3)
    graph = trace(lambda x: (x * weight,), (X,))
    weight.mul_(3.0)
    assert torch.equal(graph(X)[0], 3.0 * X)


def test_one_fake_mode_describes_all_results():
    """A mode for each of them takes longer than all the rest of the trace."""
    graph = trace(lambda x: (x.sin().exp() + X,), (X,))
    modes = {id(node.meta["val"].fake_mode) for node in graph.graph.nodes if "val" in node.meta}
    assert len(modes) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x if x.sum() > 0 else -x,),
        lambda x: (x * float(x[0]),),
        lambda x: (x[: int(x[2])],),
        lambda x: (torch.tensor(x.tolist()),),
        lambda x: (torch.from_numpy(x.numpy() + 1),),
        lambda x: (x + float(torch.randn(())),),
        lambda x: (x if torch.equal(x, -x) else -x,),
    ],
)
def test_reads_are_refused_where_they_are(function):
    with pytest.raises(NotTraceable, match=r"reads numbers .* in line \d+ of test_trace.py"):
        trace(function, (X,))


@pytest.mark.parametrize("function", [lambda x: (x[x > 0],), lambda x: (x.unique(),)])
def test_shapes_that_vary_are_refused(function):
    with pytest.raises(NotTraceable, match="the shape of a tensor depends on numbers"):
        trace(function, (X,))


def test_reads_of_what_changes_in_place_are_refused():
    count = torch.tensor(0)

    def function(x):
        count.add_(1)
        return (x * int(count),)

    with pytest.raises(NotTraceable, match="reads numbers"):
        trace(function, (X,))


def test_an_argument_that_is_changed_is_refused():
    with pytest.raises(NotTraceable, match="changes an argument in place"):
        trace(lambda x: (x.mul_(2.0),), (X.clone(),))


def test_constants_may_be_read_and_indexed_with():
    flag, index = torch.tensor(True), torch.tensor([2, 0])
    graph = trace(lambda x: (x[index] if flag else x, x[torch.tensor([True, False, True])]), (X,))
    assert torch.equal(graph(2 * X)[0], 2 * X[[2, 0]])
    assert torch.equal(graph(2 * X)[1], 2 * X[[0, 2]])


def test_data_is_followed():
    graph = trace(lambda x: (x.data * 2.0,), (X,))
    assert torch.equal(graph(3 * X)[0], 6 * X)


def test_the_step_of_a_loss():
    weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    unused = torch.ones(3, requires_grad=True)

    def loss(x, factor):
        return factor * (weight * x).square().sum() + 0.0 * unused.detach().sum(), x.sum()

    step = trace_step(loss, [X, torch.tensor(1.0)], "eager")
    assert [leaf is weight for leaf in step.leaves] == [True]
    with torch.no_grad():
        weight.mul_(2.0)
    outcome = step([3 * X, torch.tensor(0.5)])
    expected = 0.5 * (weight * 3 * X).square().sum()
    torch.testing.assert_close(outcome.results[0], expected.detach())
    torch.testing.assert_close(outcome.results[1], 3 * X.sum())
    (outcome.differentiable() * 2.0).backward()
    torch.testing.assert_close(weight.grad, 2.0 * weight.detach() * (3 * X).square())
    with pytest.raises(NotTraceable, match="depends on no parameter"):
        trace_step(lambda x: (x.sum(),), [X], "eager")


# Pure functions: no operator in place, and nothing read of the arguments


@pytest.mark.parametrize(
    ("function", "message", "operator"),
    [
        (lambda x: x if x[0] > 0 else -x, r"in line \d+ of test_trace.py", "_local_scalar_dense"),
        (lambda x: torch.tensor(x.tolist()), "reads numbers", "_local_scalar_dense"),
        (lambda x: x[x > 0], "the shape of a tensor depends", "aten.index.Tensor"),
        (lambda x: x.masked_select(x > 0), "the shape of a tensor depends", "masked_select"),
        (lambda x: x.mul_(2.0), "changes a tensor that it did not make", "copy_"),
    ],
)
def test_functions_of_the_numbers_themselves_are_refused(function, message, operator):
    with pytest.raises(NotTraceable, match=message) as caught:
        trace_pure(function, [X.clone()])
    assert operator in caught.value.operator


def test_constants_may_be_read_and_select():
    weight, mask = nn.Parameter(torch.ones(())), torch.tensor([True, False, True])
    graph = trace_pure(lambda x: x.masked_select(mask) * float(weight) + x.data[mask], [X])
    torch.testing.assert_close(graph(3.0 * X), 6.0 * X[mask])


def flags():
    return (
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.is_grad_enabled(),
        pyro.distributions.is_validation_enabled(),
        pyro.poutine.is_validation_enabled(),
        pyro.infer.is_validation_enabled(),
    )


@pytest.mark.parametrize("validation", [True, False])
def test_global_flags_are_restored_after_an_exception(validation):
    def fails(z):
        seen.append(flags())
        raise KeyboardInterrupt

    seen = []
    original = torch.distributions.Distribution._validate_args
    try:
        torch.distributions.Distribution.set_default_validate_args(validation)
        before = flags()
        with pytest.raises(KeyboardInterrupt):
            trace_pure(fails, [torch.ones(2)])
        assert flags() == before != seen[0]
    finally:
        torch.distributions.Distribution.set_default_validate_args(original)


def test_the_trace_has_no_operator_in_place():
    def function(z):
        out = torch.zeros(3)
        out[1:] = z
        return out.mul_(weight).sum()

    weight = torch.arange(3.0)
    graph = trace_pure(function, [torch.ones(2)])
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert not any(target._schema.is_mutable for target in targets)
    torch.testing.assert_close(graph(weight[1:]), torch.tensor(5.0))
