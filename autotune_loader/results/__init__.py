"""The finished run: its record, `loader.json`, `load_config()` and the cache of earlier results."""
