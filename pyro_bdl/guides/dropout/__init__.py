"""MC dropout as a guide."""
