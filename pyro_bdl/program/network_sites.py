"""The sites of a network's weights, and the keys that mark them."""

from torch import nn

INIT_KEY = "pyro_bdl_init"  # in a site's ``infer``: the value that the network has
OWNER_KEY = "pyro_bdl_owner"  # in a site's ``infer``: the module and attribute that hold that value


class SampledNetwork:
    """Base of modules that sample a network's weights.

    :param network: the network.
    :param site_prefix: the site of the parameter ``name`` is ``site_prefix + name``.
    """

    network: nn.Module
    site_prefix: str
