"""Speed, memory and traffic side by side: bare torch, DDP, torch FSDP2 and shardkit in one run.

`python -m tests.bench` runs every section and prints its table. A section is one file with `measure`, which
starts processes and gives samples, and `rows`, which is pure and compares them with the section's bars.
Ratios come from one run on one machine: gloo on CPUs, no GPU.
"""
