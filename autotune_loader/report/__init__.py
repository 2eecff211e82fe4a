"""What people see of a run: a record goes in, and text, a frame, a figure or a page comes out.

result       the public `TuningResult` and `Comparison`: the records with the methods that show them
ranking      every configuration once, with its best evidence
text         a result or a comparison as text          frames   as pandas frames
plots        as matplotlib figures
script       what `watch` and `run` report             progress   a line for each trial while tuning
"""
