"""The finished run: its record, `loader.json`, `load_config()`, and what a comparison found."""
