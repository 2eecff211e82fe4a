"""The GPU side, measured: `sh studies/gpu/run.sh` runs all of it."""
