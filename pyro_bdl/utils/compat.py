"""Names that older releases of the dependencies lack, in one place."""

import contextlib

import torch
from torch import Tensor
from torch.distributions import constraints

if hasattr(constraints, "MixtureSameFamilyConstraint"):  # torch 2.7
    MixtureSameFamilyConstraint = constraints.MixtureSameFamilyConstraint
else:

    class MixtureSameFamilyConstraint(constraints.Constraint):  # type: ignore[no-redef]
        """The support of a mixture of components with a support, in every component's entry."""

        def __init__(self, base_constraint: constraints.Constraint) -> None:
            self.base_constraint = base_constraint
            super().__init__()

        @property
        def is_discrete(self) -> bool:  # type: ignore[override]
            return self.base_constraint.is_discrete

        @property
        def event_dim(self) -> int:  # type: ignore[override]
            return self.base_constraint.event_dim

        def check(self, value: Tensor) -> Tensor:
            """Check values against the support that all components have."""
            return self.base_constraint.check(value)


def current_accelerator() -> torch.device | None:
    """The kind of accelerator of this machine; torch 2.6 raises where there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def is_exporting() -> bool:
    """True while ``torch.export`` traces; in torch 2.6 also while torch compiles."""
    exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
    return exporting()


def enable_x64(double: bool) -> contextlib.AbstractContextManager:
    """Compute in float64, or in float32, within the context: ``jax.enable_x64`` since JAX 0.8."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(double)
    from jax.experimental import enable_x64 as of_older_releases

    return of_older_releases(double)
