"""What this machine is and does.

`cgroups` and `limits` read bounds, `host` and `processes` the use of CPU and memory, `gpus` NVML; `facts` puts all of
it together. Only this package uses psutil (`host`, `processes`) and pynvml (`gpus`), and only when asked. Nothing here
needs torch; what an operating system does not tell is None, never zero.
"""
