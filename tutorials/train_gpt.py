"""Train a byte-level GPT on real English text, sharded over any number of ranks.

    torchrun --standalone --nproc-per-node 2 tutorials/train_gpt.py              # `make demo` runs this
    torchrun --standalone --nproc-per-node 4 tutorials/train_gpt.py --compare    # and then this
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        tutorials/train_gpt.py --dim 1024 --layers 24 --batch 256 --dtype bf16   # CUDA, two hosts

The text is the documentation that CPython ships in `pydoc_data.topics`, so nothing is downloaded. The file
reads in the order in which things happen: text, model, sharding, optimizer, training, checkpoint, sample.
`--compare` measures what each sharding strategy costs, as one would by hand.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import pydoc_data.topics
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from einops import rearrange
from support.measure import draw, local_of, measure, table
from support.progress import ProgressBar, say
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from shardkit import Blocks, MixedPrecisionPolicy, build_mesh, fully_shard
from shardkit.optim import AdamW8bit, Muon, Shampoo, block_for, split_params

CONTEXT = 64  # bytes that the model sees
STRATEGIES = ("ddp", "full", "no-reshard", "hybrid")
OptimizerName = Literal["adamw", "muon", "adamw8bit", "shampoo"]
# AdamW's and AdamW8bit's are the best of 0.75e-3, 1.5e-3, 3e-3 and 6e-3 in this very setting; of the others
# no second rate has been tried here.
RATES: dict[OptimizerName, float] = {"adamw": 1.5e-3, "muon": 1.2e-2, "adamw8bit": 1.5e-3, "shampoo": 6e-3}
BETAS, WEIGHT_DECAY, SHAMPOO_BLOCK = (0.9, 0.95), 0.1, 256
LAST_STEPS = 5  # trained twice: straight on, and from the checkpoint
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# ---- 1. The text -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on and bytes held out: whole topics, none of whose sentences the model sees."""

    train: Tensor  # (num_bytes,) int64
    held_out: Tensor  # (num_bytes,) int64

    @classmethod
    def load(cls, device: torch.device) -> Text:
        topics = [text.encode() for _, text in sorted(pydoc_data.topics.topics.items())]
        held_out = b"".join(topics[::10])
        train = b"".join(text for index, text in enumerate(topics) if index % 10)
        return cls(*(torch.tensor(list(part), device=device) for part in (train, held_out)))

    def batch(self, step: int, num_sequences: int) -> Tensor:
        """This rank's sequences of a step, (num_sequences, CONTEXT + 1): a function of step and rank alone.

        So a run that resumes needs no state of a data loader to see the same batches.
        """
        world_size, rank = dist.get_world_size(), dist.get_rank()
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.train) - CONTEXT, (num_sequences * world_size,), generator=generator)
        mine = starts[rank::world_size].to(self.train.device)
        return self.train[mine[:, None] + torch.arange(CONTEXT + 1, device=mine.device)]


# ---- 2. The model ------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention with rotary positions; normalised queries and keys bear a high learning rate."""

    def __init__(self, dim: int, head_dim: int = 64) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b t (qkv h d) -> qkv b h t d", qkv=3, d=self.head_dim)
        q, k = (rotate(F.rms_norm(part, (self.head_dim,))) for part in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(attended, "b h t d -> b t (h d)"))


