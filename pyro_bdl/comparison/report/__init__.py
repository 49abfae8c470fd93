"""One self-contained HTML file: the answer, a picture of cost against distance, a ranked table,
figures and settings.

The file needs no network and refuses to use one (a content security policy says so). It follows
the reader's light or dark theme, figures included, scrolls its table sideways below a fixed first
column and prints in light colors.
"""
