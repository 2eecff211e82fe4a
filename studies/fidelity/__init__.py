"""Does the probe tell the truth: the twin's predictions beside runs, and bursts beside training?"""