class SwiGLU(nn.Module):
    """Two projections up, one gating the other, and one down."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = dim * 8 // 3 // 16 * 16
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    """A pre-norm transformer block; each will be one unit of sharding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(dim, eps=1e-6), Attention(dim)
        self.mlp_norm, self.mlp = nn.RMSNorm(dim, eps=1e-6), SwiGLU(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes (batch, time) to logits of the next byte (batch, time, 256)."""

    def __init__(self, dim: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, 256, bias=False)
        for name, param in self.named_parameters():
            if name == "head.weight" or name.endswith(("out.weight", "down.weight")):
                nn.init.zeros_(param)  # every block starts as the identity, and the loss at 8 bits a byte
            elif param.dim() == 2:
                nn.init.normal_(param, std=0.5 if name == "embed.weight" else 0.7 * param.shape[1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rotate(x: Tensor) -> Tensor:
    """Turn each pair of channels of x (..., time, head_dim) by an angle that grows with time."""
    half = x.shape[-1] // 2
    speeds = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds  # (time, half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


# ---- 3. Sharding -------------------------------------------------------------------------------------------


def shard(model: GPT, strategy: str, dtype: torch.dtype, optimizer: OptimizerName) -> nn.Module:
    """The model as each strategy keeps it. Except under DDP, it stays the same module, sharded in place.

    full        parameters, gradients and optimizer state are cut over all ranks; gathered block by block
    no-reshard  the same, but gathered blocks stay until their backward: one gather less, more memory
    hybrid      cut over half of the ranks, copies on the other half
    """
    device_type = model.head.weight.device.type
    if strategy == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    num_copies = 2 if strategy == "hybrid" else 1
    mesh = build_mesh(device_type, replicate=num_copies)
    for module in (*model.blocks, model):
        fully_shard(
            module,
            mesh["replicate", "shard"] if strategy == "hybrid" else mesh["shard"],
            reshard_after_forward=strategy != "no-reshard",
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            shard_placement_fn=lambda param: wish(param, optimizer),
        )
    return model


# ---- 4. The optimizer --------------------------------------------------------------------------------------


def wish(param: nn.Parameter, optimizer: OptimizerName) -> Blocks | None:
    """The layout that spares an optimizer its messages; None is FSDP2's."""
    return None if optimizer == "adamw" else block_for(param.shape, optimizer, block=SHAMPOO_BLOCK)


def make_optimizer(name: OptimizerName, model: nn.Module) -> Optimizer:
    """The named optimizer for the matrices inside the network, and AdamW for the rest in the same object."""
    if name == "adamw":
        return AdamW(model.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    matrices, rest = split_params(model, algorithm=name)
    rest["betas"] = BETAS
    if name == "muon":
        return Muon([matrices, rest], weight_decay=WEIGHT_DECAY)
    if name == "adamw8bit":
        return AdamW8bit([matrices, rest], betas=BETAS, weight_decay=WEIGHT_DECAY)
    return Shampoo(
        [matrices, rest], betas=BETAS, weight_decay=WEIGHT_DECAY, block=SHAMPOO_BLOCK, update_every=10
    )


# ---- 5. Training -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """What stays the same from the first step to the last."""

    text: Text
    options: argparse.Namespace
    device: torch.device

    def build(self, strategy: str) -> tuple[nn.Module, Optimizer]:
        """A fresh model, the same on all ranks, sharded, and its optimizer."""
        torch.manual_seed(0)
        with self.device:
            model = GPT(self.options.dim, self.options.layers)
        name = self.options.optimizer
        sharded = shard(model, strategy, DTYPES[self.options.dtype], name)
        return sharded, make_optimizer(name, sharded)

    def loss(self, model: nn.Module, sequences: Tensor) -> Tensor:
        """The mean cross-entropy of the next byte, in nats."""
        dtype = DTYPES[self.options.dtype]  # fully_shard casts by itself; DDP leaves it to autocast
        by_hand = isinstance(model, DistributedDataParallel) and dtype != torch.float32
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=by_hand):
            logits = model(sequences[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())

    def step(self, model: nn.Module, optimizer: Optimizer, step: int) -> float:
        """One update; returns this rank's loss. The gradients stay until the next step."""
        warm_up, decay = (step + 1) / 20, 1.67 * (1 - step / self.options.steps)
        for group in optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, warm_up, decay)
        optimizer.zero_grad()
        loss = self.loss(model, self.text.batch(step, self.options.batch // dist.get_world_size()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def held_out_bits(self, model: nn.Module, num_sequences: int) -> float:
        """Bits a byte on the first held-out sequences, shared out over the ranks: all ranks must call."""
        world_size, rank = dist.get_world_size(), dist.get_rank()
        sequences = self.text.held_out.unfold(0, CONTEXT + 1, CONTEXT)[:num_sequences]
        num_each = len(sequences) // world_size  # the same on every rank, as each forward is collective
        mine = sequences[rank::world_size][:num_each]  # (num_each, CONTEXT + 1)
        total = torch.stack([self.loss(model, part) * len(part) for part in mine.split(16)]).sum() / len(mine)
        dist.all_reduce(total)
        return total.item() / world_size / math.log(2)


def train(run: Run, model: nn.Module, optimizer: Optimizer, steps: range) -> list[dict[str, float]]:
    """Take the steps; returns the loss of each, in bits a byte, on held-out text too every now and then."""
    curve: list[dict[str, float]] = []
    bar = ProgressBar(steps, run.options.steps)
    for step in steps:
        point: dict[str, float] = {"step": step}
        if step == steps.start or step % 25 == 0:
            point["held_out"] = held_out = run.held_out_bits(model, 64)
        point["train"] = run.step(model, optimizer, step) / math.log(2)
        curve.append(point)
        bar.update(step, f"train {point['train']:.2f}, held-out {held_out:.2f} bits a byte")
    return curve


# ---- 6. The checkpoint -------------------------------------------------------------------------------------


def save(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write model and optimizer, each rank its own shards: all ranks must call.

    The new checkpoint takes its name only when it is whole, so a save that fails leaves the last good one.
    """
    partial, previous = folder.with_suffix(".partial"), folder.with_suffix(".previous")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    if dist.get_rank() == 0:
        shutil.rmtree(previous, ignore_errors=True)
        if folder.exists():
            folder.rename(previous)
        partial.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Read a checkpoint of any number of ranks into this many: all ranks must call."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


# ---- 7. A sample -------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(model: nn.Module, prompt: str, num_bytes: int, device: torch.device) -> str:
    """Continue the prompt. A forward gathers parameters, so all ranks must call; they draw the same text."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(num_bytes):
        logits = model(tokens[:, -CONTEXT:])[0, -1].float().cpu()
        drawn = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn[None].to(device)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


# ---- 8. What each strategy costs ---------------------------------------------------------------------------


def compare(run: Run) -> None:
    """Measure every strategy on these ranks, print the table and draw it beside the loss curve."""
    world_size, costs = dist.get_world_size(), []
    for strategy in STRATEGIES:
        if strategy == "hybrid" and world_size % 2:
            say("hybrid is left out: two copies need an even number of ranks")
            continue
        say(f"measuring {strategy} ...")
        costs.append(measure(strategy, run.build, run.step, run.options.compare_steps))
        gc.collect()
    where = "CUDA" if run.device.type == "cuda" else "CPU, live tensors"
    title = f"{world_size} ranks, MB a rank ({where})"
    say(f"\n{title}\n{table(costs)}")
    if dist.get_rank() == 0:
        out = run.options.out
        print(draw(costs, out / "curve.json", title, out / "demo.png"))


# ---- The whole ---------------------------------------------------------------------------------------------


def demo(run: Run) -> None:
    """Train, save, train on both straight and from the checkpoint, and let the model write."""
    options, checkpoint = run.options, run.options.out / "checkpoint"
    model, optimizer = run.build(options.strategy)
    num_params = sum(param.numel() for param in model.parameters())
    where = f"{dist.get_world_size()} ranks on {run.device.type}"
    say(f"{num_params / 1e6:.1f} M parameters, {options.optimizer}, strategy {options.strategy}, {where}")
    say(f"{len(run.text.train):,} bytes to train on, {len(run.text.held_out):,} held out")
    middle = max(0, options.steps - LAST_STEPS)
    curve = train(run, model, optimizer, range(middle))
    save(checkpoint, model, optimizer)
    say(f"checkpoint: {checkpoint}; the last steps, straight on and then from the checkpoint:")
    curve += train(run, model, optimizer, range(middle, options.steps))

    resumed, resumed_optimizer = run.build(options.strategy)
    load(checkpoint, resumed, resumed_optimizer)
    again = train(run, resumed, resumed_optimizer, range(middle, options.steps))
    for (name, param), other in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(local_of(param), local_of(other)), f"{name} differs after resuming"
    assert [point["train"] for point in again] == [point["train"] for point in curve[middle:]]
    say("the resumed run is equal to the bit")

    curve[-1]["held_out"] = run.held_out_bits(model, len(run.text.held_out))
    say(f"held-out text: {curve[0]['held_out']:.2f} -> {curve[-1]['held_out']:.2f} bits a byte")
    if dist.get_rank() == 0:
        (options.out / "curve.json").write_text(json.dumps(curve))
    say(f"a sample: {sample(model, 'The ', 160, run.device)!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT, sharded.")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step, over all ranks")
    parser.add_argument("--dim", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--optimizer", choices=RATES, default="adamw")
    parser.add_argument("--lr", type=float, help="default: what suits the optimizer")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="compute; gradients add in fp32")
    parser.add_argument("--strategy", choices=STRATEGIES, default="full")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="a folder that all hosts share")
    parser.add_argument("--compare", action="store_true", help="measure all strategies instead of training")
    parser.add_argument("--compare-steps", type=int, default=8, help="steps to time for each strategy")
    options = parser.parse_args()
    if options.lr is None:
        options.lr = RATES[options.optimizer]

    local_rank = int(os.environ["LOCAL_RANK"])
    on_cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
        make_deterministic()
    dist.init_process_group("nccl" if on_cuda else "gloo")
    if options.batch % dist.get_world_size():
        parser.error(f"--batch {options.batch} does not divide by {dist.get_world_size()} ranks")
    if dist.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
    run = Run(Text.load(device), options, device)
    (compare if options.compare else demo)(run)
    dist.destroy_process_group()


def make_deterministic() -> None:
    """Without this a CUDA run, resumed, is equal only nearly: some kernels add in any order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


if __name__ == "__main__":
    main()
