"""Pages outside the device: host memory, memory-mapped files, saved prefix caches."""
