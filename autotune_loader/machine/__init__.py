"""The machine as it is: cores, memory, process trees, and the meters that watch them."""
