"""Linear operations that latents enter: einsums, trackers, features of a last layer."""
