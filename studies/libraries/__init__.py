"""tune() with other libraries: attempts.py asks, table.py has what is tried."""
