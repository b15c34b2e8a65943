"""Tests and benchmarks. Ranks are forked and share the cores, so each has one thread.

Said here, before torch is imported: a thread pool does not survive a fork, and `torch.set_num_threads` makes
one.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
