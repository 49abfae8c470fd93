"""Local latents whose posteriors an encoder computes from the data."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn

from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.mean_field import AutoMeanField
from pyro_bdl.guides.statements import sample_site
from pyro_bdl.program.layout import marginal
from pyro_bdl.program.parameter_namespace import OwnParameters
from pyro_bdl.program.program import Program, trace_once
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.one_thread import Hidden


class AutoAmortized(OwnParameters, AutoGuide):
    """q(w) prod_n q(z_n | x_n): local latents by encoders, all others by another guide.

    For each local site z an encoder gives the moments of its unconstrained value,

        q(z_n | x_n) = T(Normal(m_n, s_n^2)),    (m, s) = encoder(*args),

    so that the number of parameters does not grow with the data (Kingma & Welling 2014). The
    encoder is called with the program's arguments and returns two tensors (rows, *shape), s
    positive, with a row for each row of the arguments: all N rows if the program's plate picks some
    of them itself (``subsample_size``; the guide takes the same ones), and the rows of the batch if
    the program is called with minibatches (``subsample=``). New data have latents of their own,
    without any training: the guide computes them from the arguments that it is called with.

    :param model: a Pyro program.
    :param encoders: local site -> encoder, a module or a function.
    :param guide: the other latents' guide, made from the program without the local sites; by
        default ``AutoMeanField``.
    :param create_plates: as in Pyro's autoguides, for programs that are called with minibatches.
    :raises TypeError: for encoders that are no mapping from sites.
    :raises ValueError: at the first run, for a name that is no latent site; moments of another
        shape.
    :raises UnsupportedProgramError: at the first run, for a local site in no plate, or in several.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.AMORTIZED,)
    rest: AutoGuide | None

    def __init__(
        self,
        model: Callable,
        encoders: Mapping[str, Callable[..., tuple[Tensor, Tensor]]],
        *,
        guide: Callable[[Callable], AutoGuide] = AutoMeanField,
        create_plates: Callable | None = None,
    ) -> None:
        if not isinstance(encoders, Mapping) or not encoders:
            raise TypeError(
                "encoders must be a mapping from local sites to encoders, such as {'z': encoder}, "
                f"got {type(encoders).__name__}"
            )
        AutoGuide.__init__(self, model, create_plates=create_plates)
        self._take_name()
        self.rest = None
        self.__dict__["_make_rest"] = guide
        self.__dict__["_encoders"] = dict(encoders)
        for name, encoder in encoders.items():
            if isinstance(encoder, nn.Module):
                setattr(self, _attribute(name), encoder)

    def prototype(self, *args: Any, **kwargs: Any) -> "AutoAmortized":
        """Create the other guide's parameters by one run of the program; returns itself."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        return self

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        first = trace_once(self.model, args, kwargs, self._prototype_hide_fn)
        trace, latents = first.trace, Program.from_run(self.model, first, args, kwargs).latents
        for name in self._encoders:
            if name not in latents:
                known = ", ".join(map(repr, latents))
                raise ValueError(f"'{name}' is no latent site of the program; it has {known}")
            if len(latents[name].plates) != 1:
                where = " and ".join(map(repr, latents[name].plates)) or "no plate"
                raise UnsupportedProgramError(
                    f"the site '{name}' stands in {where}, and an encoder computes the latents of "
                    "the rows of one plate: leave it to the guide of the other latents"
                )
        self.__dict__["_local"] = {name: latents[name] for name in self._encoders}
        self._prototype_frames = {
            frame.name: frame
            for _, node in trace.iter_stochastic_nodes()
            for frame in node["cond_indep_stack"]
        }
        self.prototype_trace = trace
        others = [name for name in latents if name not in self._encoders]
        if others:
            self.rest = self._make_rest(poutine.block(self.model, hide=list(self._encoders)))
            self._create_plates(*args, **kwargs)
            with Hidden():  # a first step must not see its sites twice
                self.rest(*args, **kwargs)

    def _check_prototype(self, trace: Any) -> None:
        """The other guide's sites are the program's, since it is made from the program."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site; returns site -> value."""
        self.prototype(*args, **kwargs)
        moments = {name: self._moments(name, args, kwargs) for name in self._local}
        plates = self._plates_for(moments, args, kwargs)
        result = {} if self.rest is None else dict(self.rest(*args, **kwargs))
        for name, latent in self._local.items():
            (plate,) = latent.plates
            with plates[plate] as indices:
                loc, scale = (_rows(value, plates[plate], indices) for value in moments[name])
                lead = (1,) * (-plates[plate].dim - 1)
                loc, scale = (v.reshape(len(v), *lead, *v.shape[1:]) for v in (loc, scale))
                result[name] = sample_site(latent, marginal(latent, loc, scale))
        return result

    def _plates_for(
        self, moments: Mapping[str, tuple[Tensor, Tensor]], args: tuple, kwargs: dict
    ) -> dict[str, Any]:
        """The program's plates; other data than those of the first run have one of their own."""
        plates = self._create_plates(*args, **kwargs)
        for name, (loc, _) in moments.items():
            (plate,) = self._local[name].plates
            if len(loc) not in (plates[plate].size, plates[plate].subsample_size):
                plates[plate] = pyro.plate(plate, len(loc), dim=plates[plate].dim)
        return plates

    def _moments(self, name: str, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (rows, *shape) of a site's unconstrained value."""
        encoder = self._modules.get(_attribute(name), self._encoders[name])
        if isinstance(encoder, nn.Module) and any(p.requires_grad for p in encoder.parameters()):
            encoder = getattr(self, _attribute(name))  # which tells optimizers of its parameters
        latent, found = self._local[name], encoder(*args, **kwargs)
        shape = latent.unconstrained_shape
        shape = shape[len(shape) - latent.unconstrained_event_dim :]
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(f"the encoder of '{name}' must return mean and standard deviation")
        loc, scale = found
        if loc.shape[1:] != shape or scale.shape != loc.shape:
            raise ValueError(
                f"the encoder of '{name}' gave moments of shapes {tuple(loc.shape)} and "
                f"{tuple(scale.shape)}, and the site needs (rows, *{tuple(shape)})"
            )
        return loc, scale

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The posterior median of each site, of the local ones for the rows of the arguments."""
        self.prototype(*args, **kwargs)
        result = {} if self.rest is None else self.rest.median(*args, **kwargs)
        for name, latent in self._local.items():
            loc, _ = self._moments(name, args, kwargs)
            result[name] = loc if latent.transform is None else latent.transform(loc)
        return result

    def _shared_on_copy(self) -> tuple[str, ...]:
        return "_model", "master"


def _attribute(site: str) -> str:
    return "encoder_" + "".join(c if c.isalnum() else "_" for c in site)


def _rows(values: Tensor, plate: Any, indices: Tensor) -> Tensor:
    """The rows of a subsample where there are those of the whole plate."""
    if plate.subsample_size < plate.size == len(values):
        return values[indices.to(values.device)]
    return values
