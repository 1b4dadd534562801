"""Array operations on a paged cache. `attention.py` is the way in; each backend is one file."""
