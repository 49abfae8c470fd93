"""``bayesianize``: a copy of a torch network as a Pyro program with priors on its weights."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, cast

import pyro
import torch
from pyro.nn import PyroParam
from pyro.poutine.plate_messenger import block_plate
from pyro.poutine.runtime import get_plates
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bdl.distributions.copies import declare_constant, moved_like, without_validation
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.priors import (
    Normal,
    Prior,
    PriorFunction,
    arguments_of,
    check_prior,
    is_constant,
)
from pyro_bdl.program.batch_norm import keeps_statistics
from pyro_bdl.program.check import refuse_sharded
from pyro_bdl.program.checkpointing import refuse_reentrant, substituted
from pyro_bdl.program.gaussian_prior import (
    GaussianPrior,
    TaskPrior,
    UnderPrior,
    as_gaussian_prior,
)
from pyro_bdl.program.network_plates import over_networks, plates_of
from pyro_bdl.program.network_sites import INIT_KEY, OWNER_KEY, SampledNetwork
from pyro_bdl.program.parameter_namespace import OwnParameters
from pyro_bdl.program.trace import prior_factor
from pyro_bdl.program.vmap import DrawMap
from pyro_bdl.scales import Hyperprior, Scope, hyperparameter_scope, on_device
from pyro_bdl.utils.autograd import is_transformed
from pyro_bdl.utils.names import Names, chooser
from pyro_bdl.utils.one_thread import Hidden
from pyro_bdl.utils.validation import require

_NO_BATCH = torch.Size()
_SHOWN = 4  # names in a message


class BayesianModule(SampledNetwork, TaskPrior, OwnParameters):
    """A network whose weights are sample sites; call it like the network it copies.

    Sites have the names of the network's parameters, with the prefix ``name`` and a dot if a name
    is given. A shared parameter is one site. The network's values are kept in ``network`` as
    buffers and are the starting point of guides. Parameters without a prior stay parameters there;
    frozen ones stay fixed. ``state_dict`` holds all of them under their original names.
    """

    def __init__(
        self,
        network: nn.Module,
        prior: PriorFunction,
        *,
        name: str = "",
        plates: tuple[str, ...] = (),
        where: Names | None = None,
    ) -> None:
        super().__init__()
        refuse_sharded(network.modules())
        _refuse(network)
        copied = copy.deepcopy(network)
        if where is not None:
            _freeze_others(copied, where)
        self._modules["network"] = copied
        self.training = network.training
        self.prior = prior
        self.site_prefix = f"{name}." if name else ""
        self.plates = plates
        self._over_networks = DrawMap(over="the networks of a plate")
        self._cache: dict[str, tuple[Any, Distribution]] = {}
        self._cached_prior: Any = None
        self._places = _places(copied)
        self._checked_modes: set[bool] = set()  # of training, without reentrant checkpoints
        self._hyperparameters: dict[str, str] = {}
        with Hidden(), hyperparameter_scope(_NetworkScope(self)):
            self._find_sites()

    def _find_sites(self) -> None:
        self.sites: tuple[str, ...] = ()
        self.learnable: tuple[str, ...] = ()
        for name, places in self._places.items():
            owner, key = places[0]
            parameter = getattr(owner, key)
            if not parameter.requires_grad:
                continue
            if self._distribution(name, parameter) is None:
                self.learnable += (name,)
                parameter.data = parameter.data.contiguous()  # pyro.param would copy it
                continue
            if getattr(owner, "max_norm", None) is not None:
                raise UnsupportedProgramError(
                    f"the embedding of '{name}' has max_norm and changes its weights whenever it "
                    "is called, so that they cannot be sampled: make it without max_norm, and let "
                    "the prior hold the weights"
                )
            self.sites += (name,)
            value = parameter.detach()
            for module, attribute in places:
                del module._parameters[attribute]
                module.register_buffer(attribute, value)
        self._cache.clear()

    def __getattr__(self, name: str) -> Any:
        if name == "network":  # not through PyroModule, which registers every parameter each time
            return self._modules["network"]
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        frames = get_plates()
        if not self.sites or not (frames or self.plates):
            with self._under_task_prior():
                values = self._sample()
            return self._forward(values, *args, **kwargs)
        plates = plates_of(frames, self.plates, self.site_prefix + self.sites[0])
        with self._under_task_prior():
            values = self._sample(plates.batch)
        self._refuse_running_statistics()
        weights = {}
        for name in self.sites:
            shape = self._shape(name)
            weights[name] = values.pop(name).expand(plates.batch + shape).reshape(-1, *shape)

        def one(draw: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            return self._forward(draw | values, *args, **kwargs)

        return over_networks(one, weights, plates, args, kwargs, self._over_networks)

    def _forward(self, values: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        with substituted(partial(_in_place, self._places, values)):
            result = self._modules["network"](*args, **kwargs)
        mode = self.training
        if mode not in self._checked_modes and torch.is_grad_enabled() and not is_transformed():
            refuse_reentrant(result)
            self._checked_modes.add(mode)
        return result

    def _shape(self, name: str) -> torch.Size:
        owner, key = self._places[name][0]
        return getattr(owner, key).shape

    def _refuse_running_statistics(self) -> None:
        for name, module in self.network.named_modules():
            if module.training and keeps_statistics(module):
                raise UnsupportedProgramError(
                    f"the layer '{name}' would keep one set of running statistics for all networks "
                    f"of the plate '{self.plates[0]}': use GroupNorm or LayerNorm, or "
                    "track_running_stats=False, or call eval() on the network"
                )

    def check_layers(self) -> None:
        """Check that the network still has the layers that were given priors.

        :raises UnsupportedProgramError: if layers were added, replaced or taken away, so that there
            are weights without a prior, or sampled ones that nothing uses.
        """
        known = {place for places in self._places.values() for place in places}
        for name, places in _places(self.network).items():
            if getattr(*places[0]).requires_grad and places[0] not in known:
                raise UnsupportedProgramError(
                    f"the parameter '{name}' came into the network after bayesianize and has no "
                    "prior: change the layers first, and call bayesianize then"
                )
        present = set(self.network.modules())
        for site in self.sites:
            if not any(module in present for module, _ in self._places[site]):
                raise UnsupportedProgramError(
                    f"the layer of the weights '{self.site_prefix}{site}' was taken out of the "
                    "network after bayesianize: change the layers first, and call bayesianize then"
                )

    def _sample(self, batch: torch.Size = _NO_BATCH) -> dict[str, Tensor]:
        values = {}
        if self._cache and self._cached_prior != arguments_of(self.prior):
            self._cache.clear()  # the prior's own numbers were set anew
        cached = len(self._cache) == len(self.sites)
        with nullcontext() if cached else hyperparameter_scope(_NetworkScope(self)):
            for name in self.sites:
                owner, key = self._places[name][0]
                start = getattr(owner, key)
                whole = start.expand(batch + start.shape) if batch else start
                values[name] = pyro.sample(
                    self.site_prefix + name,
                    self._distribution(name, start, batch),
                    infer=cast(Any, {INIT_KEY: whole, OWNER_KEY: (owner, key)}),
                )
        for name in self.learnable:
            owner, key = self._places[name][0]
            parameter = getattr(owner, key)
            if parameter.requires_grad:  # pyro.param would unfreeze it
                values[name] = pyro.param(f"{self._own_name}.network.{name}", parameter)
        return values

    def _distribution(self, name: str, parameter: Tensor, batch: torch.Size = _NO_BATCH) -> Any:
        kind = (parameter.dtype, parameter.device)
        if name in self._cache and self._cache[name][0] == kind:
            return self._cache[name][1]
        owner = self._places[name][0][0]
        is_complex = parameter.is_complex()
        result = self.prior(name, owner, parameter.real if is_complex else parameter)
        if result is None:
            return None
        if is_complex:
            raise UnsupportedProgramError(
                f"the parameter '{name}' is complex, and priors are of real numbers: keep its real "
                "and imaginary parts as two parameters, or let the prior return None for it"
            )
        result = fitted(result, name, parameter, batch)
        if is_constant(self.prior):
            result = without_validation(result)
            declare_constant(result)
            if not self._cache:
                self._cached_prior = arguments_of(self.prior)
            self._cache[name] = kind, result
        return result

    def plain(self) -> nn.Module:
        """A copy of the network, whose parameters are the values at which guides start."""
        result = copy.deepcopy(self)
        for name in result.sites:
            places = result._places[name]
            parameter = nn.Parameter(getattr(*places[0]))
            for module, key in places:
                del module._buffers[key]
                module.register_parameter(key, parameter)
        return result.network

    def freeze_hyperparameters(self) -> None:
        """Replace the prior's ``PyroParam``s by their current values."""
        for attribute in self._hyperparameters.values():
            if attribute in self._pyro_params:
                value = getattr(self, attribute).detach().clone()
                delattr(self, attribute)
                self.register_buffer(attribute, value)

    def with_prior(self, prior: PriorFunction) -> "BayesianModule":
        """A copy with the same values and another prior on the weights that have a prior.

        :raises ValueError: if the new prior gives no distribution for one of these weights.
        """
        result = copy.deepcopy(self)
        result.prior = prior
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; another prior begins with its own hyperparameters.

        :raises ValueError: for a prior that gives no distribution for a weight that has one.
        """
        if name != "prior" or "sites" not in vars(self):
            super().__setattr__(name, value)
            return
        check_prior(value, "prior")
        weights = {site: self._places[site][0] for site in self.sites}
        with Hidden(), hyperparameter_scope(_TrialScope(self)):
            for site, (owner, key) in weights.items():
                parameter = getattr(owner, key)
                distribution = value(site, owner, parameter)
                if distribution is None:
                    raise ValueError(f"the new prior gives no distribution for '{site}'")
                fitted(distribution, site, parameter, _NO_BATCH)
        super().__setattr__(name, value)
        self._modules.pop("task_prior", None)
        for attribute in self._hyperparameters.values():
            delattr(self, attribute)
        self._hyperparameters, self._cache = {}, {}
        with Hidden(), hyperparameter_scope(_NetworkScope(self)):
            for site, (owner, key) in weights.items():
                self._distribution(site, getattr(owner, key))
        self._cache.clear()


def bayesianize(
    net: nn.Module,
    prior: PriorFunction | None = None,
    *,
    name: str = "",
    plate: str | Sequence[str] | None = None,
    where: Names | None = None,
) -> BayesianModule:
    """A copy of ``net`` as a PyroModule whose weights are sampled from ``prior``.

    The network may checkpoint its activations by ``nn.checkpoint``, in place of
    ``torch.utils.checkpoint``. With one draw of the weights at a time they are computed again in
    the backward pass, with the same draw. With several draws at once, and in compiled ELBOs, they
    are stored instead.

    With ``plate="groups"`` it is a network for every element of that plate, in which it is called::

        networks = bdl.bayesianize(net, plate="groups")

        def model(x, y=None):                                     # x (n, G, d), y (n, G)
            with pyro.plate("groups", G):
                f = networks(bdl.nn.each(x, dim=1))               # (G, n, 1): network g, x[:, g]
                with pyro.plate("data", len(x)):
                    return pyro.sample("y", dist.Normal(f[..., 0].T, 0.1), obs=y)

    The sites have the plate's batch shape, (G, *shape) here, and the outputs a leading dimension
    for each plate. All networks take the same of an argument that is not wrapped in :func:`each`:
    ``networks(x)``. They are independent given the prior's hyperparameters, which they share: a
    hyperprior, or ``priors.Pooled``, ties them. They also share parameters without a prior, and
    start at the same values (``init.init_afresh`` draws some for each of them). In any other plate,
    such as one of data, the call is refused: there every datum would get weights of its own. Let
    the data be the first dimension of the targets, as above: Kronecker factors
    (``structure="kron"``) need it.

    Example::

        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> bnn = bdl.bayesianize(net, bdl.priors.Normal(1.0))
        >>> list(bdl.Program(bnn, torch.zeros(5, 1)).latents)
        ['0.weight', '0.bias', '2.weight', '2.bias']
        >>> bnn(torch.zeros(5, 1)).shape  # at weights drawn from the prior
        torch.Size([5, 1])

    :param net: any torch module; it is not changed.
    :param prior: ``(name, module, parameter) -> Distribution or None``, see ``pyro_bdl.priors``;
        Normal(1.0) by default. None leaves a parameter learnable.
    :param name: put before all site names; needed where a program has two networks.
    :param plate: the plate, or plates, whose elements have a network each; none by default.
    :param where: which parameters are sampled or learned, the others being frozen as they are: a
        pattern of their names (shell wildcards, as in "*.lora_*"), several patterns, or a function
        of the name that returns True or False. A shared parameter goes by its first name.
        Parameters that the network has frozen stay so. All others by default.
    :raises ValueError: if no parameter gets a prior, ``where`` chooses none, or a prior has the
        wrong shape.
    :raises TypeError: for a prior that is no such function, such as a distribution itself; for a
        network that is compiled to TorchScript.
    :raises UnsupportedProgramError: for lazy layers that were not called yet, pruned layers,
        complex parameters with a prior, embeddings with a prior and ``max_norm``, and parameters
        that are sharded over processes (FSDP).
    """
    require(net, nn.Module, "net must be a torch.nn.Module")
    inner = [part for part in net.modules() if isinstance(part, BayesianModule)]
    if any(part is net or part.learnable for part in inner):
        raise TypeError(
            "the network is one of bayesianize or rank_one, which has its priors already: pass the "
            "plain network, or use it as it is"
        )
    if prior is not None:
        check_prior(prior, "prior")
    prior = Normal(1.0) if prior is None else prior
    plates = (plate,) if isinstance(plate, str) else tuple(plate or ())
    result = BayesianModule(net, prior, name=name, plates=plates, where=where)
    if not result.sites:
        raise ValueError(
            "no parameter of the network has a prior: let the prior return a distribution for at "
            "least one parameter that requires a gradient"
        )
    return result


def with_prior(model: Any, prior: Any) -> nn.Module:
    """A copy of a program under another prior.

    :param model: a module that holds networks of ``bayesianize``, or for a posterior any program;
        it is not changed.
    :param prior: a prior for the weights that have one (``pyro_bdl.priors``); a function of each
        network's present prior, such as ``priors.learnable``; or a posterior, a Gaussian guide or
        its ``as_prior()``, whose density replaces the program's prior for continual learning
        (Nguyen et al. 2018): with q(w) = p(w | y_1) the posterior given y_2 is p(w | y_1, y_2).
        Latents that a posterior does not cover keep the program's prior; those it fixes stay fixed.
    :raises ValueError: if the program holds no network of ``bayesianize``.
    :raises TypeError: for a posterior that is not Gaussian.
    """
    if isinstance(prior, GaussianPrior) or hasattr(prior, "as_prior"):
        return UnderPrior(model, as_gaussian_prior(prior))
    takes_prior = (
        callable(prior)
        and not isinstance(prior, Prior | Distribution | type)
        and len(signature(prior).parameters) == 1
    )
    if not takes_prior:
        check_prior(prior, "prior")

    def changed(network: BayesianModule) -> BayesianModule:
        return network.with_prior(prior(network.prior) if takes_prior else prior)

    if isinstance(model, BayesianModule):
        return changed(model)
    result = copy.deepcopy(model)
    for module in list(result.modules()):
        module._modules.pop("task_prior", None)
    networks: dict[nn.Module, BayesianModule] = {}  # one may be held by several modules
    for module in list(result.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, BayesianModule):
                if child not in networks:
                    networks[child] = changed(child)
                setattr(module, name, networks[child])
    if not networks:
        raise ValueError("the program holds no network of bayesianize, whose prior could change")
    return result


class _NetworkScope(Scope):
    """Scope of one run of a network, in which each hyperparameter is declared, sampled or read
    once."""

    def __init__(self, module: BayesianModule) -> None:
        self.module = module
        self.values: dict[str, Tensor] = {}

    def sample(self, name: str, distribution: Any) -> Tensor:
        with ExitStack() as stack:
            for plate in self.module.plates:
                stack.enter_context(block_plate(plate, strict=False))
            return self.sample_for_each(name, distribution)

    def sample_for_each(self, name: str, distribution: Any) -> Tensor:
        if name not in self.values:
            self.values[name] = pyro.sample(self.module.site_prefix + name, distribution)
        return self.values[name]

    def param(self, name: str, declaration: PyroParam) -> Tensor:
        attributes = self.module._hyperparameters
        if name not in attributes:
            attributes[name] = "hyper_" + "".join(c if c.isalnum() else "_" for c in name)
            setattr(self.module, attributes[name], on_device(self.module, declaration))
        if name not in self.values:
            self.values[name] = getattr(self.module, attributes[name])
        return self.values[name]

    def add_log_prior(self, name: str, hyperprior: Hyperprior, value: Tensor) -> None:
        site = f"{self.module.site_prefix}{name}.hyperprior"
        if site not in self.values:
            self.values[site] = hyperprior.log_prob(value)
            prior_factor(site, self.values[site])


class _TrialScope(_NetworkScope):
    """Scope of a prior that is tried: its parameters are not declared, but at their start."""

    def param(self, name: str, declaration: PyroParam) -> Tensor:
        start: Any = on_device(self.module, declaration).init_value
        return start() if callable(start) else start


def _refuse(network: nn.Module) -> None:
    """Refuse modules whose parameters cannot be sampled."""
    for prefix, module in network.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, torch.jit.ScriptModule):
            part = f"its part '{prefix}'" if prefix else "it"
            raise TypeError(
                f"net cannot be sampled, since {part} is compiled to TorchScript, whose parameters "
                "are fixed: pass the module that it was made from"
            )
        for key, parameter in module._parameters.items():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise UnsupportedProgramError(
                    f"the parameter '{dot}{key}' of {type(module).__name__} has no shape yet: call "
                    "the network once on inputs, before bayesianize"
                )
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise UnsupportedProgramError(
                    f"the tensor '{dot}{key}' is computed from other parameters by a hook, as by "
                    "torch.nn.utils.prune or the old weight_norm: make it a parameter "
                    f"(prune.remove(module, '{key}'), after which zeros have a prior as well), or "
                    "use torch.nn.utils.parametrize"
                )


Places = dict[str, list[tuple[nn.Module, str]]]


def _places(network: nn.Module) -> Places:
    """For each parameter, under its first name, the modules and attributes that hold it."""
    names: dict[int, str] = {}
    places: Places = {}
    for prefix, module in network.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            first = names.setdefault(id(parameter), name)
            places.setdefault(first, []).append((module, key))
    return places


def _freeze_others(network: nn.Module, where: Names) -> None:
    """Freeze the parameters that ``where`` does not choose.

    :raises ValueError: where it chooses none that requires a gradient.
    """
    chosen = chooser(where, "where")
    parameters = {name: getattr(*places[0]) for name, places in _places(network).items()}
    matched = [name for name in parameters if chosen(name)]
    if not any(parameters[name].requires_grad for name in matched):
        if matched:
            raise ValueError(
                f"where chooses only frozen parameters, such as '{matched[0]}': call "
                "requires_grad_() on them before bayesianize"
            )
        known = ", ".join(map(repr, list(parameters)[:_SHOWN]))
        raise ValueError(
            f"where chooses none of the network's {len(parameters)} parameters, such as {known}"
        )
    for name, parameter in parameters.items():
        if not chosen(name):
            parameter.requires_grad_(False)


def fitted(
    distribution: Distribution, name: str, parameter: Tensor, batch: torch.Size
) -> Distribution:
    """A prior with exactly the parameter's shape as event shape, on its device.

    :param batch: of the plates around it, which the distribution may have too.
    """
    if not isinstance(distribution, Distribution):
        raise TypeError(
            f"the prior of '{name}' gave {type(distribution).__name__}, and must give a "
            "distribution, or None for a parameter that stays learnable"
        )
    shape = distribution.batch_shape + distribution.event_shape
    if shape not in (parameter.shape, batch + parameter.shape):
        if shape.numel() != 1 or distribution.event_shape:
            raise ValueError(
                f"the prior of '{name}' has shape {tuple(shape)}, the parameter "
                f"{tuple(parameter.shape)}: give it that shape, or no shape at all"
            )
        distribution = distribution.expand(parameter.shape)
    independent = parameter.dim() - len(distribution.event_shape)
    if independent:
        distribution = distribution.to_event(independent)  # type: ignore[attr-defined]
    return moved_like(distribution, parameter)


@contextmanager
def _in_place(places: Places, values: dict[str, Tensor]) -> Iterator[None]:
    """Run the network with ``values`` in place of its tensors, which are restored on exit."""
    saved = []
    recurrent = set()
    try:
        for name, value in values.items():
            for module, key in places[name]:
                table: dict[str, Any] = (
                    module._buffers if key in module._buffers else module._parameters
                )
                saved.append((table, key, table[key]))
                table[key] = value
                if isinstance(module, nn.RNNBase):
                    recurrent.add(module)
        for module in recurrent:
            module._flat_weights = [getattr(module, key) for key in module._flat_weights_names]
        with _differentiable(recurrent) if recurrent else nullcontext():
            yield
    finally:
        for table, key, tensor in reversed(saved):
            table[key] = tensor
        for module in recurrent:
            module._flat_weights = [getattr(module, key) for key in module._flat_weights_names]


def _differentiable(recurrent: Iterable[nn.Module]) -> AbstractContextManager:
    """Turn cuDNN off for recurrent layers: in evaluation mode it has no derivatives, unlike torch's
    kernels."""
    if torch.is_grad_enabled() and any(not module.training for module in recurrent):
        return torch.backends.cudnn.flags(enabled=False)
    return nullcontext()
