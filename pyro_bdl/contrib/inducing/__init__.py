"""Global inducing points: the guide, its layers, and the law of one layer's weights."""
