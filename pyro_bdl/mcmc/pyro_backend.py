"""Pyro's HMC and NUTS: slower than NumPyro's, but for every program that torch can run.

The log density is a graph that is traced once where it can be traced, else the program itself.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from pyro.infer.mcmc import HMC, MCMC, NUTS
from torch import Tensor

from pyro_bdl.mcmc.chains import Chains, Plan, Target, progress_bar, stack_chains
from pyro_bdl.mcmc.kernels import Hamiltonian, Kernel
from pyro_bdl.tracing.compiled import CompiledDensity
from pyro_bdl.utils.autograd import with_gradients
from pyro_bdl.utils.random_state import seeded


def run(target: Target, start: Tensor, kernel: Kernel, plan: Plan) -> Chains:
    """Run chains from the starting vectors (chains, P), one after another.

    :raises ValueError: for a kernel, a metric or a checkpoint that needs JAX.
    """
    if not isinstance(kernel, Hamiltonian) or kernel.inverse_mass is not None or plan.checkpoint:
        raise ValueError(
            "backend='pyro' runs NUTS and HMC, without inverse_mass and checkpoint, which are for "
            "JAX only: leave out backend='pyro'"
        )
    total = len(start) * (plan.num_warmup + plan.num_samples)
    bar = progress_bar(plan.progress, total, kernel.name.upper())
    density = CompiledDensity(target.log_density, target.log_density)
    chains = []
    for i, vector in enumerate(start):
        try:
            with seeded(plan.seed + 7919 * i):
                chains.append(_run_chain(density, vector, kernel, plan, bar))
        except KeyboardInterrupt:
            if not chains:
                raise
            chains[-1].interrupted = True
        if chains[-1].interrupted:
            break
    bar.close()
    return stack_chains(chains)


class _Potential:
    """The potential energy -log p(u), with a count of its evaluations."""

    def __init__(self, log_density: Callable[[Tensor], Tensor]) -> None:
        self.log_density, self.count = log_density, 0

    def __call__(self, parameters: dict[str, Tensor]) -> Tensor:
        self.count += 1
        leaf = parameters["u"].detach().requires_grad_()
        with torch.enable_grad():
            value = -self.log_density(leaf)
            (gradient,) = torch.autograd.grad(value, leaf)
        return with_gradients(value.detach(), [gradient], [parameters["u"]])


class _Collector:
    """Pyro's hook after each iteration, which stores the draw and its statistics."""

    def __init__(self, potential: _Potential, bar: Any) -> None:
        self.potential, self.bar = potential, bar
        self.vectors: list[Tensor] = []
        self.stats: dict[str, list[float]] = {}
        self.last_count, self.last_mean = 0, 0.0

    def __call__(self, kernel: Any, parameters: dict[str, Tensor], stage: str, i: int) -> None:
        self.bar.update(1)
        steps = self.potential.count - self.last_count
        self.last_count = self.potential.count
        if "sample" not in stage.lower():
            return
        n = len(self.vectors) + 1
        mean = float(kernel._mean_accept_prob)
        previous, self.last_mean = self.last_mean, mean
        self.vectors.append(parameters["u"].detach().clone())
        stats = {
            "potential_energy": float(kernel._potential_energy_last),
            "energy": float(kernel.energy_current),
            "num_steps": steps,
            "accept_prob": min(1.0, max(0.0, previous + n * (mean - previous))),
            "step_size": float(kernel.step_size),
            "diverging": bool(kernel._divergences) and kernel._divergences[-1] == n - 1,
        }
        for name, value in stats.items():
            self.stats.setdefault(name, []).append(value)


def _run_chain(
    log_density: Callable[[Tensor], Tensor],
    start: Tensor,
    kernel: Hamiltonian,
    plan: Plan,
    bar: Any,
) -> Chains:
    potential = _Potential(log_density)
    recording = _recording_energy({"nuts": NUTS, "hmc": HMC}[kernel.name])
    options = {"full_mass": kernel.dense_mass, **kernel.shared_options()}
    collector = _Collector(potential, bar)
    interrupted = False
    try:
        MCMC(
            recording(potential_fn=potential, **options),
            num_samples=plan.num_samples,
            warmup_steps=plan.num_warmup,
            initial_params={"u": start.detach().clone()},
            hook_fn=collector,
            disable_progbar=True,
        ).run()
    except KeyboardInterrupt:
        interrupted = True
    if not collector.vectors:
        raise KeyboardInterrupt
    stats = {
        name: torch.tensor(values, device=start.device)[None]
        for name, values in collector.stats.items()
    }
    return Chains(torch.stack(collector.vectors)[None], stats, interrupted)


def _recording_energy(base: type) -> type:
    """A subclass of the kernel that records the energy H(u, r) at the start of each iteration."""

    class Recording(base):  # type: ignore[misc, valid-type]
        energy_current = math.nan

        def _sample_r(self, name: str) -> Any:
            r, unscaled = super()._sample_r(name)
            if name.startswith("r_t="):
                potential = self._potential_energy_last
                self.energy_current = float(self._kinetic_energy(unscaled) + potential)
            return r, unscaled

    Recording.__name__ = base.__name__
    return Recording
