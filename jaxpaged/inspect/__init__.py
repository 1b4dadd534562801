"""Compile for a GPU that is not there, read what the compiler made, and run kernels with checked memory."""
