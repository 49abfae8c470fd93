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


COUNT = torch.tensor(0)
READS = r"reads numbers .* in line \d+ of test_trace.py"
REFUSED = {
    "branch": (lambda x: x if x.sum() > 0 else -x, READS),
    "item": (lambda x: x * float(x[0]), READS),
    "size": (lambda x: x[: int(x[2])], READS),
    "list": (lambda x: torch.tensor(x.tolist()), READS),
    "numpy": (lambda x: torch.from_numpy(x.numpy() + 1), READS),
    "equal": (lambda x: x if torch.equal(x, -x) else -x, READS),
    "mask": (lambda x: x[x > 0], "the shape of a tensor depends on numbers .*aten.index.Tensor"),
    "masked": (lambda x: x.masked_select(x > 0), "the shape of a tensor depends .*masked_select"),
    "unique": (lambda x: x.unique(), "the shape of a tensor depends on numbers"),
    "in place": (lambda x: x.mul_(2.0), "changes (an argument|a tensor that it did not make)"),
}


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_functions_of_the_numbers_themselves_are_refused(name, pure):
    function, message = REFUSED[name]
    with pytest.raises(NotTraceable, match=message) as caught:
        trace_pure(function, [X.clone()]) if pure else trace(lambda x: (function(x),), [X.clone()])
    assert caught.value.operator


@pytest.mark.parametrize("changes", [lambda: COUNT.add_(1), lambda: torch.randn(())])
def test_reads_of_what_is_another_number_in_the_next_run_are_refused(changes):
    with pytest.raises(NotTraceable, match=READS):
        trace(lambda x: (x * float(changes()),), (X,))


def test_constants_may_be_read_and_indexed_with():
    flag, index = torch.tensor(True), torch.tensor([2, 0])
    graph = trace(lambda x: (x[index] if flag else x, x[torch.tensor([True, False, True])]), (X,))
    assert torch.equal(graph(2 * X)[0], 2 * X[[2, 0]])
    assert torch.equal(graph(2 * X)[1], 2 * X[[0, 2]])


@pytest.mark.parametrize("make", [torch.zeros, lambda *shape: torch.zeros(shape).sin()])
def test_only_tensors_that_are_written_are_put_back(make):
    """One number that stands for all, which an operator that writes reads only."""
    total, one = torch.ones(3), torch.tensor(2.0).expand(3)

    def accumulated(x):
        result = make(3).index_put_((torch.tensor([0, 1, 2]),), one)
        total.add_(one)
        return (result + x + total,)

    with pytest.raises(NotTraceable, match="changes a tensor that it did not make"):
        trace_pure(accumulated, [X])
    torch.testing.assert_close(total, torch.ones(3))
    graph = trace_pure(lambda x: (make(3).index_put_((torch.tensor([0, 2]),), one[:2]) + x,), [X])
    torch.testing.assert_close(graph(X)[0], torch.tensor([2.0, 0.0, 2.0]) + X)


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


# Pure functions: no operator in place


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
