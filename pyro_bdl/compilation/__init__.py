"""One step of a loss as a graph of ATen operators: how it is traced, made small and run.

``graph.py`` what graphs of ATen operators are asked, ``tracing.py`` from a function to a graph and
what cannot be one, ``simplify.py`` fewer and cheaper operators, ``guards.py`` what a graph takes
for granted, ``step.py`` all of these together.
"""
