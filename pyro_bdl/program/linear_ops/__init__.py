"""Linear operations that latents enter: one table of them, views of latents, einsums."""
