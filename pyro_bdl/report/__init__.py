"""One self-contained HTML file: warnings, verdicts, a sortable table, figures and settings.

The file needs no network and refuses to use one (a content security policy says so). It follows
the reader's light or dark theme, scrolls its table sideways on a phone and prints in light colors.
"""

from pyro_bdl.report.write import write_report

__all__ = ["write_report"]
