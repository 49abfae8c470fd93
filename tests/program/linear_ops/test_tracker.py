"""Following latents through views: other numbers of a latent's shape follow the same way."""

import pytest
import torch

from pyro_bdl.program.linear_ops.tracker import Tracker

W, OTHER = torch.randn(4, 3), torch.randn(4, 3)


class Last(Tracker):
    """Keeps the tags of the last operation that is no view."""

    def operate(self, func, args, kwargs, tagged):
        self.seen = tagged
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w,
        lambda w: w.T,
        lambda w: w.chunk(2)[1].mT,
        lambda w: w[[2, 0], 1:].reshape(-1)[None],
        lambda w: w.split([1, 3])[1].expand(2, 3, 3),
        lambda w: w.double().permute(1, 0).half(),
        lambda w: list(w.unbind(1))[2],
    ],
)
def test_values_and_indices_follow(view):
    with Last({"w": W}) as tracker:
        view(W).exp()
    (tag,) = tracker.seen
    assert tag.site == "w" and torch.equal(tag.tensor, view(W))
    assert torch.equal(tag.of(OTHER), view(OTHER))
    numbers = view(torch.arange(12).reshape(4, 3)).long()
    assert torch.equal(tag.index(), numbers)


def test_latents_inside_of_lists_are_seen_and_others_are_not():
    with Last({"w": W}) as tracker:
        torch.cat([OTHER, W[:1]])
        (tag,) = tracker.seen
        OTHER.exp()
    assert tag.index().tolist() == [[0, 1, 2]] and tracker.seen == [tag]
