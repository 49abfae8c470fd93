"""Published results on the UCI sets, standard splits: mean and standard error over splits.

Dropout is the grid search of github.com/yaringal/DropoutUncertaintyExps, on the same splits; VI is
Graves (2011) as in table 1 of Gal & Ghahramani (2016), on the same splits; the ensemble of ten and
the point (without errors) are those of github.com/google/uncertainty-baselines, baselines/uci,
on splits of its own.
"""

Figures = dict[str, tuple[float, float | None]]

DROPOUT_RMSE: Figures = {
    "boston": (2.90, 0.18), "concrete": (4.83, 0.16), "energy": (0.54, 0.01),
    "power": (4.01, 0.04), "protein": (4.27, 0.02), "wine": (0.62, 0.01), "yacht": (0.67, 0.05),
}  # fmt: skip
LOG_LIKELIHOOD: dict[str, Figures] = {
    "MC dropout": {
        "boston": (-2.40, 0.04), "concrete": (-2.94, 0.03), "energy": (-1.21, 0.01),
        "power": (-2.81, 0.01), "protein": (-2.87, 0.00), "wine": (-0.93, 0.01),
        "yacht": (-1.25, 0.01), "kin8nm": (1.14, 0.01), "naval": (4.45, 0.00),
    },
    "mean-field": {
        "boston": (-2.90, 0.07), "concrete": (-3.39, 0.02), "energy": (-2.39, 0.03),
        "power": (-2.89, 0.01), "protein": (-2.99, 0.01), "wine": (-0.98, 0.01),
        "yacht": (-3.43, 0.16), "kin8nm": (0.90, 0.01), "naval": (3.73, 0.12),
    },
    "ensemble": {
        "boston": (-6.11, None), "concrete": (-3.20, None), "energy": (-0.61, None),
        "power": (-3.18, None), "protein": (-3.12, None), "wine": (-0.97, None),
        "yacht": (-0.73, None), "kin8nm": (1.17, None), "naval": (5.17, None),
    },
    "MAP": {
        "boston": (-16.11, None), "concrete": (-3.94, None), "energy": (-1.29, None),
        "power": (-3.28, None), "protein": (-3.16, None), "wine": (-1.05, None),
        "yacht": (-1.89, None), "kin8nm": (1.06, None), "naval": (5.06, None),
    },
}  # fmt: skip
