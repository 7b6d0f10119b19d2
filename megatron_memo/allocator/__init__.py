"""The patched allocator: planned requests at planned addresses, everything else left to torch.

`face.get_allocator` builds, loads and installs it once a process; `record` makes a trace of what it
recorded. The C++ in csrc/core knows neither torch nor a device; csrc/cpu wraps torch's CPU
allocator. Importing this package imports no torch and installs nothing.
"""
