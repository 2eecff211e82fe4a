"""The finished run: its record, `loader.json`, `load_config()`, fleets and the cache of earlier results."""
