"""Graphs of pure functions: no operator in place, and nothing read of the arguments."""

import pyro
import pytest
import torch
from torch import nn

from pyro_bdl.tracing.trace import NotTraceable, trace_pure

X = torch.tensor([0.5, -1.0, 2.0])


@pytest.mark.parametrize(
    ("function", "message", "operator"),
    [
        (lambda x: x if x[0] > 0 else -x, r"in line \d+ of test_pure.py", "_local_scalar_dense"),
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
