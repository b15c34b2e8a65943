"""Train with Muon and AdamW in one optimizer, and see that it learns faster than AdamW alone.

    python tutorials/05_muon.py

`split_params` sends the matrices inside the network to Muon and the rest to AdamW, and says why. The plan
says who works on which matrix and what travels: the layout was asked for whole matrices, so hardly anything
does. On two ranks it prints

    muon: 8 parameters, as blocks.0.attention.qkv.weight: a matrix
    adamw: 7 parameters, as embed.weight: an embedding
    piece                                   matrix  mode          rank       moved      FLOPs
    blocks.0.attention.qkv.weight         192 x 64  local            1         0 B   1.84e+07
    ...
    blocks.1.attention.out.weight          64 x 64  owner            0     16.4 kB   7.86e+06
    ...
    7 parameters elementwise, where they lie: nothing travels
    ...
    Muon's held-out loss is below AdamW's after as many steps

Where this was written the losses were 2.86 and 3.83 bits a byte; runs/muon.png shows both curves.
"""

from __future__ import annotations

from support.progress import say
from support.race import WEIGHT_DECAY, race, routed_groups
from support.ranks import run_on_ranks
from torch import nn

from shardkit.optim import Muon

LR = 3.2e-2  # of 8e-3, 16e-3, 32e-3, 64e-3


def make(model: nn.Module) -> Muon:
    optimizer = Muon(routed_groups(model, "muon"), lr=LR, weight_decay=WEIGHT_DECAY)
    say(f"{optimizer.plan()}")
    return optimizer


def main() -> None:
    adamw, muon = race("Muon", "muon", make)
    assert muon < adamw, (muon, adamw)
    say("Muon's held-out loss is below AdamW's after as many steps")


if __name__ == "__main__":
    run_on_ranks(main, world_size=2)
