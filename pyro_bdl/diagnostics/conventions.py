"""The conventions of ArviZ 0.23 and 1.x, where they differ."""

CONVENTIONS = ("1.x", "0.23")


def check_convention(compat: str) -> None:
    """Check that ``compat`` names a convention.

    ``"1.x"`` is ArviZ 1.0 to 1.3 and, for PSIS, Vehtari et al. (2024); ``"0.23"`` is ArviZ 0.23.
    They differ in

    - quantiles of draws, which are rounded differently; this matters if draws are equal to a
      quantile;
    - the tail of PSIS: 1.x takes floor(3 sqrt(S / r_eff)) of S draws; 0.23 takes the ceiling, at
      most S / 5, and leaves out draws that are equal to the threshold;
    - the standard error of LOO: the pointwise variance has the divisor N - 1 in 1.x and N in 0.23;
    - WAIC, which ArviZ 1.x no longer has: ``"1.x"`` uses the divisors S - 1 and N - 1, as
      published, 0.23 uses S and N.
    """
    if compat not in CONVENTIONS:
        known = ", ".join(map(repr, CONVENTIONS))
        raise ValueError(f"compat={compat!r} is unknown; choose one of {known}")
