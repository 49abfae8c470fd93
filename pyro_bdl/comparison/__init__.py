"""The comparison of posteriors: data, metrics and table of ``compare``.

``evaluate.py`` scores one posterior, ``table.py`` compares evaluations, ``compare.py`` does both.
"""
