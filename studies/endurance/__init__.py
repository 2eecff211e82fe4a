"""Does anything break, stay or get lost when very much goes wrong? 1,000 trials with faults, and 50 kills of a whole run."""
