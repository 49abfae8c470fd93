"""Data as one batch or many, and in parts."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pyro_bdl.program.batches import Batches, has_rows, leading_size, select_rows

X, Y = torch.randn(6, 2), torch.randn(6)


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        [(X, Y)],
        [[X, Y]],
        lambda: iter([(X, Y)]),
        lambda: (batch for batch in [(X, Y)]),
        DataLoader(TensorDataset(X, Y), batch_size=6),
    ],
    ids=lambda data: type(data).__name__,
)
def test_one_batch(data):
    batches = Batches(data)
    for _ in range(2):  # as often as asked
        ((args, kwargs),) = batches
        assert kwargs == {}
        assert torch.equal(args[0], X) and torch.equal(args[1], Y)
    assert torch.equal(batches.first()[0][1], Y)


def test_other_forms():
    assert Batches(X).first()[1] == {}
    assert Batches({"x": X, "y": Y}).first() == ((), {"x": X, "y": Y})
    assert [kwargs["x"] for _, kwargs in Batches([{"x": 1}, {"x": 2}])] == [1, 2]
    assert Batches([()]).first() == ((), {})
    assert Batches((X, None)).first()[0][1] is None
    (argument,) = Batches(({"x": X, "y": Y},)).first()[0]  # of a program that takes one dict
    assert argument["x"] is X
    args, kwargs = Batches(({"x": X}, Y)).first()
    assert args[1] is Y and kwargs == {}
    assert Batches([{"x": X}]).first() == ((), {"x": X})
    assert Batches((X, [Y, Y])).first()[0][0] is X
    assert Batches(((X, X), Y)).first() == (((X, X), Y), {})
    assert Batches([((X, Y), (X, Y))]).first() == (((X, Y), (X, Y)), {})
    for data in (3, range(2)):
        with pytest.raises(TypeError, match="got int"):
            list(Batches(data))


@pytest.mark.parametrize("data", [((X, Y),), ((X, Y), (X, Y)), ([X, Y], (X, Y)), [X, Y], [X]])
def test_what_could_be_a_batch_or_several_is_refused(data):
    with pytest.raises(ValueError, match=r"one batch as a tuple .* as a list"):
        Batches(data)


def test_many_batches():
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    batches = Batches(loader)
    for _ in range(2):
        parts = [args[1] for args, _ in batches]
        assert [len(part) for part in parts] == [4, 2]
        assert torch.equal(torch.cat(parts).sort().values, Y.sort().values)


@pytest.mark.parametrize(
    "data", [iter([(X, Y)]), (batch for batch in [(X, Y)]), map(tuple, [(X, Y)])]
)
def test_an_iterator_is_refused(data):
    with pytest.raises(TypeError, match="ends after one pass: pass what it is made of"):
        Batches(data)


def test_what_holds_batches_only_once_is_refused_at_the_second_pass():
    ends = iter([(X, Y)])
    batches = Batches(lambda: ends)
    assert batches.first()[0][0] is X
    with pytest.raises(ValueError, match="none in a later one: pass something that starts anew"):
        list(batches)


EMPTY = [[], (), lambda: iter([]), DataLoader([])]


@pytest.mark.parametrize("data", EMPTY, ids=lambda d: type(d).__name__)
def test_no_batch(data):
    with pytest.raises(ValueError, match=r"no batch.*\(x, y\)"):
        Batches(data).first()
    with pytest.raises(ValueError, match="no batch"):
        list(Batches(data))


def test_rows():
    batch = ((X, {"a": Y, "b": torch.tensor(2.0), "c": 3.0}), {"d": X})
    (x, inner), kwargs = select_rows(batch, torch.tensor([4, 1]))
    assert torch.equal(x, X[[4, 1]]) and torch.equal(kwargs["d"], X[[4, 1]])
    assert torch.equal(inner["a"], Y[[4, 1]])
    assert inner["b"] == 2.0 and inner["c"] == 3.0
    assert leading_size(batch) == 6
    with pytest.raises(ValueError, match=r"5 rows beside one of 6.*let the program hold"):
        select_rows({"x": X, "class weights": torch.zeros(5)}, slice(2, 4))
    assert leading_size(((), {})) == leading_size(((torch.tensor(1.0),), {})) == 0
    assert has_rows(((X, Y), {}), 6)
    assert not has_rows(((X, torch.tensor(1.0)), {}), 6)
    assert not has_rows(((), {}), 6)
