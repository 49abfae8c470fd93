"""Walks over autograd's graph."""

import torch

from pyro_bdl.utils.autograd import leaves_behind, reaches, with_gradients


def test_gradients_flow_to_leaves_and_to_what_was_computed():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    product = a * b
    first, second = product.unbind()
    assert reaches(product, [b]) and reaches(first.exp(), [product]) and reaches(a, [a])
    assert not reaches(first.exp(), [second])  # another result of the same operator
    assert not reaches(a.exp(), [b]) and not reaches(product.detach(), [a])


def test_leaves_behind_a_result_but_for_those_past_a_stop():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    product = a * b
    found = leaves_behind((product * b).sum())
    assert len(found) == 2 and {id(leaf) for leaf in found} == {id(a), id(b)}
    (only,) = leaves_behind((product * b).sum(), stop=[product])
    assert only is b
    assert leaves_behind(product.detach().sum()) == []


def test_known_gradients_are_scaled_and_the_value_may_change_in_place():
    leaf = torch.ones(3, requires_grad=True)
    value = torch.tensor(4.0)
    loss = with_gradients(value, [torch.arange(3.0)], [leaf])
    loss *= 2.0
    loss.backward()
    assert torch.equal(leaf.grad, 2.0 * torch.arange(3.0))
    assert loss.item() == 8.0 and value.item() == 4.0


def test_known_gradients_add_up_and_may_be_missing():
    leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
    gradient = torch.arange(3.0)
    loss = with_gradients(torch.tensor(4.0), [gradient, None], leaves)
    loss.backward(retain_graph=True)
    (2.0 * loss).backward()
    assert torch.equal(leaves[0].grad, 3.0 * torch.arange(3.0)) and leaves[1].grad is None
    assert torch.equal(gradient, torch.arange(3.0))
