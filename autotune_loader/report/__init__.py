"""What people see of a run: frame, text, progress, pictures, page.

A `TuningResult` goes in, and a frame, a string or a figure comes out; statistics come from `stats`. Pretty units occur
here and in `cli`, nowhere else. rich, pandas and matplotlib are imported where they are used.
"""
