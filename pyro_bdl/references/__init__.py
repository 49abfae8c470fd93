"""Reference posteriors of small problems, to judge other posteriors by.

Each holds data, a program, and draws of a long NUTS run at the test inputs::

    reference = bdl.references.load("energy")
    model, data = reference.program(), reference.dataset
    ...                                  # fit a guide to data.x_train, data.y_train
    bdl.compare(model, {"mine": guide, "nuts": reference.draws()}, data.x_test, data.y_test)
"""

from pyro_bdl.references.reference import Reference, load, names

__all__ = ["Reference", "load", "names"]
