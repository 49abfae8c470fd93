"""The points where ArviZ 0.23 and 1.x differ, and which of the two is followed."""

CONVENTIONS = ("1.x", "0.23")


def check_convention(compat: str) -> None:
    """Raise unless ``compat`` names a convention.

    ``"1.x"`` is ArviZ 1.0 to 1.3 and, for PSIS, Vehtari et al. (2024); ``"0.23"`` is ArviZ 0.23.
    They differ in

    - quantiles of draws: the same ones, rounded otherwise, which counts where draws tie with them;
    - the tail of PSIS: floor(3 sqrt(S / r_eff)) of S draws against ceil and at most S / 5, and
      draws that tie with the threshold, which 0.23 leaves out;
    - the standard error of LOO: pointwise variance over N - 1 against N;
    - WAIC, which 1.x no longer has: variances over S - 1 and N - 1, as published, against S and N.
    """
    if compat not in CONVENTIONS:
        known = ", ".join(map(repr, CONVENTIONS))
        raise ValueError(f"compat={compat!r} is unknown; choose one of {known}")
