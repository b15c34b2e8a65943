"""Tests and benchmarks. Ranks are forked and share the cores, so each has one thread.

Said here, before torch is imported: a thread pool does not survive a fork, and `torch.set_num_threads` makes
one. Nor does CUDA, which an optimizer's step starts where there is a GPU, as it does in the process that
forks (`support/ranks.py`): so there is none, but for the ranks that `gpu/one_gpu.py` shows it to.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

VISIBLE_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")  # None: all
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # ask the driver's library, which starts nothing
