"""What people see of a run: a record goes in, and text, a frame, a figure or a page comes out.

ranking.py   every configuration once, with its best evidence
text.py      a result or a comparison as text
frames.py    as pandas frames
plots.py     as matplotlib figures
page.py      as an HTML page
perfetto.py  the batches of loaders as a file for ui.perfetto.dev
script.py    what `watch` and `run` report
progress.py  a line for each trial while tuning
"""
