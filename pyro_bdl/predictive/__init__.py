"""Posterior predictive distributions: sampled, linearized, in closed form.

``sampled.py`` runs the program at draws of any posterior. ``linearized.py`` holds the predictive of
a Gaussian, or a mixture of Gaussians, ``members.py`` its members, batch by batch.
``predictor.py`` makes the one that a posterior is about; ``observations.py`` is what both say of an
observed site, always of y. Outputs as linear functions of the latents are in
``curvature/linear_outputs.py``, closed forms for Gaussian outputs in ``curvature/closed_forms.py``.
"""
