"""The machine as it is: cores, memory, GPUs, process trees, and the meters that watch them."""
