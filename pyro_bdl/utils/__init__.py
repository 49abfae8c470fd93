"""Helpers that know nothing of programs: memory, module state, random states, collectives."""
