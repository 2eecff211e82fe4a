"""The GPU side, measured: does tuning reach what the device and the loader allow? `python -m studies.gpu --help`."""
