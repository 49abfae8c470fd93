"""Blocks of a product whose outputs are the requested outputs, such as a network's last layer.

Their columns are known without back-propagation: the identity for the outputs, and diag(p) - p p'
for the Fisher information of classes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.jacobian import Linear, ProductBlock


@dataclass
class IdentityBlock(ProductBlock):
    """Gradients of a product's outputs z: the gradient of z_k in z is e_k for every datum.

    ``gradients`` are a matrix (K, out) expanded over the data.
    """

    def mapped(self, inputs: Linear | None, outputs: Linear | None) -> "IdentityBlock":
        result = replace(self, source=super().mapped(inputs, None).source)
        if outputs is not None:
            gradients = outputs(self.gradients[:, :1])  # e_k' Q
            result.gradients = gradients.expand(-1, self.gradients.shape[1], -1, -1, -1)
        return result

    @property
    def columns(self) -> Tensor:
        """The gradients of one datum, (K, out)."""
        return self.gradients[:, 0, 0, 0]

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Return inner products (n, K, K), or (1, K, K) if they are the same for all data."""
        return torch.matmul(self.columns * self._scaled(weights)[:, None], self.columns.mT)

    def norms(self, weights: Tensor | None = None) -> Tensor:
        """Return the diagonals of ``gram``, (n, K) or (1, K)."""
        return self._scaled(weights) @ self.columns.square().mT

    def _scaled(self, weights: Tensor | None) -> Tensor:
        """Return sum_i w_oi a_i^2, (n, out), or (1, out) for a bias."""
        if self.source is not None:
            return self.input_squares(weights)[:, 0].expand(-1, self.columns.shape[1])
        like = self.columns
        return like.new_ones(1, like.shape[1]) if weights is None else weights[..., 0]


@dataclass
class SoftmaxBlock(ProductBlock):
    """The Fisher information of classes whose logits are the outputs of a product.

    The columns of S are sqrt(w p_k) (e_k - p), and S S' = w (diag(p) - p p'). ``gradients`` are p,
    (1, n, 1, 1, out).

    :param weights: w, the tempering of each datum, (n, 1).
    """

    weights: Tensor

    def moments(self) -> Tensor:
        """Return the sums over columns and data of g g', (1, out, out)."""
        p = self.gradients[0, :, 0, 0]
        weighted = self.weights * p
        return (torch.diag(weighted.sum(0)) - weighted.mT @ p)[None]

    def squares(self) -> Tensor:
        p = self.gradients[0, :, 0, 0]
        of_data = self.weights * (p - p.square())
        if self.source is None:
            return of_data.sum(0)[None, :, None]
        return (of_data.mT @ self.source()[:, 0, 0].square())[None]
