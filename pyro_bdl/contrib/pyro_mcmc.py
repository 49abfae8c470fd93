"""Pyro's HMC and NUTS: slower than NumPyro's, but for every program that torch can run.

The log density is a graph that is traced once where it can be traced, else the program itself.
"""

import math
from typing import Any

import pyro
import torch
from pyro.infer.mcmc import HMC, NUTS
from torch import Tensor

from pyro_bdl.mcmc.chains import Chains, Plan, progress_bar, stack_chains
from pyro_bdl.mcmc.kernels import HMC as Hmc
from pyro_bdl.mcmc.kernels import LONGEST, Hamiltonian, Kernel
from pyro_bdl.mcmc.starts import Restriction
from pyro_bdl.tracing.compiled import CompiledDensity
from pyro_bdl.utils.autograd import with_gradients
from pyro_bdl.utils.random_state import seeded


def run(target: Restriction, start: Tensor, kernel: Kernel, plan: Plan) -> Chains:
    """Run chains from the starting vectors (chains, P), one after another.

    :raises ValueError: for a kernel, a metric or a checkpoint that needs JAX.
    """
    in_jax = kernel.low_rank or kernel.inverse_mass is not None or plan.checkpoint
    if not isinstance(kernel, Hamiltonian) or in_jax:
        raise ValueError(
            "backend='pyro' runs NUTS and HMC, without inverse_mass, low_rank and checkpoint, "
            "which are for JAX only: leave out backend='pyro'"
        )
    total = len(start) * (plan.num_warmup + plan.num_samples)
    bar = progress_bar(plan.progress, total, kernel.name.upper())
    density = CompiledDensity(target.log_density, target.program.modules)
    chains = []
    for i, vector in enumerate(start):
        try:
            with seeded(plan.seed + 7919 * i), pyro.validation_enabled(False):
                chains.append(_run_chain(density, vector, kernel, plan, bar))
        except KeyboardInterrupt:
            if not chains:
                raise
            chains[-1].interrupted = True
        if chains[-1].interrupted:
            break
    bar.close()
    return stack_chains(chains)


def _run_chain(
    density: CompiledDensity, start: Tensor, kernel: Hamiltonian, plan: Plan, bar: Any
) -> Chains:
    steps = 0

    def potential(parameters: dict[str, Tensor]) -> Tensor:
        nonlocal steps
        steps += 1
        leaf = parameters["u"].detach().requires_grad_()
        with torch.enable_grad():
            value = -density(leaf)
            (gradient,) = torch.autograd.grad(value, leaf)
        return with_gradients(value.detach(), [gradient], [parameters["u"]])

    sampler = _recording_energy({"nuts": NUTS, "hmc": HMC}[kernel.name])(
        potential_fn=potential, full_mass=kernel.dense_mass, **kernel.shared_options()
    )
    parameters = sampler.initial_params = {"u": start.detach().clone()}
    vectors: list[Tensor] = []
    rows: list[dict[str, Any]] = []
    mean, interrupted = 0.0, False
    try:
        sampler.setup(plan.num_warmup)
        for i in range(plan.num_warmup + plan.num_samples):
            steps = 0
            if isinstance(kernel, Hmc):
                longest = kernel.max_steps * float(sampler.step_size)
                length = kernel.trajectory_length or LONGEST * torch.rand((), device="cpu").item()
                sampler.trajectory_length = min(length, longest)
            parameters = sampler.sample(parameters)
            bar.update(1)
            if i < plan.num_warmup:
                continue
            previous, mean = mean, float(sampler._mean_accept_prob)
            probability = previous + (len(rows) + 1) * (mean - previous)
            vectors.append(parameters["u"].detach().clone())
            rows.append({
                "potential_energy": float(sampler._potential_energy_last),
                "energy": sampler.energy,
                "num_steps": steps,
                "accept_prob": min(1.0, max(0.0, probability)),
                "step_size": float(sampler.step_size),
                "diverging": len(rows) in sampler.diagnostics()["divergences"][-1:],
            })  # fmt: skip
    except KeyboardInterrupt:
        interrupted = True
    if not rows:
        raise KeyboardInterrupt
    stats = {
        name: torch.tensor([[row[name] for row in rows]], device=start.device) for name in rows[0]
    }
    return Chains(torch.stack(vectors[: len(rows)])[None], stats, interrupted)


def _recording_energy(base: type) -> type:
    """A subclass of the kernel that records the energy H(u, r) at the start of each iteration."""

    class Recording(base):  # type: ignore[misc, valid-type]
        energy = math.nan

        def _sample_r(self, name: str) -> Any:
            r, unscaled = super()._sample_r(name)
            if name.startswith("r_t="):
                potential = self._potential_energy_last
                self.energy = float(self._kinetic_energy(unscaled) + potential)
            return r, unscaled

    Recording.__name__ = base.__name__
    return Recording
