"""What the compiled modules say to Cython's compiler, as it is for Python: without a meaning."""

from contextlib import nullcontext

nogil = nullcontext()
compiled = False
