"""The style of matplotlib's own figures."""

import matplotlib
from matplotlib import pyplot

from pyro_bdl import plots
from pyro_bdl.plots.style import COLORS


def test_own_figures_look_like_those_of_the_package():
    with matplotlib.rc_context():
        before = dict(matplotlib.rcParams)
        plots.styles(["a"])
        assert dict(matplotlib.rcParams) == before  # nothing changes without the call
        plots.use_style()
        figure, axis = pyplot.subplots()
        (line,) = axis.plot([0, 1])
        assert tuple(figure.get_size_inches()) == (5.0, 3.0)
        assert line.get_color() == COLORS[0]
        assert not axis.spines["top"].get_visible()
        pyplot.close(figure)
