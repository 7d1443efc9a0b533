"""What `_compaction` needs of the `cython` module when it is interpreted and Cython is not installed."""

from contextlib import nullcontext

nogil = nullcontext()
