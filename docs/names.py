"""The public names of the package, and where the reference has them."""

import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path

REFERENCE = Path(__file__).parent / "pages" / "reference"
MODULE = re.compile(r"^::: (pyro_bdl(?:\.[a-z_]+)?)$", flags=re.MULTILINE)

# Members by module that the package's own files call, and no user: the reference leaves them out.
INTERNAL = {
    "pyro_bdl": "check_layers from_run require_observed with_run",
    "pyro_bdl.curvature": "empty memory",
    "pyro_bdl.distributed": "add_up check_same is_single joined part parts on_all_ranks whole "
    "begin_training check_data check_step record_terms take_step",
    "pyro_bdl.elbo": "begin_training check_data check_rows check_step flat_terms record_terms "
    "plain_step skip take_step",
    "pyro_bdl.evidence": "pure_loss",
    "pyro_bdl.guides": "adapt at batches curvature_diagonals forward get_extra_state "
    "at_parameters is_of noise_factor_at note_step number numbers numbers_drawn papers "
    "prior_quadratic read cached_parameters require_layout restored saved saved_parts "
    "set_extra_state site_distributions skip_steps sample_with_offset stored_precision update",
    "pyro_bdl.mcmc": "checks check_size papers settle settles shared_options transition",
    "pyro_bdl.models": "takes_missing",
    "pyro_bdl.optim": "begin_training check_data check_rows check_step flat_terms record_terms "
    "plain_step skip take_step",
    "pyro_bdl.priors": "labeled",
}


def modules():
    """Yield the page and the name of each module that a page of the reference is about."""
    for path in sorted(REFERENCE.glob("*.md")):
        for module in MODULE.findall(path.read_text(encoding="utf-8")):
            yield path, module


def public(module):
    """Return the public classes and functions of a module by name."""
    found = import_module(module)
    objects = {name: getattr(found, name) for name in found.__all__}
    return {
        name: value for name, value in objects.items() if inspect.getdoc(value) and callable(value)
    }


@cache
def targets():
    """Return where the reference has a class, a function or a method: name -> identifier.

    A name that two modules have is left out, as it would lead to one of them.
    """
    found, twice = {}, set()
    for _, module in modules():
        for name, value in public(module).items():
            twice |= {name} & found.keys()
            found[name] = identifier(module, name, value)
            if inspect.isclass(value):
                methods = [key for key in vars(value) if not key.startswith("_")]
                found |= {f"{name}.{key}": f"{found[name]}.{key}" for key in methods}
    return {name: where for name, where in found.items() if name.split(".")[0] not in twice}


def identifier(module, name, value):
    """Return the identifier of a public object in the reference."""
    is_file = inspect.isroutine(value) and value.__module__.endswith(f".{name}")
    return f"{value.__module__ if is_file else module}.{name}"  # a short path is then the module's


def linked(code):
    """Return the code of a name as a link to it, or as it is where the site has no such object."""
    name = code.strip("`")
    return f'<autoref identifier="{targets()[name]}" optional><code>{name}</code></autoref>'
