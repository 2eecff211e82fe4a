"""Is a dataset that is read from a disk measured from the disk?"""
